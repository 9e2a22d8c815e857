"""Products of many rows by tiles around oneDNN's micro-kernels (include/dicp_gemm.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import SPACE, space
from dicp.vendor.cpu_graph.claims.operands import (
    PARAMETERS,
    Operands,
    arguments,
    given,
    operands_of,
    prepare,
    reads,
)
from dicp.vendor.cpu_graph.microkernels import available

ROW_TILE, DEPTH_TILE = 128, 128
LONG, WIDE = (512, 128), (128, 512)
"""Rows and columns; all as in the header."""
FEW_ROWS, PANEL, STRIP = 512, 128, 16
"""As in dicp_gemm_transposed.h."""

_SOURCE = """\
#include "dicp_gemm.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  return gemm<{act}>(x, w, scale, bias, other, y, sizes, {{space, bytes, threads}});
}}
"""


def gemm(label: str, node: fx.Node) -> Claim | None:
    """The claim by this template, for operands of a dtype it reads."""
    at = operands_of(node)
    if at is None or not reads(node, at) or not available(torch.float32):
        return None
    return Claim(
        f"{label}: tiles",
        lambda writer, call: _emit(writer, call, at),
        out=True,
        prepare=lambda lowering, n, args: prepare(lowering, args, at, columns_of_x=True),
        workspace=lambda lowering, n, args: workspace(lowering, args, at),
    )


def workspace(lowering: Any, args: Sequence[Any], at: Operands) -> int:
    """Bytes of the headers' blocks, for all threads."""
    x, w = args[at.x], args[at.w]
    columns, depth = w.shape[-2:] if at.transposed else w.shape[:-3:-1]
    threads = int(lowering.vendor.machine(lowering.config).threads)
    along_depth = w.strides[-1 if at.transposed else -2] == 1
    group, panel = LONG if x.strides[-1] == 1 else WIDE
    rows = x.shape[-2] if len(x.shape) == len(w.shape) else group
    width, deep = (_whole(_most(n, tile)) for n, tile in ((columns, panel), (depth, DEPTH_TILE)))
    lines = isinstance(columns, int) and columns % 16 == 0
    in_place = lines and len(w.shape) == 2 and x.buffer.dtype == torch.float32  # sums lie in the result
    floats = deep * width + _most(rows, ROW_TILE) * deep + (0 if in_place else _most(rows, group) * width)
    few = _few_rows(columns, depth)
    if not along_depth or not isinstance(depth, int) or (isinstance(rows, int) and rows > few):
        return 4 * floats * threads
    width = max(_whole(_most(rows, few)), 2 * STRIP)
    block = 0 if w.buffer.dtype == torch.float32 else PANEL * DEPTH_TILE
    transposed = depth * width + threads * (PANEL * width + STRIP * PANEL + block)
    return 4 * max(floats * threads, transposed)


def _few_rows(columns: Any, depth: Any) -> int:
    """As in dicp_gemm_transposed.h; the most, where sizes vary."""
    if not isinstance(columns, int) or not isinstance(depth, int):
        return FEW_ROWS
    return min(FEW_ROWS, columns * depth // (2 * (columns + depth) + 1))


def _whole(n: int) -> int:
    """Floats of whole cache lines."""
    return -(-n // 16) * 16


def _most(size: Any, tile: int) -> int:
    return min(size, tile) if isinstance(size, int) else tile


def _emit(writer: Any, call: Call, at: Operands) -> None:
    g = given(call, at)
    words = g.kinds()
    name = f"gemm_{'_'.join(dict.fromkeys(words.values()))}_{at.act}"
    parameters = f"{PARAMETERS.format(**words)}, {SPACE}"
    source = _SOURCE.format(name=name, parameters=parameters, act=at.act.upper())
    function = str(writer.template(name, parameters, source))
    writer.call(call, function, [*arguments(writer, g), *space(writer, call)])


__all__ = ["gemm", "workspace"]
