"""How indices walk along vectors that begin at multiples of 16."""

from __future__ import annotations

import pytest

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.vendor.cpu_graph.lane_strides import lane_repeats, lane_stride

V, ROW = Var("v", 4096), Var("row", 100)
v, row = ix.of(V), ix.of(ROW)


@pytest.mark.parametrize(
    ("index", "step"),
    [
        (3 * v + 5 * row, 3),
        (5 * row, 0),
        (ix.mod(v, 64) + 100 * ix.floordiv(v, 64), 1),
        (7 * ix.mod(v, 64) + row, 7),
        (ix.mod(v + 32 * row, 64), 1),
        (ix.mod(v + 16, 64), 1),
        (row * ix.floordiv(v, 32), 0),
        (row * ix.mod(v, 32), row),
        (ix.mod(v, 24), None),  # a vector may begin in one 24 and end in the next
        (ix.mod(v + 8, 64), None),
        (ix.mod(v + 8 * row, 64), None),
        (ix.mod(2 * v, 64), 2),
        (ix.mod(2 * v + row, 64), None),
        (ix.mod(v, 64) * ix.floordiv(v, 64), None),
        (ix.floordiv(v, 8), None),
        (row * ix.mod(ix.floordiv(v, 32), 2) + ix.mod(v, 32), 1),
        (ix.floordiv(ix.floordiv(v, 32) + row, 3), 0),
        (ix.mod(ix.floordiv(v, 24), 2), None),
    ],
)
def test_steps(index: Index, step: Index | None) -> None:
    assert lane_stride(index, V, 16) == step


@pytest.mark.parametrize(
    ("index", "repeats"),
    [
        (100 * ix.floordiv(v, 64) + row, 16),
        (ix.floordiv(v, 8) + 12 * row, 8),
        (ix.floordiv(v + 32, 4), 4),
        (ix.floordiv(v + 2, 4), None),
        (2 * ix.floordiv(v, 8), None),
        (row * ix.floordiv(v, 8), None),
        (ix.floordiv(v, 8) + v, None),
        (ix.floordiv(v, 12), None),
        (ix.mod(v, 8), None),
        (v, None),
    ],
)
def test_repeats(index: Index, repeats: int | None) -> None:
    assert lane_repeats(index, V, 16) == repeats
