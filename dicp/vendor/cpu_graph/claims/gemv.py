"""Products of few rows, at the speed of reading the weights (include/dicp_gemv.h)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal, known_true, size_hint
from dicp.passes.freeze import is_constant
from dicp.runtime.cpu import cpu_flags, cpu_maker, pairs_are_slow
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import activation_of
from dicp.vendor.cpu_graph.claims.operands import (
    PARAMETERS,
    Operands,
    arguments,
    given,
    is_batched,
    operands_of,
    prepare,
    reads,
)

FEW_ROWS = 8
"""Rows up to which the template is ahead of oneDNN and MKL for weights that come from memory: it reads each
weight once, at memory's speed; with more rows the multiplications take longer, and theirs are faster."""
FEW_ROWS_BF16 = 16
"""The same of bf16 where the processor multiplies its pairs and W's depth is dense: each takes less time."""
FEW_ROWS_BF16_BY_COLUMNS = 4
"""The same of bf16 where W's columns are dense: pairs along the depth have to be interleaved."""
FEW_ROWS_OF_SLOW_PAIRS = 22
"""The same of bf16 on Intel, where pairs are half as fast as float32, in which tiles multiply: 17 rows 92 to
113 GF/s for 148 to 151, 24 rows 131 to 158 for 147 (two cores of the 5th generation, weights of 3072 x
1024, 1024 x 1024 and 1024 x 3072; one-off script)."""
FEW_ROWS_OF_INTEL, FEW_FLOATS_OF_INTEL = 64, 200_000
"""The same of float32 on Intel with AVX-512, and floats of x, which stay in the second-level cache: MKL packs
a weight first. 9 rows 52 to 102 GF/s for 116 to 144, 24 rows 126 to 132 for 176 to 206, 64 rows 190 to 208
for 207 to 244; where W's columns are dense, 9 rows 86 to 96 for 90 to 139, 24 rows 149 to 177 for 153 to
203, 64 rows 206 to 238 for 216 to 269 (as above)."""
PACKED_ROWS = 16
"""Rows from which on a float32 product reads a constant weight faster as libraries have packed it: oneDNN
streams rows better than blocks, other than in bfloat16. Of MKL on Intel: 16 rows of 1024 x 1024 201 GF/s
for 172, but 110 for 167 with 3072 x 1024; 48 rows 265 for 215 and 214 for 208."""
TWO_VECTORS = range(25, 33)
"""Of these, where W's depth is dense, rows that fill two vectors: tiles, which turn x, are ahead (32 rows 178
to 210 GF/s for 190 to 237)."""

_SOURCE = """\
#include "dicp_gemv.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return gemv<{rows}, {across}, {act}>(x, w, scale, bias, other, y, sizes, {{low, high}});
}}
"""


def gemv(label: str, node: fx.Node) -> Claim | None:
    """The claim by this template, where rows are few and operands of a dtype it reads."""
    at = operands_of(node)
    if at is None or not reads(node, at) or not _few(node, at):
        return None
    return Claim(
        f"{label}: few rows",
        lambda writer, call: _emit(writer, call, at),
        out=True,
        prepare=lambda lowering, n, args: prepare(lowering, n, args, at),
    )


