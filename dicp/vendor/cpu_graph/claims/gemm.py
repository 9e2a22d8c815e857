"""Products of more than a few rows by tiles around oneDNN's micro-kernels, or by strips (include/dicp_gemm.h,
dicp_gemm_transposed.h and dicp_strips.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal
from dicp.ir import index as ix
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import SPACE, activation_of, space, whole_lines
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
from dicp.vendor.cpu_graph.microkernels import available

ROW_TILE, DEPTH_TILE = 128, 128
LONG, WIDE = (512, 128), (128, 512)
"""As in dicp_gemm.h, around oneDNN's micro-kernels: rows and columns."""
STRIP_ROW_TILE, STRIP_DEPTH_BLOCK, STRIP_ROWS, SPILL = 144, 256, 6, 8
STRIPS_COLUMNS, STRIPS_OF_SUMS = 1024, (576, 256)
"""As there and in dicp_strips.h; columns where sums lie in the result, rows and columns where they do not."""
FEW_ROWS, FEW_ROWS_WITH_STRIPS, FEW_ROWS_OF_PAIRS, PANEL, BAND = 512, 128, 128, 128, 16
PACKED_ROWS, PACKED_PANEL = 256, 64
"""As in dicp_gemm_packed.h."""
REACH = 1 << 22
"""As in dicp_gemm_transposed.h; elements between weights of two columns."""

_SOURCE = """\
#include "{header}.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return {function}<{act}>(x, w, scale, bias, other, y, sizes, {{low, high}}, {{space, bytes, threads}});
}}
"""


def gemm(label: str, node: fx.Node) -> Claim | None:
    """The claim by tiles in float32, for operands of a dtype they read."""
    at = operands_of(node)
    if at is None or not reads(node, at) or not available(torch.float32):
        return None
    return Claim(
        f"{label}: tiles",
        lambda writer, call: _emit(writer, call, at, "gemm"),
        out=True,
        prepare=lambda lowering, n, args: prepare(lowering, n, args, at, columns_of_x=True),
        workspace=lambda lowering, n, args: workspace(lowering, args, at),
    )


def gemm_pairs(label: str, node: fx.Node) -> Claim | None:
    """The claim by tiles in bf16, of rows that are few, whatever the sizes that vary, and a weight along the
    depth: of more rows, oneDNN is ahead."""
    at = operands_of(node)
    if at is None or is_batched(node) or not available(torch.bfloat16):
        return None
    x, w = (node.args[k].meta["val"] for k in (at.x, at.w))  # type: ignore[union-attr]
    if not x.dtype == w.dtype == node.meta["val"].dtype == torch.bfloat16:
        return None
    rows, depth, columns = math.prod(x.shape[:-1]), x.shape[-1], node.meta["val"].shape[-1]
    apart, along = w.stride() if at.transposed else w.stride()[::-1]
    along_depth = known_equal(along, 1) and isinstance(apart, int) and apart < REACH
    static = isinstance(rows, int) and isinstance(depth, int) and depth % 2 == 0
    if not static or not along_depth or rows > _few_rows(columns, depth, FEW_ROWS_OF_PAIRS):
        return None
    return Claim(
        f"{label}: tiles of pairs",
        lambda writer, call: _emit(writer, call, at, "gemm_pairs"),
        out=True,
        prepare=lambda lowering, n, args: _prepare_pairs(lowering, n, args, at),
        workspace=lambda lowering, n, args: pairs_workspace(lowering, rows, depth),
    )


