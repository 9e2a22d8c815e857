"""Products of groups, as experts have them, and their gradients (include/dicp_grouped.h)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.ir.memory_order import order_of
from dicp.runtime.cpu import cpu_maker
from dicp.schedule.defs import Buffer, Call, View
from dicp.schedule.strides import dense_strides
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import (
    FLOATS,
    LOW,
    SPACE,
    dtype_of,
    multiplies,
    space,
    transposed,
)
from dicp.vendor.cpu_graph.claims.gemm import pairs_workspace, workspace
from dicp.vendor.cpu_graph.claims.operands import Operands, product_words
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.microkernels import available
from dicp.vendor.cpu_graph.segment import DTYPE_CODES

FALLBACK = "transformers.grouped_mm_fallback.default"
FALLBACK_BACKWARD = "transformers.grouped_mm_fallback_backward.default"
"""What every mixture of experts of transformers calls where it is compiled for a CPU: a loop in Python over
the groups, opaque to compilers. Rows behind the last group are 0 there, and unspecified in aten's."""

_PARAMETERS = (
    "const {T}* x, const {T}* w, const {I}* offsets, {T}* y, const int64_t* sizes, int64_t groups, {more}"
)
_ROOM = "{space, bytes, threads}"
_MORE = {
    "calls": ("int32_t dtype", "dtype"),
    "tiles": (SPACE, _ROOM),
    "pairs": (f"int32_t dtype, {SPACE}", f"dtype, {_ROOM}"),
}
"""By the way of a product: further parameters of the header's function, and what it is given."""
_SOURCE = """\
#include "dicp_grouped.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return grouped_{way}<{shared}>(x, w, offsets, y, sizes, groups, {more});
}}
"""


def grouped(node: fx.Node, config: Config) -> list[Claim]:
    """Our tiles, and a library's call for each group; first what is predicted to be faster."""
    if config.numerics == "eager" or not _has_form(node):
        return []
    backward = str(node.target) == FALLBACK_BACKWARD
    label = "grouped_mm backward" if backward else "grouped_mm"
    dtype = dtype_of(node.args[0])
    claim = functools.partial(Claim, out=True, prepare=_prepare, strides=_strides)
    calls = claim(f"{label}: mm", functools.partial(_emit, "calls"))
    tiles = claim(f"{label}: tiles", functools.partial(_emit, "tiles"), workspace=_workspace)
    if _tiles_ahead(dtype):
        return [tiles, calls]
    if dtype != torch.bfloat16 or not available(dtype):
        return [calls, tiles]
    pairs = claim(
        f"{label}: tiles of pairs, or mm", functools.partial(_emit, "pairs"), workspace=_pairs_workspace
    )
    return [pairs, calls, tiles]


def _has_form(node: fx.Node) -> bool:
    """Whether the groups, which `offsets` [E] end, share out rows: x [S, K], w [E, K, N]; or what is summed
    over: x [M, S], w [S, N]; or these are the gradients of the first."""
    given: tuple[Any, ...] = node.args
    x, w, offsets, *more = given + (None,) * (3 - len(given))
    vals = [a.meta["val"] for a in (x, w, offsets) if isinstance(a, fx.Node)]
    if len(vals) < 3 or node.kwargs or not available(torch.float32):
        return False
    dims, dtypes = tuple(v.dim() for v in vals), {v.dtype for v in vals[:2]}
    if str(node.target) == FALLBACK_BACKWARD:
        dtypes.add(dtype_of(more[0]))
        plain = len(more) == 1
    else:  # aten's may have a bias, and a dtype of the result
        plain = not any(a is not None and a not in dtypes for a in more) and dtype_of(node) in dtypes
    return plain and dims in ((2, 3, 1), (2, 2, 1)) and len(dtypes) == 1 and dtypes <= set(FLOATS)


def _tiles_ahead(dtype: torch.dtype | None) -> bool:
    """Groups have few rows, where tiles are ahead of MKL on AMD; of a low precision, where no library
    multiplies in it."""
    return not multiplies(dtype) if dtype in LOW else cpu_maker() == "amd"


