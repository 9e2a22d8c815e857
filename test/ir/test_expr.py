"""Scalar expressions: building, folding, rewriting, and what they mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.interpret import BINARY, UNARY, evaluate

I, J = Var("i", 8), Var("j", 4)
i, j = ix.of(I), ix.of(J)
F32, I64, B8 = torch.float32, torch.int64, torch.bool


def load(name: str = "x", at: ix.Index = i, dtype: torch.dtype = F32) -> Expr:
    return Expr("load", (name, at), dtype)


x, y, m = load("x"), load("y"), load("m", dtype=B8)


def meaning(e: Expr, **data: torch.Tensor) -> torch.Tensor:
    env = {"i": torch.arange(8)[:, None], "j": torch.arange(4)[None]}
    return evaluate(e, lambda a: env[a.key], lambda name, at: data[name][at])


# -- building ----------------------------------------------------------------------------------------------------------


def test_equal_expressions_are_equal_and_hash_equal() -> None:
    assert x + y == load("x") + load("y") and hash(x + y) == hash(load("x") + load("y"))
    assert x + y != y + x and x + y != x - y
    assert len({x * 2.0, x * 2.0, x * 3.0}) == 2


def test_constants_differ_by_dtype_sign_of_zero_and_nan() -> None:
    one = [ex.const(1, d) for d in (F32, I64, B8, torch.float64)]
    assert len(set(one)) == 4
    assert ex.const(0.0, F32) != ex.const(-0.0, F32)
    assert ex.const(math.nan, F32) == ex.const(math.nan, F32)


def test_note_takes_no_part_in_equality() -> None:
    assert Expr("neg", (x,), F32, "a line") == Expr("neg", (x,), F32)


def test_low_precision_is_computed_in_float32() -> None:
    assert ex.const(1, torch.bfloat16).dtype == F32
    assert ex.cast(load(dtype=torch.float64), torch.float16).dtype == F32
    assert ex.round_to(x, F32) is x
    rounded = ex.round_to(x, torch.bfloat16)
    assert rounded.dtype == F32 and ex.round_to(rounded, torch.bfloat16) is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_what_a_low_precision_holds_is_nothing(dtype: torch.dtype) -> None:
    for narrow in (torch.bool, torch.int8, torch.uint8):
        held = ex.cast(load(dtype=narrow), F32)
        every = torch.arange(-300, 300).to(narrow)
        assert ex.round_to(held, dtype) is held and torch.equal(every.to(dtype).to(F32), every.to(F32))
    assert ex.round_to(ex.cast(load(dtype=torch.int16), F32), dtype).op == "round"


def test_python_numbers_take_the_other_operands_dtype() -> None:
    assert (x + 1).args[1] == ex.const(1.0, F32)
    assert (2 * load(dtype=I64)).args[0] == ex.const(2, I64)
    assert (x < 3).dtype == B8
    assert (m & m).op == "land" and (load(dtype=I64) & 3).op == "band"


@pytest.mark.parametrize("op", sorted(ex.UNARY))
def test_every_unary_primitive_has_a_meaning(op: str) -> None:
    assert op in UNARY


@pytest.mark.parametrize("op", sorted(ex.BINARY))
def test_every_binary_primitive_has_a_meaning(op: str) -> None:
    assert op in BINARY


# -- folding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (x * 1, x),
        (1 * x, x),
        (x / 1, x),
        (ex.index_value(i) + ex.index_value(j) * 2, ex.index_value(i + 2 * j)),
        (ex.index_value(i) - ex.index_value(i), ex.const(0, I64)),
        (m & ex.const(True, B8), m),
        (m | ex.const(True, B8), ex.const(True, B8)),
        (ex.where(ex.const(True, B8), x, y), x),
        (ex.where(ex.const(False, B8), x, y), y),
        (ex.where(m, 0.0, ex.const(0.0, F32)), ex.const(0.0, F32)),
        (ex.masked(m, lambda: ex.const(0.0, F32), 0), ex.const(0.0, F32)),
        (ex.less(i, 8), ex.const(True, B8)),
        (ex.less(i + 8, 8), ex.const(False, B8)),
        (ex.less(i - 8, 0), ex.const(True, B8)),
        (ex.at_least(i, 8), ex.const(False, B8)),
        (ex.round_to(ex.const(1.001, F32), torch.bfloat16), ex.const(1.0, F32)),
        (ex.less(i, 7), Expr("lt", (ex.index_value(i), ex.const(7, I64)), B8)),
        (ex.at_least(i, 0), ex.const(True, B8)),
        (ex.at_least(i + 3, 4), Expr("ge", (ex.index_value(i + 3), ex.const(4, I64)), B8)),
        (ex.masked(ex.const(False, B8), lambda: x, 0), ex.const(0.0, F32)),
        (ex.cast(ex.const(3, I64), F32), ex.const(3.0, F32)),
    ],
)
def test_folds(given_: Expr, expected: Expr) -> None:
    assert given_ == expected


@pytest.mark.parametrize(
    "e", [x + 0, x * 0, x - x, x / x, load(dtype=B8) * True, ex.where(m, ex.const(0.0, F32), -0.0)], ids=repr
)
def test_does_not_fold_what_nan_or_zero_would_spoil(e: Expr) -> None:
    """NaN * 0 is NaN, -0 + 0 is 0, inf - inf is NaN; a bool times one is a bool; 0 is not -0."""
    assert e.op in ("add", "mul", "sub", "div", "where")


def test_a_choice_among_equal_constants_is_no_choice_unless_it_checks_something() -> None:
    zero = ex.const(0.0, F32)
    checked = Expr("check", (load("at", dtype=I64), ex.const(3, I64), 1, 0), I64)
    for cond, kept in ((m, False), (ex.binary("lt", checked, 2), True)):
        chosen = Expr("masked", (cond, x, zero), F32)
        (same,) = ex.rewrite((chosen,), lambda e: zero if e == x else None)
        assert (same.op == "masked") == kept and (kept or same == zero)


def test_conversion_of_a_float_constant_to_an_integer_is_left_to_run_time() -> None:
    """C and torch agree on what is undefined only when neither is asked at compile time."""
    assert ex.cast(ex.const(math.inf, F32), I64).op == "cast"


VALUES = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-42])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["add", "sub", "mul", "div", "minimum", "maximum", "pow", "lt", "eq", "copysign"]),
    st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, math.nan])),
    st.booleans(),
)
def test_folding_keeps_every_special_value(op: str, constant: float | None, swap: bool) -> None:
    a, b = x, (y if constant is None else ex.const(constant, F32))
    left, right = (b, a) if swap else (a, b)
    folded = ex.binary(op, left, right)
    plain = Expr(op, (left, right), B8 if op in ex.TO_BOOL else F32)
    data = {"x": VALUES, "y": VALUES.flip(0)}
    one, two = (meaning(e, **data).expand(8, 1) for e in (folded, plain))
    assert torch.equal(one.isnan(), two.isnan())
    keep = ~two.isnan()
    assert torch.equal(one[keep], two[keep])
    if one.is_floating_point():
        assert torch.equal(torch.signbit(one[keep]), torch.signbit(two[keep]))


# -- walking and rewriting ---------------------------------------------------------------------------------------------


def test_walk_gives_operands_before_users_and_each_once() -> None:
    e = (x + y) * (x + y)
    seen = ex.walk(e)
    assert len(seen) == len(set(seen)) == 4
    assert [n.op for n in seen] == ["load", "load", "add", "mul"]


def test_walk_enters_the_indices_of_loads() -> None:
    where = Expr("check", (load("p", j, I64), ex.const(8, I64), 1, 0), I64)
    e = load("t", 4 * ix.of(ix.Opaque(where, 8)) + i)
    assert [n.op for n in ex.walk(e)] == ["load", "const", "check", "load"]
    assert ex.variables(e) == {I, J}
    assert e.depends(J) and not x.depends(J)


def test_rewrite_reaches_run_time_indices() -> None:
    where = load("p", j, I64)
    e = load("t", ix.of(ix.Opaque(where, 8)) + 8 * i)
    (new,) = ex.rewrite((e,), lambda n: None, lambda at: ix.substitute(at, {J: 3, I: 2}))
    assert repr(new) == "t[16 + <p[3]>]" or repr(new) == "t[<p[3]> + 16]"


def test_rewrite_without_a_change_gives_an_equal_expression() -> None:
    e = (x + y) * 2
    assert ex.rewrite((e,), lambda n: None)[0] == e


def test_rewrite_folds_conditions_that_became_constant() -> None:
    e = ex.masked(ex.less(i, 7), lambda: x, 0.0)
    assert ex.rewrite((e,), lambda n: None, lambda at: ix.substitute(at, {I: 2}))[0] == load("x", 2)
    assert ex.rewrite((e,), lambda n: None, lambda at: ix.substitute(at, {I: 7}))[0] == ex.const(0.0, F32)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 7), st.integers(0, 3), st.integers(-3, 11), st.integers(-3, 11))
def test_substituting_indices_is_evaluating_there(a: int, b: int, low: int, high: int) -> None:
    inside = ex.at_least(i + j, low) & ex.less(i + j, high)
    e = ex.masked(inside, lambda: load("x", i) * 2 + load("x", j), -1.0) + ex.cast(
        ex.index_value(8 * i + j), F32
    )
    data = torch.arange(8.0) + 1
    (there,) = ex.rewrite((e,), lambda n: None, lambda at: ix.substitute(at, {I: a, J: b}))
    assert not ex.variables(there)
    assert meaning(there, x=data) == meaning(e, x=data).expand(8, 4)[a, b]


def test_what_rewriting_leaves_alone_is_the_same_object() -> None:
    where = ix.of(ix.Opaque(Expr("check", (load("p", j, I64), ex.const(8, I64), 1, 0), I64), 8))
    kept = Expr("at", ("x", (where, i * 4 + j)), F32) * load("y", where)
    assert ex.rewrite((kept,), lambda n: None, lambda at: ix.substitute(at, {}))[0] is kept
    (changed,) = ex.rewrite((kept,), lambda n: load("q", n.args[1], I64) if n == load("p", j, I64) else None)
    assert [n.args[0] for n in ex.walk(changed) if n.op == "load"] == ["q", "y"]


def test_masked_loads_are_not_read_outside() -> None:
    e = ex.masked(ex.less(i, 5), lambda: load("short", i), -1.0)
    assert meaning(e, short=torch.ones(5)).flatten().tolist() == [1.0] * 5 + [-1.0] * 3
    with pytest.raises(IndexError):
        meaning(load("short", i), short=torch.ones(5))


def test_cost_counts_shared_work_once() -> None:
    e = ex.unary("exp", x)
    assert ex.cost(e * e) == ex.cost(e) + 1
    assert ex.cost(ex.unary("exp", x)) > ex.cost(x + y) > 0


def test_comparisons_are_of_whole_rows_where_they_can_be() -> None:
    """4 i + j, 0 <= j < 4, is below 12 where i is below 3."""
    for make, op in ((ex.less, "lt"), (ex.at_least, "ge")):
        for n, of in ((12, 3), (10, None), (16, 4)):
            got, position = make(4 * i + j, n), 4 * i + j
            want = Expr(op, (ex.index_value(position), ex.index_value(n)), B8)
            assert torch.equal(*torch.broadcast_tensors(meaning(got), meaning(want)))
            assert got == (make(i, of) if of is not None else want)
