"""Products of few rows, at the speed of reading the weights (include/dicp_gemv.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.ir import index as ix
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import FLOATS, dtype_of
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.toolchain import cpu_flags

FEW_ROWS = 8
"""Rows up to which the template is ahead of oneDNN and MKL for weights that come from memory: it reads each
weight once, at memory's speed; with more rows the multiplications take longer, and theirs are faster."""
FEW_ROWS_BF16 = 16
"""The same of bf16 where the processor multiplies its pairs and W's depth is dense: each takes less time."""
FEW_ROWS_BF16_BY_COLUMNS = 4
"""The same of bf16 where W's columns are dense: pairs along the depth have to be interleaved."""

_PARAMETERS = (
    "const {T}* x, const {W}* w, const {S}* scale, const {T}* bias, const {T}* other, {T}* y, "
    "const int64_t* sizes"
)
_SOURCE = """\
#include "dicp_gemv.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  return gemv<{rows}, {across}, {act}>(x, w, scale, bias, other, y, sizes);
}}
"""


@dataclass(frozen=True)
class Operands:
    """Positions of a call's operands: y = act(x w * scale + bias) + other. x: [(B,) ..., K].

    transposed: w is [(B,) N, K], else [(B,) K, N].
    """

    x: int
    w: int
    bias: int | None = None
    other: int | None = None
    scale: int | None = None
    transposed: bool = False
    act: str = "none"


def gemv(label: str, node: fx.Node, at: Operands) -> Claim | None:
    """The claim by this template, where rows are few and operands of a dtype it reads."""
    dtype, w = dtype_of(node), dtype_of(node.args[at.w])
    if dtype not in FLOATS or dtype_of(node.args[at.x]) != dtype or w not in (dtype, torch.int8):
        return None
    if not _few(node, at):
        return None
    return Claim(
        f"{label}: few rows",
        lambda writer, call: _emit(writer, call, at),
        out=True,
        prepare=lambda lowering, n, args: _prepare(lowering, args, at),
    )


def _few(node: fx.Node, at: Operands) -> bool:
    """Whether a product has few rows (of a batch), whatever the sizes that vary."""
    shape, w = node.meta["val"].shape, node.args[at.w].meta["val"]  # type: ignore[union-attr]
    lead = shape[-2:-1] if _batched(node) else shape[:-1]
    if not all(isinstance(n, int) for n in lead):
        return False
    most = FEW_ROWS
    if w.dtype == torch.bfloat16 and size_hint(w.stride(-1 if at.transposed else -2)) != 1:
        most = FEW_ROWS_BF16_BY_COLUMNS
    elif w.dtype == torch.bfloat16 and "avx512_bf16" in cpu_flags():
        most = FEW_ROWS_BF16
    return int(torch.Size(lead).numel()) <= most


def _batched(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.bmm.default


def _prepare(lowering: Any, args: Sequence[Any], at: Operands) -> Sequence[Any]:
    """Dense rows of x, dense bias and other, and a weight of which one dim is dense."""
    args = list(args)
    for k in (at.bias, at.other, at.scale):
        if k is not None and k < len(args) and args[k] is not None:
            args[k] = lowering.operand(args[k], dense=True)
    x, w = lowering.operand(args[at.x]), lowering.operand(args[at.w])
    by_rows = len(x.shape) == len(w.shape) and x.strides[-1] == 1
    args[at.x] = x if by_rows else lowering.operand(args[at.x], dense=True)
    args[at.w] = w if 1 in w.strides[-2:] else lowering.operand(args[at.w], dense=True)
    return args


def _emit(writer: Any, call: Call, at: Operands) -> None:
    args = [*call.args, *[None] * 5]
    x, w, y = args[at.x], args[at.w], call.outputs[0]
    bias, other, scale = (None if k is None else args[k] for k in (at.bias, at.other, at.scale))
    n, k = (-2, -1) if at.transposed else (-1, -2)
    # where both dims are dense, one of them has a single element
    across = not (w.strides[k] == 1 and (w.strides[n] != 1 or w.shape[n] == 1))
    columns, depth = w.shape[n], w.shape[k]
    batch = len(w.shape) == 3
    rows = x.shape[1] if batch else ix.product(x.shape[:-1])
    flat = len(x.shape) == len(w.shape)
    kinds = {"T": y.dtype, "W": w.buffer.dtype, "S": torch.float32 if scale is None else scale.buffer.dtype}
    sizes, _ = writer.ints(
        [x.shape[0] if batch else 1, rows, columns, depth]
        + [x.strides[0] if batch else 0, x.strides[-2] if flat else depth]
        + [y.strides[0] if batch else 0, columns]
        + [0, 0 if other is None else columns]
        + [w.strides[0] if batch else 0, w.strides[k if across else n]]
        + [0, 0 if scale is None or scale.shape in ((), (1,)) else 1]
    )
    name = _template(writer, kinds, rows if isinstance(rows, int) else 0, across, at.act)
    pointers = [writer.pointer_to(v) for v in (x, w, scale, bias, other)]
    writer.call(call, name, [*pointers, writer.pointer(y), sizes])


def _template(writer: Any, kinds: dict[str, torch.dtype], rows: int, across: bool, act: str) -> str:
    words = {letter: STORAGE[dtype] for letter, dtype in kinds.items()}
    distinct = "_".join(dict.fromkeys(words.values()))
    name = f"gemv{rows}_{distinct}_{act}{'_across' if across else ''}"
    parameters = _PARAMETERS.format(**words)
    source = _SOURCE.format(
        name=name, parameters=parameters, rows=rows, across=str(across).lower(), act=act.upper()
    )
    return str(writer.template(name, parameters, source))


__all__ = ["FEW_ROWS", "Operands", "gemv"]
