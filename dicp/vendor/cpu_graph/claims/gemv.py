"""Products of few rows, at the speed of reading the weights (include/dicp_gemv.h)."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
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
from dicp.vendor.cpu_graph.toolchain import cpu_flags

FEW_ROWS = 8
"""Rows up to which the template is ahead of oneDNN and MKL for weights that come from memory: it reads each
weight once, at memory's speed; with more rows the multiplications take longer, and theirs are faster."""
FEW_ROWS_BF16 = 16
"""The same of bf16 where the processor multiplies its pairs and W's depth is dense: each takes less time."""
FEW_ROWS_BF16_BY_COLUMNS = 4
"""The same of bf16 where W's columns are dense: pairs along the depth have to be interleaved."""

_SOURCE = """\
#include "dicp_gemv.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  return gemv<{rows}, {across}, {act}>(x, w, scale, bias, other, y, sizes);
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
        prepare=lambda lowering, n, args: prepare(lowering, args, at),
    )


def _few(node: fx.Node, at: Operands) -> bool:
    """Whether a product has few rows (of a batch), whatever the sizes that vary."""
    shape, w = node.meta["val"].shape, node.args[at.w].meta["val"]  # type: ignore[union-attr]
    lead = shape[-2:-1] if is_batched(node) else shape[:-1]
    if not all(isinstance(n, int) for n in lead):
        return False
    most = FEW_ROWS
    if w.dtype == torch.bfloat16 and size_hint(w.stride(-1 if at.transposed else -2)) != 1:
        most = FEW_ROWS_BF16_BY_COLUMNS
    elif w.dtype == torch.bfloat16 and "avx512_bf16" in cpu_flags():
        most = FEW_ROWS_BF16
    return int(torch.Size(lead).numel()) <= most


def _emit(writer: Any, call: Call, at: Operands) -> None:
    g = given(call, at)
    words, known = g.kinds(), g.rows if isinstance(g.rows, int) else 0
    name = f"gemv{known}_{'_'.join(dict.fromkeys(words.values()))}_{at.act}{'_across' if g.across else ''}"
    parameters = PARAMETERS.format(**words)
    source = _SOURCE.format(
        name=name, parameters=parameters, rows=known, across=str(g.across).lower(), act=at.act.upper()
    )
    writer.call(call, str(writer.template(name, parameters, source)), arguments(writer, g))


__all__ = ["FEW_ROWS", "gemv"]
