"""Conditions on loop variables: where they change, and what else they decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.interpret import evaluate
from dicp.ir.ranges import assuming, change

I = Var("i", 8)
i = ix.of(I)
x, y = (Expr("load", (name, i), torch.float32) for name in "xy")
small = st.integers(-20, 20)


def unfolded(op: str, left: ix.Index) -> Expr:
    return Expr(op, (ex.index_value(left), ex.const(0, torch.int64)), torch.bool)


def values(e: Expr) -> list[float]:
    data = {"x": torch.arange(8.0), "y": torch.arange(8.0) + 100}
    found = evaluate(e, lambda a: torch.arange(8), lambda name, at: data[name][at])
    return found.expand(8).tolist()


@given(st.sampled_from(["lt", "ge"]), small.filter(bool), small)
def test_a_condition_changes_where_it_says(op: str, step: int, start: int) -> None:
    cond = unfolded(op, step * i + start)
    at, before = change(cond, I)
    assert values(cond) == [(n < at) == before for n in range(8)]


@pytest.mark.parametrize(
    "left", [i * ix.of(Var("n")), i + ix.of(Var("j", 3)), ix.floordiv(i, 3)], ids=["size", "two", "quotient"]
)
def test_no_change_is_named_where_it_depends_on_something_else(left: ix.Index) -> None:
    assert change(unfolded("lt", left), I) is None


@given(st.lists(st.tuples(st.booleans(), small), min_size=1, max_size=3), small, small)
def test_what_is_assumed_does_not_change_what_holds_under_it(
    conds: list[tuple[bool, int]], first: int, second: int
) -> None:
    cond = ex.const(True, torch.bool)
    for below, n in conds:
        cond = ex.binary("land", cond, ex.less(i, n) if below else ex.at_least(i, n))
    e = ex.masked(ex.less(i - 1, first), lambda: x, ex.masked(ex.at_least(i, second), lambda: y, 7.0))
    found, there = values(assuming(e, cond)), values(cond)
    assert [a for a, c in zip(found, there, strict=True) if c] == [
        a for a, c in zip(values(e), there, strict=True) if c
    ]


def test_conditions_that_are_decided_are_gone() -> None:
    e = ex.masked(ex.less(i, 5), lambda: x, y)
    assert assuming(e, ex.less(i, 5)) is x and assuming(e, ex.at_least(i, 6)) is y
    assert assuming(e, ex.less(i, 6)) == e
    both = ex.binary("land", ex.at_least(i, 2), ex.less(i, 4))
    assert assuming(e, both) is x


def test_nothing_is_assumed_where_nothing_holds() -> None:
    e = ex.masked(ex.less(i, 5), lambda: x, y)
    assert assuming(e, ex.binary("land", ex.less(i, 2), ex.at_least(i, 6))) == e