def gemm_packed(node: fx.Node) -> Claim:
    """The claim by tiles in bf16 of a weight in `panels`."""
    at = operands_of(node)
    assert at is not None

    def rows_of(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        args = list(args)
        for k in (at.x, at.bias, at.other):
            if k is not None and k < len(args) and args[k] is not None:
                args[k] = lowering.operand(args[k], dense=True)
        return args

    def space_of(lowering: Any, n: fx.Node, args: Sequence[Any]) -> int:
        threads = int(lowering.vendor.machine(lowering.config).threads)
        return 4 * threads * PACKED_ROWS * PACKED_PANEL

    return Claim(
        "linear: packed tiles",
        lambda writer, call: _emit(writer, call, at, "gemm_packed", "dicp_gemm_packed"),
        out=True,
        prepare=rows_of,
        workspace=space_of,
    )


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] of bf16 as the header reads it: [panels, K / 2, PACKED_PANEL, 2], zeros behind the last column.
    K is even."""
    n, depth = weight.shape
    count = -(-n // PACKED_PANEL)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, count * PACKED_PANEL - n))
    return whole.reshape(count, PACKED_PANEL, depth // 2, 2).transpose(1, 2).contiguous()


def _prepare_pairs(
    lowering: Any, node: fx.Node, args: Sequence[Any], at: Operands
) -> Sequence[Any]:
    """Rows of x that start with a pair, and a weight along the depth, also where a kernel writes it."""
    order = (0, 1) if at.transposed else (1, 0)
    args = list(args)
    w = lowering.operand(args[at.w], order=order)
    args[at.w] = w if w.strides[order[-1]] == 1 else lowering.in_order(args[at.w], order)
    prepared = list(prepare(lowering, node, args, at))
    if not all(isinstance(s, int) and s % 2 == 0 for s in prepared[at.x].strides[:-1]):
        prepared[at.x] = lowering.operand(args[at.x], dense=True)
    return prepared


def pairs_workspace(lowering: Any, rows: Any, depth: int) -> int:
    """Bytes of the header's blocks of pairs, for all threads."""
    return 4 * _transposed(lowering, _most(rows, FEW_ROWS_OF_PAIRS), depth // 2)


def workspace(lowering: Any, args: Sequence[Any], at: Operands) -> int:
    """Bytes of the headers' blocks, for all threads."""
    x, w = args[at.x], args[at.w]
    columns, depth = w.shape[-2:] if at.transposed else w.shape[:-3:-1]
    along_depth = w.strides[-1 if at.transposed else -2] == 1
    machine = lowering.vendor.machine(lowering.config)
    grouped = len(w.shape) > len(x.shape)  # each group has some of the rows, or all
    rows = x.shape[-2] if len(x.shape) == len(w.shape) else ix.product(x.shape[:-1])
    is_float = x.buffer.dtype == torch.float32
    by_strips = machine.lanes == 8
    if by_strips:
        floats = _strips(rows, columns, depth, is_float)
    else:
        lines = isinstance(columns, int) and columns % 16 == 0
        floats = _tiles(rows, columns, depth, x.strides[-1] == 1, is_float and lines and len(w.shape) == 2)
    floats *= int(machine.threads)
    few = _few_rows(columns, depth, FEW_ROWS_WITH_STRIPS if by_strips else FEW_ROWS)
    may_be_few = grouped or not isinstance(rows, int) or rows <= few
    if along_depth and isinstance(depth, int) and may_be_few:
        block = 0 if w.buffer.dtype == torch.float32 else PANEL * DEPTH_TILE
        floats = max(floats, _transposed(lowering, _most(rows, few), depth, block))
    return 4 * floats


def _tiles(rows: Any, columns: Any, depth: Any, by_rows: bool, in_place: bool) -> int:
    """Floats of a thread of dicp_gemm.h, around oneDNN's micro-kernels: a block of w, rows of x, sums."""
    group, panel = LONG if by_rows else WIDE
    width, deep = (whole_lines(_most(n, tile)) for n, tile in ((columns, panel), (depth, DEPTH_TILE)))
    return deep * width + _most(rows, ROW_TILE) * deep + (0 if in_place else _most(rows, group) * width)


def _strips(rows: Any, columns: Any, depth: Any, in_place: bool) -> int:
    """The same around dicp_strips.h."""
    group, panel = STRIPS_OF_SUMS
    width = whole_lines(_most(columns, STRIPS_COLUMNS if in_place else panel))
    deep, tile = whole_lines(_most(depth, STRIP_DEPTH_BLOCK)), _most(rows, STRIP_ROW_TILE)
    of_rows = -(-tile // STRIP_ROWS) * STRIP_ROWS * deep + SPILL
    return deep * width + of_rows + (0 if in_place else _most(rows, group) * width)


def _transposed(lowering: Any, rows: int, depth: int, block: int = 0) -> int:
    """Floats of dicp_gemm_transposed.h: x, and for each thread sums, rows of results, a block of w."""
    width = max(whole_lines(rows), 2 * BAND)
    threads = int(lowering.vendor.machine(lowering.config).threads)
    return depth * width + threads * (PANEL * width + BAND * PANEL + block)


def _few_rows(columns: Any, depth: Any, most: int) -> int:
    """As in dicp_gemm_transposed.h; the most, where sizes vary."""
    if not isinstance(columns, int) or not isinstance(depth, int):
        return most
    return min(most, columns * depth // (2 * (columns + depth) + 1))


def _most(size: Any, tile: int) -> int:
    return min(size, tile) if isinstance(size, int) else tile


def _emit(writer: Any, call: Call, at: Operands, function: str, header: str = "dicp_gemm") -> None:
    g = given(call, at)
    words, (act, _) = g.kinds(), activation_of(at.act)
    name = f"{function}_{'_'.join(dict.fromkeys(words.values()))}_{act}"
    parameters = f"{PARAMETERS.format(**words)}, {SPACE}"
    source = _SOURCE.format(
        header=header, name=name, parameters=parameters, function=function, act=act.upper()
    )
    template = str(writer.template(name, parameters, source, "light"))
    writer.call(call, template, [*arguments(writer, g, at.act), *space(writer, call)])


__all__ = ["gemm", "gemm_packed", "gemm_pairs", "pairs_workspace", "panels", "workspace"]
