"""Positions computed in floats that are exact are indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.exact_positions import whole_part
from dicp.ir.index import Var

STEPS = [  # of an image that becomes larger or smaller: the place in the result to that in the source
    lambda i: i * 0.5,
    lambda i: i * 0.25,
    lambda i: (i + 0.5) * 0.5,
    lambda i: (i + 0.0) * 0.125,
    lambda i: (i + 0.5) * 1.5,
    lambda i: 3 * i + 0.75 - i * 0.5,
]


def floats(i: Var | ix.Index, dtype: torch.dtype) -> ex.Expr:
    return ex.cast(ex.index_value(ix.of(i) if isinstance(i, Var) else i), dtype)


class Made:
    """Arithmetic on an expression as on a tensor."""

    def __init__(self, e: ex.Expr) -> None:
        self.e = e

    def of(self, op: str, other: Any) -> Made:
        e = other.e if isinstance(other, Made) else ex.const(other, self.e.dtype)
        return Made(ex.binary(op, self.e, e))

    def __mul__(self, other: Any) -> Made:
        return self.of("mul", other)

    def __add__(self, other: Any) -> Made:
        return self.of("add", other)

    def __sub__(self, other: Any) -> Made:
        return self.of("sub", other)

    __rmul__ = __mul__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_they_are_where_the_arithmetic_says(step: Any, dtype: torch.dtype) -> None:
    i = Var("i", 300)
    found = whole_part(step(Made(floats(i, dtype))).e)
    assert found is not None
    due = step(torch.arange(300, dtype=dtype)).long()
    got = [ix.substitute(found, {i: n}) for n in range(300)]
    assert got == due.tolist()


def test_they_are_short() -> None:
    i = Var("i", 128)
    assert repr(whole_part((Made(floats(i, torch.float32)) * 0.5).e)) == "(i//2)"
    assert repr(ex.cast(((Made(floats(i, torch.float32)) + 0.5) * 0.5).e, torch.int64)) == "[(i//2)]"


@pytest.mark.parametrize("what", ["rounds", "negative", "large", "of any size", "read"])
def test_others_stay_floats(what: str) -> None:
    size = {"large": (1 << 24) + 2, "of any size": ix.of(Var("n"))}.get(what, 128)
    x = Made(floats(Var("i", size), torch.float32))  # type: ignore[arg-type]
    if what == "read":
        x = Made(ex.Expr("load", ("x", ix.of(Var("i", 128))), torch.float32))
    y = x * 0.3 if what == "rounds" else x * 0.5 - 0.25 if what == "negative" else x * 0.5
    assert whole_part(y.e) is None
    assert ex.cast(y.e, torch.int64).op == "cast"


def test_what_is_shared_is_not_followed_far() -> None:
    x = Made(floats(Var("i", 2), torch.float64)) + 1.0
    for _ in range(60):  # of which all ways to the position would be 2 ** 60
        x = x * x
    assert whole_part(x.e) is None


def test_numbers_that_no_float_is_are_not_exact() -> None:
    i = Var("i", 4)
    assert whole_part((Made(floats(i, torch.float32)) + float((1 << 24) + 1)).e) is None
    assert whole_part((Made(floats(i, torch.float64)) + float((1 << 24) + 1)).e) is not None
    for odd in (float("inf"), float("nan"), 1e300):
        assert whole_part((Made(floats(i, torch.float64)) * odd).e) is None
