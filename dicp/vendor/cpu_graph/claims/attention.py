"""Attention by the flash kernels of ATen's CPU library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import SHIM, argument, memory_order, rows


def _attention_args(w: Any, mask: View | None, scale: float | None) -> list[str]:
    out = [w.optional(mask)]
    if scale is None:
        return [*out, "nullptr"]
    w.lines.append(f"double scale = {float(scale)!r};")
    return [*out, "&scale"]


def _attention_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """The library's answer lies in memory as the query does."""
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    shape = tuple(lowering.index(s) for s in vals[0].shape)
    return [dense_strides(shape, memory_order(args[0])), *[None] * (len(vals) - 1)]


def attention(node: fx.Node) -> Claim | None:
    causal, scale = argument(node, 4, "causal", False), argument(node, 5, "scale", None)

    def emit(w: Any, c: Call) -> None:
        q, k, v, mask = c.args[:4]
        head = [
            w.tensor(q),
            w.tensor(k),
            w.tensor(v),
            "0.0",
            str(int(causal)),
            *_attention_args(w, mask, scale),
        ]
        logsumexp = w.fresh("logsumexp")
        w.hoisted.append(f"Tensor {logsumexp};")
        w.call(c, SHIM + "_scaled_dot_product_flash_attention_for_cpu", head, extra=[f"&{logsumexp}.h"])

    return Claim("attention: flash", emit, strides=_attention_strides, prepare=rows(0, 1, 2, 3))


def flash(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        q, k, v = c.args[:3]
        p, causal = (*c.args[3:5], 0.0, False)[:2] if len(c.args) > 3 else (0.0, False)
        if len(c.args) == 4:
            causal = False
        mask, scale = c.kwargs.get("attn_mask"), c.kwargs.get("scale")
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu",
            [
                w.tensor(q),
                w.tensor(k),
                w.tensor(v),
                repr(float(p)),
                str(int(causal)),
                *_attention_args(w, mask, scale),
            ],
        )

    return Claim("attention: flash", emit, strides=_attention_strides, prepare=rows(0, 1, 2))


def flash_backward(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        tensors, p, causal = c.args[:6], c.args[6], c.args[7]
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu_backward",
            [
                *(w.tensor(t) for t in tensors),
                repr(float(p)),
                str(int(causal)),
                *_attention_args(w, c.kwargs.get("attn_mask"), c.kwargs.get("scale")),
            ],
        )

    return Claim("attention backward: flash", emit, prepare=rows(0, 1, 2, 3, 4))
