"""Numbers computed from sizes by a program's Python function."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from torch.utils._sympy.functions import (
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    Max,
    Min,
    Mod,
    PowByNatural,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

import dicp.compiler
from dicp.runtime.host_numbers import HostFunction, host_number, host_size, number, python_text

a, b = sympy.symbols("a b", integer=True, nonnegative=True)
INTEGERS = [
    a - 2 * b + 3,
    FloorDiv(a - 5, b + 1) * 2,
    Mod(a + 7, b + 2),
    PythonMod(a - b, 3),
    CleanDiv(6 * a, 3),
    Max(a, b, 2) - Min(a, 4),
    PowByNatural(a - 3, 3),
    (a - b) ** 2,
]
TRUTHS = [
    sympy.Eq(a, b),
    sympy.Ne(a * b, 0) & (a >= 1),
    sympy.Not(a < b) | sympy.Eq(Mod(b, 2), 1),
    sympy.true,
]


@pytest.mark.parametrize(
    "expr, write, meaning",
    [(e, host_size, HostFunction(e, (a, b))) for e in INTEGERS]
    + [(e, host_number, HostFunction(e, (a, b), number)) for e in TRUTHS],
    ids=[str(e) for e in (*INTEGERS, *TRUTHS)],
)
def test_python_text_means_the_same(expr, write, meaning) -> None:  # type: ignore[no-untyped-def]
    values: dict[str, object] = {}
    text = write(expr, values, "f")
    assert not values
    for x, y in itertools.product(range(5), repeat=2):
        got, want = eval(text, {}, {"a": x, "b": y}), meaning(x, y)
        assert got == want and isinstance(got, bool) == isinstance(want, bool)


def test_integers_asked_for_as_numbers_are_floats() -> None:
    got = eval(host_number(a + 1, {}, "f"), {}, {"a": 2})
    assert type(got) is float and got == 3.0


def test_the_rest_is_left_to_sympy() -> None:
    expr = sympy.sqrt(a) + sympy.Float(1.5)
    assert python_text(expr) is None
    values: dict[str, object] = {}
    assert eval(host_number(expr, values, "f"), values, {"a": 4}) == pytest.approx(3.5)


def test_floats_are_pythons() -> None:
    """Which has NaN, infinities and the zero's sign."""
    z = sympy.Symbol("zuf0", real=True)
    expr = FloatTrueDiv(2.5 * z, ToFloat(a + 1))
    assert eval(host_number(expr, {}, "f"), {}, {"a": 1, "zuf0": float("inf")}) == float("inf")
    assert eval(host_size(TruncToInt(z), {}, "f"), {}, {"zuf0": -2.75}) == -2
    assert eval(host_size(RoundToInt(z), {}, "f"), {}, {"zuf0": 2.5}) == 2
    assert eval(host_number(z > 1.0, {}, "f"), {}, {"zuf0": float("nan")}) is False


def test_temporaries_of_an_unbacked_input_size_live_in_the_arena() -> None:
    """The size is known when the program starts, though not when it is compiled."""
    x = torch.randn(6, 8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    seen: list[dicp.compiler.Compiled] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).softmax(-1) @ x).softmax(-1).cumsum(0) * 2

    with dicp.compiler.observe(seen.append):
        compiled = torch.compile(fn, backend="dicp_cpu", fullgraph=True)
        torch.testing.assert_close(compiled(x), fn(x), rtol=1e-4, atol=1e-5)
    (program,) = [c.program for c in seen]
    assert program.plan.offset
    assert "HostFunction" not in str(program.sources["call.py"]) and "size_" not in program.sources["call.py"]
    for n in (1, 3):
        torch.testing.assert_close(compiled(x[:n]), fn(x[:n]), rtol=1e-4, atol=1e-5)
