"""A whole layer of torch.nn.TransformerEncoder, which its module calls as one operator in inference."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

# What `mask` is by its number: of shape [T, T], [B, T]; else [B, H, T, T].
_OF_POSITIONS, _OF_KEYS = 0, 1


def encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """Attention, two linear layers and two norms of src [B, T, D]. mask: True, or not zero, where a position
    takes no part. NotImplemented for nested tensors, which fake tensors are not."""
    if src.is_nested or src.dim() != 3:
        return NotImplemented

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    context = _attention(F.linear(x, qkv_weight, qkv_bias), num_heads, mask, mask_type)
    x = F.linear(context, proj_weight, proj_bias) + src
    x = x if norm_first else norm(x, norm_weight_1, norm_bias_1)
    inner = F.linear(norm(x, norm_weight_2, norm_bias_2) if norm_first else x, ffn_weight_1, ffn_bias_1)
    x = F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2) + x
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def _attention(qkv: Any, heads: int, mask: Any, mask_type: int | None) -> Any:
    """[B, T, D] of queries, keys and values [B, T, 3 * D]. A row whose mask leaves no position is NaN, as the
    operator's own softmax makes it; of F.scaled_dot_product_attention it is 0."""
    batch, length, _ = qkv.shape
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        closed = _to_scores(mask, mask_type)
        out = F.scaled_dot_product_attention(q, k, v, ~closed)
        out = torch.where(closed.all(-1, keepdim=True), math.nan, out)
    return out.transpose(1, 2).reshape(batch, length, -1)


def _to_scores(mask: Any, mask_type: int | None) -> Any:
    """The mask as a bool tensor that broadcasts to [B, H, T, T]; what was expanded, once."""
    if mask_type == _OF_KEYS:
        mask = mask[:, None, None]
    elif mask_type == _OF_POSITIONS:
        mask = mask[None, None]
    for dim in (0, 1):
        if isinstance(mask.stride(dim), int) and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.to(torch.bool)
