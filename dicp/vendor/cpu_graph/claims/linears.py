"""Linear layers of the same few rows, with a gate behind them or side by side: one parallel loop for all
(include/dicp_linears.h), which starts once, shares out narrow layers evenly and keeps no gate in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from dicp.config import Config
from dicp.ops.library import NARROW_WEIGHTS
from dicp.passes.freeze import is_constant
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import FLOATS, activation_of
from dicp.vendor.cpu_graph.claims.gemv import are_few
from dicp.vendor.cpu_graph.claims.matmul import FEW_BYTES
from dicp.vendor.cpu_graph.claims.operands import product_words
from dicp.vendor.cpu_graph.expression import STORAGE

MOST = 8  # layers of a call

_OF_LAYER = "const {W}* w{i}, const {S}* scale{i}, const {T}* bias{i}, {T}* y{i}, const int64_t* sizes{i}"
_SOURCE = """\
#include "dicp_linears.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  const Limits limits{{low, high}};
  const Layer<{T}, {W}, {S}> layers[] = {{
    {layers},
  }};
  return {call};
}}
"""


def linears(node: fx.Node, config: Config | None) -> Claim | None:
    """Where a call for each would be the template's for few rows; norms are kernels of their own."""
    x, norm, ws, scales, bs = (map_arg(node.args[k], lambda n: n.meta["val"]) for k in (0, 1, 3, 4, 5))
    if norm is not None or len(ws) > MOST or x.dtype not in FLOATS:
        return None
    if not all(isinstance(n, int) and n > 0 for v in (x, *ws) for n in v.shape):
        return None
    kind, scaled = ws[0].dtype, [v.dtype for v in scales]
    alike = all(w.dtype == kind and w.stride(1) == 1 for w in ws) and len(set(scaled)) < 2
    if not alike or kind not in (x.dtype, *NARROW_WEIGHTS) or not STORAGE.keys() >= set(scaled):
        return None
    rows, constant = math.prod(x.shape[:-1]), any(map(is_constant, node.args[3]))  # type: ignore[arg-type]
    if any(b.dtype != x.dtype for b in bs) or not are_few(rows, x.shape[-1], kind, constant=constant):
        return None
    if sum(w.numel() * w.element_size() for w in ws) < FEW_BYTES:
        return None
    return Claim("linears: few rows", _emit, out=True, prepare=_prepare)


def unit(rows: int, count: int, kinds: Mapping[str, str], act: str, gated: bool) -> tuple[str, str, str]:
    """Name, parameters and source of the template's function for so many rows and layers, and the storage
    types T, W and S of the operands, weights and scales."""
    word, _ = activation_of(act)
    what = "gated" if gated else f"linears{count}"
    name = f"{what}_{rows}_{'_'.join(dict.fromkeys(kinds.values()))}_{word}"
    of_layers = ", ".join(_OF_LAYER.format(i=i, **kinds) for i in range(count))
    limits = ["UNLIMITED" if gated and i else "limits" for i in range(count)]
    layers = [
        f"{{*(const Product*)sizes{i}, w{i}, {{scale{i}, bias{i}, nullptr, {by}}}, y{i}}}"
        for i, by in enumerate(limits)
    ]
    parameters = f"const {kinds['T']}* x, {of_layers}, float low, float high"
    arguments = "(x, layers)" if gated else f"(x, layers, {count})"
    source = _SOURCE.format(
        name=name,
        parameters=parameters,
        layers=",\n    ".join(layers),
        call=f"{'gated' if gated else 'linears'}<{rows}, {word.upper()}>{arguments}",
        **kinds,
    )
    return name, parameters, source


def _prepare(lowering: Any, node: fx.Node, args: Any) -> Any:
    """Rows of x are dense, and what is added and multiplied by; of weights, each row."""
    x, norm, eps, ws, scales, bs, *how = args

    def rows(w: Any) -> View:
        window: View = lowering.operand(w)
        return window if window.strides[1] == 1 else lowering.operand(w, dense=True)

    added = [[lowering.operand(v, dense=True) for v in given] for given in (scales, bs)]
    return [lowering.operand(x, dense=True), norm, eps, [rows(w) for w in ws], *added, *how]


def _emit(writer: Any, call: Call) -> None:
    x, _, _, ws, scales, bs, act, gated = call.args
    rows, depth = math.prod(x.shape[:-1]), x.shape[-1]
    scale = scales[0].buffer.dtype if scales else torch.float32
    kinds = {"T": STORAGE[x.buffer.dtype], "W": STORAGE[ws[0].buffer.dtype], "S": STORAGE[scale]}
    words = [writer.pointer_to(x)]
    for i, w in enumerate(ws):
        columns, by = w.shape[0], scales[i] if scales else None
        sizes, _ = writer.ints(
            product_words(
                (1, rows, columns, depth),
                x=(0, depth, 1),
                w=(0, 1, w.strides[0]),
                y=(0, columns),
                scale=(0, 0 if by is None or by.shape in ((), (1,)) else 1),
            )
        )
        y = call.outputs[0 if gated else i]
        added = [writer.pointer_to(v) for v in (w, by, bs[i] if bs else None)]
        words += [*added, writer.pointer(y) if y is not None else "nullptr", sizes]
    function = str(writer.template(*unit(rows, len(ws), kinds, act, gated)))
    writer.call(call, function, [*words, *activation_of(act)[1]])


__all__ = ["linears", "unit"]
