"""Products of few rows with weights of few bits, whose scales are of groups along the depth, at the speed of
reading the weights (group_gemv of include/dicp_gemv.h)."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from dicp.config import Config
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims.common import FLOATS, dtype_of
from dicp.vendor.cpu_graph.claims.gemv import FEW_ROWS
from dicp.vendor.cpu_graph.claims.operands import product_words
from dicp.vendor.cpu_graph.expression import STORAGE

WHOLE = 16
"""Elements of which groups are whole multiples: vectors of any processor."""

_PARAMETERS = (
    "const {T}* x, const {W}* w, const {S}* scale, const {Z}* zero, {T}* y, int64_t groups, "
    "const int64_t* sizes"
)
_SOURCE = """\
#include "dicp_gemv.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return group_gemv<{rows}>(x, w, scale, zero, y, groups, sizes);
}}
"""


def group_scaled(node: fx.Node, config: Config | None) -> Claim | None:
    """Of a known number of rows, up to which reading the weights takes longer than the multiplications."""
    x, w, scale = (a.meta["val"] for a in node.args[:3])  # type: ignore[union-attr]
    zero = dtype_of(node.args[3])
    if not all(isinstance(n, int) for t in (x, w, scale) for n in t.shape) or 0 in (*x.shape, *w.shape):
        return None
    if x.shape[0] > FEW_ROWS or (w.shape[1] // scale.shape[1]) % WHOLE or dtype_of(node) not in FLOATS:
        return None
    if any(d is not None and d not in STORAGE for d in (scale.dtype, zero)):
        return None
    return Claim("narrow linear by groups: few rows", _emit, out=True, prepare=dense(0, 1, 2, 3))


def _emit(writer: Any, call: Call) -> None:
    x, w, scale, zero = (*call.args, None)[:4]
    assert isinstance(x, View) and isinstance(w, View) and isinstance(scale, View)
    y, (columns, depth) = call.outputs[0], w.shape
    words = {"T": y, "W": w.buffer, "S": scale.buffer, "Z": w.buffer if zero is None else zero.buffer}
    kinds = {k: STORAGE[b.dtype] for k, b in words.items()}
    name = f"group_gemv{x.shape[0]}_{'_'.join(kinds.values())}"
    parameters = _PARAMETERS.format(**kinds)
    source = _SOURCE.format(name=name, parameters=parameters, rows=x.shape[0])
    sizes, _ = writer.ints(
        product_words((1, x.shape[0], columns, depth), x=(0, depth, 1), w=(0, 1, depth), y=(0, columns))
    )
    pointers = [*(writer.pointer_to(v) for v in (x, w, scale, zero)), writer.pointer(y)]
    function = str(writer.template(name, parameters, source))
    writer.call(call, function, [*pointers, str(scale.shape[1]), sizes])


__all__ = ["group_scaled"]
