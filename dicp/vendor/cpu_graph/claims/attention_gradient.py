"""The gradients of attention: by tiles (include/dicp_attention_grad.h), or by ATen's flash kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.attention import (
    FEW_ROWS,
    addressed,
    attention_args,
    dense_depth,
    mask_strides,
    multiplied,
)
from dicp.vendor.cpu_graph.claims.common import SHIM, argument, rows
from dicp.vendor.cpu_graph.expression import STORAGE, literal

_PARAMETERS = (
    "const {T}* grad, const {T}* q, const {T}* k, const {T}* v, const {T}* out, const float* log_sum, "
    "const {M}* mask, {T}* dq, {T}* dk, {T}* dv, const int64_t* sizes, double scale, bool causal"
)
_SOURCE = """\
#include "dicp_attention_grad.h"
using namespace dicp;

// of softmax(scale Q K^T + mask) V
DICP_EXPORT int32_t {name}({parameters}) {{
  return flash_attention_gradient(grad, q, k, v, out, log_sum, mask, dq, dk, dv, sizes, scale, causal);
}}
"""


def flash_backward(node: fx.Node, config: Config) -> list[Claim]:
    def emit(w: Any, c: Call) -> None:
        tensors, p, causal = c.args[:6], c.args[6], c.args[7]
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu_backward",
            [
                *(w.tensor(t) for t in tensors),
                repr(float(p)),
                str(int(causal)),
                *attention_args(w, c.kwargs.get("attn_mask"), c.kwargs.get("scale")),
            ],
        )

    library = Claim("attention backward: flash", emit, prepare=rows(0, 1, 2, 3, 4))
    own = Claim("attention backward: tiles", _emit, out=True, prepare=_prepare)
    return [own, library] if config.numerics != "eager" and _tiled(node) else [library]


def _tiled(node: fx.Node) -> bool:
    """Whether the micro-kernels and the tiles' layout allow ours."""
    q, k, v = node.args[1:4]
    x, depths = q.meta["val"], [a.meta["val"].shape[-1] for a in (q, v)]  # type: ignore[union-attr]
    return (
        argument(node, 6, "dropout_p", 0.0) == 0.0
        and addressed((q, k, v), node.kwargs.get("attn_mask"))
        and multiplied(x.dtype) == x.dtype
        and size_hint(x.shape[2]) >= FEW_ROWS
        and all(d % 2 == 0 and d <= 256 for d in depths)
    )


def _prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    return [*(dense_depth(lowering, a) for a in args[:5]), *args[5:]]


def _emit(w: Any, c: Call) -> None:
    grad, q, k, v, out, log_sum = c.args[:6]
    results = [b for b in c.outputs[:3] if b is not None]
    added = c.kwargs.get("attn_mask")
    mask = added if isinstance(added, View) else None
    name, parameters, source = unit(q.buffer.dtype, (mask or q).buffer.dtype)
    w.template(name, parameters, source)
    sizes, _ = w.ints(
        [*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]]
        + [s for x in (q, k, v, out) for s in x.strides[:3]]
        + list(log_sum.strides)
        + (mask_strides(mask) if mask is not None else [0, 0, 0, 0])
        + [s for x in (grad, *results) for s in x.strides[:3]]
    )
    pointers = [w.pointer_to(x) for x in (grad, q, k, v, out, log_sum, mask)]
    pointers += [w.pointer(b) for b in results]
    scale = c.kwargs.get("scale")
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    w.call(c, name, [*pointers, sizes, literal(factor, torch.float64), str(bool(c.args[7])).lower()])


def unit(dtype: torch.dtype, mask: torch.dtype) -> tuple[str, str, str]:
    """Name, parameters and source of the template's function for operands and a mask (or operands again)."""
    kinds = {"T": STORAGE[dtype], "M": STORAGE[mask]}
    name = "_".join(["flash_attention_gradient_of", *dict.fromkeys(kinds.values())])
    parameters = _PARAMETERS.format(**kinds)
    return name, parameters, _SOURCE.format(name=name, parameters=parameters)


__all__ = ["flash_backward", "unit"]