_BY_COLUMNS = (0, 2, 1)


@dataclass(frozen=True)
class _Product:
    """result[k] = x w; w has two dims where groups share out what is summed over. by_columns: it is the
    transposed result, which then has dense rows."""

    x: View
    w: View
    k: int = 0
    by_columns: bool = False


def _products(node: fx.Node, args: Sequence[Any]) -> list[_Product]:
    if str(node.target) == FALLBACK_BACKWARD:
        x, w, _, grad = args
        found = [_Product(grad, transposed(w)), _Product(transposed(x), grad, 1)]
    else:
        found = [_Product(args[0], args[1])]
    by_columns = [_order(v) == _BY_COLUMNS for v in _results(node)]
    return [_Product(transposed(p.w), transposed(p.x), p.k, True) if by_columns[p.k] else p for p in found]


def _results(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta["val"]
    return list(val) if isinstance(val, (tuple, list)) else [val]


def _order(val: torch.Tensor) -> tuple[int, ...]:
    """Dense matrices, one behind the other, by rows or as traced by columns; rows that are shared out."""
    return _BY_COLUMNS if order_of(val) == _BY_COLUMNS else tuple(range(val.dim()))


def _strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    return [dense_strides(tuple(lowering.index(s) for s in v.shape), _order(v)) for v in _results(node)]


def _prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """Dense operands; matrices of which one dim is dense."""

    def fix(k: int, a: Any) -> Any:
        if a is None or isinstance(a, torch.dtype):
            return a
        view = lowering.operand(a)
        as_it_lies = k < 2 and 1 in view.strides[-2:] and (k == 1 or _shares_depth(node))
        return view if as_it_lies else lowering.operand(a, dense=True)

    return [fix(k, a) for k, a in enumerate(args)]


def _shares_depth(node: fx.Node) -> bool:
    return node.args[1].meta["val"].dim() == 2  # type: ignore[union-attr, no-any-return]


def _workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
    return max(workspace(lowering, (p.x, p.w), Operands(0, 1)) for p in _products(node, args))


def _pairs_workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
    """Where depths vary, there is none, and each group's product is ATen's."""
    sizes = [p.x.shape for p in _products(node, args)]
    return max(pairs_workspace(lowering, rows, k) if isinstance(k, int) else 0 for rows, k in sizes)


def _emit(way: str, writer: Any, call: Call) -> None:
    for product in _products(call.node, call.args):
        y = call.outputs[product.k]
        assert y is not None
        _emit_product(way, writer, call, product, y)


def _emit_product(way: str, writer: Any, call: Call, product: _Product, y: Buffer) -> None:
    x, w, offsets = product.x, product.w, call.args[2]
    result = View(y, y.shape, y.strides)
    rows = transposed(result) if product.by_columns else result
    by_rows = len(w.shape) == 3
    sizes, _ = writer.ints(
        product_words(
            (1, x.shape[0], w.shape[-1], x.shape[1]),
            x=(0, *x.strides),
            w=(w.strides[0] if by_rows else 0, *w.strides[-2:]),
            y=(0 if by_rows else rows.strides[0], rows.strides[-2]),
        )
    )
    kinds = {"T": STORAGE[y.dtype], "I": STORAGE[offsets.buffer.dtype]}
    shared, groups = ("ROWS", w.shape[0]) if by_rows else ("DEPTH", y.shape[0])
    more, given = _MORE[way]
    words = [] if way == "tiles" else [str(DTYPE_CODES[y.dtype])]
    words += [] if way == "calls" else space(writer, call)
    name = "_".join(["grouped", shared.lower(), way, *dict.fromkeys(kinds.values())])
    parameters = _PARAMETERS.format(**kinds, more=more)
    source = _SOURCE.format(name=name, parameters=parameters, way=way, shared=shared, more=given)
    function = writer.template(name, parameters, source, "light")
    pointers = [*(writer.pointer_to(v) for v in (x, w, offsets)), writer.pointer(y)]
    writer.call(call, function, [*pointers, sizes, writer.text(groups), *words])


__all__ = ["FALLBACK", "FALLBACK_BACKWARD", "grouped"]
