"""Products of groups of rows, each with a matrix of its own, by tiles (include/dicp_grouped.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import FLOATS, LOW, dtype_of, multiplies
from dicp.vendor.cpu_graph.claims.gemm import workspace
from dicp.vendor.cpu_graph.claims.matmul import cpu_maker
from dicp.vendor.cpu_graph.claims.operands import Operands, prepare, product_words
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.microkernels import available

FALLBACK = "transformers.grouped_mm_fallback.default"
"""What every mixture of experts of transformers calls where it is compiled for a CPU: a loop in Python over
the groups, opaque to compilers. Rows behind the last group are 0 there, and unspecified in aten's."""

_AT = Operands(0, 1)
_SOURCE = """\
#include "dicp_grouped.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  return grouped(x, w, offsets, y, sizes, groups, {{space, bytes, threads}});
}}
"""
_PARAMETERS = (
    "const {T}* x, const {W}* w, const {I}* offsets, {T}* y, const int64_t* sizes, int64_t groups, "
    "void* space, int64_t bytes, int64_t threads"
)


def grouped(node: fx.Node, config: Any) -> list[Claim]:
    """The claim by this template, where it is ahead of a library's call for each group."""
    if config.numerics == "eager" or not _has_form(node) or not _is_ahead(dtype_of(node)):
        return []
    return [
        Claim(
            "grouped_mm: tiles",
            _emit,
            out=True,
            prepare=_prepare,
            workspace=lambda lowering, n, args: workspace(lowering, args, _AT),
        )
    ]


def _has_form(node: fx.Node) -> bool:
    """Whether it has groups of rows: x [S, K], w [E, K, N], offsets [E]."""
    x, w, offsets, bias, dtype = (*node.args, *[None] * 3)[:5]
    if offsets is None or bias is not None or node.kwargs or dtype not in (None, dtype_of(node)):
        return False
    dims = tuple(a.meta["val"].dim() for a in (x, w, offsets))  # type: ignore[union-attr]
    kinds = {dtype_of(a) for a in (node, x, w)}
    return dims == (2, 3, 1) and len(kinds) == 1 and kinds <= set(FLOATS) and available(torch.float32)


def _is_ahead(dtype: torch.dtype | None) -> bool:
    """Groups have few rows, where tiles are ahead of MKL on AMD; of a low precision, where no library
    multiplies in it."""
    return not multiplies(dtype) if dtype in LOW else cpu_maker() == "amd"


def _prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    x, w, offsets, *rest = prepare(lowering, args, _AT)
    return [x, w, lowering.operand(offsets, dense=True), *rest]


def _emit(writer: Any, call: Call) -> None:
    (x, w, offsets), (y, space) = call.args[:3], (call.outputs[0], call.outputs[-1])
    (rows, depth), (groups, _, columns) = x.shape, w.shape
    words = {"T": y.dtype, "W": w.buffer.dtype, "I": offsets.buffer.dtype}
    kinds = {word: STORAGE[dtype] for word, dtype in words.items()}
    name = f"grouped_{'_'.join(dict.fromkeys(kinds.values()))}"
    parameters = _PARAMETERS.format(**kinds)
    product = product_words((1, rows, columns, depth), x=(0, *x.strides), w=w.strides, y=(0, columns))
    sizes, _ = writer.ints(product)
    function = writer.template(name, parameters, _SOURCE.format(name=name, parameters=parameters))
    room = [writer.pointer(space), str(space.shape[0]), str(torch.get_num_threads())]
    pointers = [*(writer.pointer_to(v) for v in (x, w, offsets)), writer.pointer(y)]
    writer.call(call, function, [*pointers, sizes, writer.text(groups), *room])


__all__ = ["FALLBACK", "grouped"]