def gemv_or(label: str, node: fx.Node, other: Claim) -> Claim | None:
    """A claim that takes this template in calls whose rows turn out few, and `other` in those with more: for
    rows that vary. None where they do not, or where operands are not of a dtype that the template reads."""
    at = operands_of(node)
    if at is None or not reads(node, at) or not _may_be_few(node, at):
        return None

    def arguments_of(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        args = prepare(lowering, n, args, at)
        return args if other.prepare is None else other.prepare(lowering, n, args)

    def emit(writer: Any, call: Call) -> None:
        writer.branch(
            f"{writer.text(given(call, at).rows)} <= {_most_varying_rows(node, at)}",
            lambda: _emit(writer, call, at),
            lambda: other.emit(writer, call),
        )

    return replace(other, name=f"{label}: few rows, or {other.name}", emit=emit, prepare=arguments_of)


def seems_few(node: fx.Node) -> bool:
    """Whether a product has few rows, if those that vary are as many as were seen while tracing."""
    at = operands_of(node)
    return at is not None and reads(node, at) and size_hint(_rows(node)) <= _most_rows(node, at)


def _few(node: fx.Node, at: Operands) -> bool:
    """Whether a product has few rows (of a batch), whatever the sizes that vary."""
    rows, x, w = _rows(node), *(node.args[k].meta["val"] for k in (at.x, at.w))  # type: ignore[union-attr]
    if not isinstance(rows, int) or rows <= _most_rows(node, at):
        return isinstance(rows, int)
    if is_batched(node) or not known_equal(x.stride(-1), 1):  # whose rows would be copied
        return False
    constant = is_constant(node.args[at.w])
    return are_few(rows, size_hint(x.shape[-1]), w.dtype, _is_across(node, at), constant)


def _may_be_few(node: fx.Node, at: Operands) -> bool:
    """Whether a product of dense rows has few of them for some of its sizes."""
    rows, x = _rows(node), node.args[at.x].meta["val"]  # type: ignore[union-attr]
    dense = known_equal(x.stride(-1), 1)
    return dense and not isinstance(rows, int) and not known_true(rows > _most_varying_rows(node, at))


def _rows(node: fx.Node) -> Any:
    """The rows of a product (of each of a batch): a number where that does not vary."""
    shape = node.meta["val"].shape
    return math.prod(shape[-2:-1] if is_batched(node) else shape[:-1])


def _most_rows(node: fx.Node, at: Operands) -> int:
    """Rows up to which the template is ahead, known or not."""
    return _most_rows_of(node.args[at.w].meta["val"].dtype, _is_across(node, at))  # type: ignore[union-attr]


def _most_varying_rows(node: fx.Node, at: Operands) -> int:
    """The same of a number that varies, for which there are no tiles that turn x."""
    x, w = (node.args[k].meta["val"] for k in (at.x, at.w))  # type: ignore[union-attr]
    if is_batched(node) or w.dtype != torch.float32 or _is_across(node, at):
        return _most_rows(node, at)
    of_intel = _most_rows_of_intel(size_hint(x.shape[-1]), is_constant(node.args[at.w]))
    return max(_most_rows(node, at), of_intel)


def _is_across(node: fx.Node, at: Operands) -> bool:
    """Whether a weight's columns are dense, not its depth."""
    w = node.args[at.w].meta["val"]  # type: ignore[union-attr]
    return bool(size_hint(w.stride(-1 if at.transposed else -2)) != 1)


def are_few(rows: int, depth: int, weight: torch.dtype, across: bool = False, constant: bool = False) -> bool:
    """Whether the template is ahead with so many rows of x, which are known, and weights of a dtype. across:
    whether their columns are dense, not their depth. constant: whether libraries have them packed."""
    if rows <= _most_rows_of(weight, across):
        return True
    if weight == torch.bfloat16:
        there = pairs_are_slow() and "avx512_bf16" in cpu_flags()
        return there and not across and rows <= FEW_ROWS_OF_SLOW_PAIRS
    by_tiles = not across and not constant and rows in TWO_VECTORS
    return weight == torch.float32 and rows <= _most_rows_of_intel(depth, constant) and not by_tiles


def _most_rows_of_intel(depth: int, constant: bool) -> int:
    """Of float32; 0 on other processors."""
    if cpu_maker() != "intel" or "avx512f" not in cpu_flags():
        return 0
    most = PACKED_ROWS - 1 if constant else FEW_ROWS_OF_INTEL
    return min(most, FEW_FLOATS_OF_INTEL // max(depth, 1))


def _most_rows_of(weight: torch.dtype, across: bool) -> int:
    if weight == torch.bfloat16 and across:
        return FEW_ROWS_BF16_BY_COLUMNS
    return FEW_ROWS_BF16 if weight == torch.bfloat16 and "avx512_bf16" in cpu_flags() else FEW_ROWS


def unit(rows: int, kinds: Mapping[str, str], across: bool, act: str) -> tuple[str, str, str]:
    """Name, parameters and source of the template's function for so many rows (0: as many as it is told) and
    the types of PARAMETERS. across: whether W's columns are dense."""
    word, _ = activation_of(act)
    name = f"gemv{rows}_{'_'.join(dict.fromkeys(kinds.values()))}_{word}{'_across' if across else ''}"
    parameters = PARAMETERS.format(**kinds)
    source = _SOURCE.format(
        name=name, parameters=parameters, rows=rows, across=str(across).lower(), act=word.upper()
    )
    return name, parameters, source


def _emit(writer: Any, call: Call, at: Operands) -> None:
    """The call; into memory that it allocates where another claim's call would."""
    g = given(call, at)
    known = g.rows if isinstance(g.rows, int) else 0
    function = str(writer.template(*unit(known, g.kinds(), g.across, at.act)))
    if call.claim is None or call.claim.out:
        writer.call(call, function, arguments(writer, g, at.act))
    else:
        writer.call_into(call, function, lambda result: arguments(writer, g, at.act, result))


__all__ = ["FEW_ROWS", "PACKED_ROWS", "TWO_VECTORS", "are_few", "gemv", "gemv_or", "seems_few", "unit"]
