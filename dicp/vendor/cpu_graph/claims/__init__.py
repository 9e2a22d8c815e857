"""What cpu_graph gives to libraries, and which library serves it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.passes.freeze import is_constant
from dicp.runtime.cpu import cpu_maker
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims import (
    attention,
    attention_gradient,
    convolution,
    depthwise,
    embedding,
    group_scaled,
    grouped,
    linears,
    matmul,
    others,
    rectified,
    separable,
    winograd,
)
from dicp.vendor.cpu_graph.claims.common import (
    ACTIVATIONS,
    FLOATS,
    LOW,
    aten,
    dtype_of,
    multiplies,
    multiplies_int8,
    onednn_has,
)
from dicp.vendor.cpu_graph.claims.conv_products import is_frozen_product, matmul_pays
from dicp.vendor.cpu_graph.claims.matmul import prefers_onednn

__all__ = [
    "candidates",
    "computes_wide",
    "cpu_maker",
    "keeps",
    "matmul_pays",
    "prefers_onednn",
    "supports",
]


def candidates(node: fx.Node, config: Config) -> list[Claim]:
    """The calls that could serve a node, the heuristic's choice first; under numerics="eager" the one
    that eager makes, so that results have its bits."""
    make = _table().get(node.target) or _FOREIGN.get(str(node.target))
    if make is None or _empty(node):
        return []
    found = make(node, config)
    return found if isinstance(found, list) else [found] if found is not None else []


def _empty(node: fx.Node) -> bool:
    """Whether an operand has no elements: libraries differ on what that means."""
    vals = [a.meta.get("val") for a in node.all_input_nodes]
    return any(isinstance(n, int) and n == 0 for v in vals if isinstance(v, torch.Tensor) for n in v.shape)


def keeps(op: Any) -> bool:
    """Whether some use of the op is claimed."""
    return op in _table() or op is aten._int_mm.default and multiplies_int8()


def supports(target: Any, node: fx.Node) -> bool:
    """Whether there is code for this call of a dicp::* op (`node`, which need not be in the graph yet)."""
    dtype = dtype_of(node)
    if _empty(node):
        return False
    if target is torch.ops.dicp.linear.default:
        w = node.args[1].meta["val"]
        packed = is_constant(node.args[1]) and matmul.packs(node) is not None
        if packed or w.stride(0) == 1 != w.stride(1):
            return packed  # oneDNN and the tiles read rows of weights
        ours = matmul.reads_weights(node) or matmul.prefers_pairs(node) or matmul.prefers_tiles(node)
        return ours or prefers_onednn(node)
    if target is torch.ops.dicp.scaled_linear.default:
        return bool(matmul.scaled_linear(node, None))
    if target is torch.ops.dicp.group_scaled_linear.default:
        return group_scaled.group_scaled(node, None) is not None
    if target is torch.ops.dicp.linears.default:
        return linears.linears(node, None) is not None
    if target is torch.ops.dicp.conv.default:
        if node.args[8] in rectified.TOPS:
            if winograd.is_ahead(node) or depthwise.is_ahead(node):
                return True
            return rectified.serves(node) and not is_frozen_product(node, activated=True)
        if node.args[8] not in (("none",) if node.args[3] is not None else ACTIVATIONS):
            return False  # oneDNN's sums know no activation but ReLU
        if node.args[3] is not None and node.meta["val"].dim() == 3:
            return False  # nor rows: only images and volumes
        return onednn_has(dtype)
    if target is torch.ops.dicp.attention.default:
        return attention.supports(node)
    if target is torch.ops.dicp.separable.default:
        return separable.supports(node)
    if target is torch.ops.dicp.add_rows.default:
        return embedding.add_rows(node, None) is not None
    return dtype in FLOATS


def computes_wide(node: fx.Node) -> bool:
    """Whether a contraction of a low precision is better computed in float32: where the libraries have no
    products of it, and no template of ours reads the operands as they are."""
    dtype = next((d for a in node.all_input_nodes if (d := dtype_of(a)) in LOW), None)
    if dtype is None or multiplies(dtype) or _empty(node):
        return False
    if attention.is_forward(node):
        # ATen's kernels widen tiles of bfloat16 themselves, and are as fast as in float32
        return dtype == torch.float16 and not attention.reads_operands(node)
    return not matmul.reads_weights(node) and not matmul.prefers_tiles(node)


# Ops of other libraries, which are there only where those are imported.
_FOREIGN = {grouped.FALLBACK: grouped.grouped, grouped.FALLBACK_BACKWARD: grouped.grouped}


@functools.cache
def _table() -> dict[Any, Callable[..., list[Claim] | Claim | None]]:
    from dicp.ops.library import register

    register()
    return {
        aten.mm.default: matmul.mm,
        aten.addmm.default: matmul.addmm,
        aten.bmm.default: matmul.bmm,
        aten._grouped_mm.default: grouped.grouped,
        aten.baddbmm.default: matmul.baddbmm,
        torch.ops.dicp.linear.default: matmul.linear,
        torch.ops.dicp.scaled_linear.default: matmul.scaled_linear,
        torch.ops.dicp.group_scaled_linear.default: group_scaled.group_scaled,
        torch.ops.dicp.linears.default: linears.linears,
        torch.ops.dicp.conv.default: convolution.conv,
        torch.ops.dicp.separable.default: separable.separable,
        torch.ops.dicp.attention.default: attention.attention,
        aten.convolution.default: convolution.convolution,
        aten.embedding_dense_backward.default: embedding.embedding_backward,
        torch.ops.dicp.add_rows.default: embedding.add_rows,
        aten.convolution_backward.default: convolution.convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: attention.flash,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_gradient.flash_backward,
        aten.max_pool2d_with_indices.default: others.pool,
        aten.max_pool2d_with_indices_backward.default: others.pool,
        aten.native_dropout.default: others.dropout,
        aten.sort.default: others.sort,
        aten.sort.stable: others.sort,
        aten.topk.default: others.topk,
    }
