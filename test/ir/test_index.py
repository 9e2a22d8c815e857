"""The index algebra against brute force: whatever is simplified, the value stays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dicp.ir import index as ix
from dicp.ir.index import Index, Var

I, J, K = (Var(n, s) for n, s in zip("ijk", (4, 6, 5), strict=True))
S = Var("s0", None, 2)  # a size symbol, at least 2
N = Var("n", ix.of(S))  # a loop over it
Z = Var("z", None, None)  # a number that may be negative
i, j, k, s, n, z = map(ix.of, (I, J, K, S, N, Z))


def points() -> Iterator[dict[str, int]]:
    """Every admissible value of the variables, for a few values of the symbol."""
    for size in (2, 3, 7):
        for a, b, c, d in itertools.product(range(4), range(0, 6, 2), range(0, 5, 2), range(size)):
            yield {"i": a, "j": b + (a + d) % 2, "k": c, "s0": size, "n": d, "z": (a + b + c) % 7 - 4}


def value(x: Index, at: dict[str, int]) -> int:
    return ix.evaluate(x, lambda a: at[a.key])


def same(x: Index, y: Index) -> bool:
    return all(value(x, at) == value(y, at) for at in points())


LEAVES = [i, j, k, s, n, z, 1, 2, 3, 4, 6, 12, -1, -5]


@st.composite
def indices(draw: st.DrawFn, depth: int = 3) -> Index:
    """Sums, products, quotients and remainders, divisors positive."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(LEAVES))
    op = draw(st.sampled_from(["+", "-", "*", "//", "%"]))
    a = draw(indices(depth=depth - 1))
    if op in ("//", "%"):
        b = draw(st.sampled_from([2, 3, 4, 6, 24, s, 2 * s, s * s, s + 1]))
        return ix.floordiv(a, b) if op == "//" else ix.mod(a, b)
    b = draw(indices(depth=depth - 1))
    return a + b if op == "+" else a - b if op == "-" else a * b


@settings(max_examples=150, deadline=None)
@given(indices(2), st.sampled_from([2, 3, 4, 6, 12, s, 3 * s, s * s, s + 1]))
def test_floordiv_and_mod_are_pythons(x: Index, d: Index) -> None:
    q, r = ix.floordiv(x, d), ix.mod(x, d)
    for at in points():
        a, b = value(x, at), value(d, at)
        assert (value(q, at), value(r, at)) == (a // b, a % b), (x, d, q, r, at)


@settings(max_examples=150, deadline=None)
@given(indices(2), indices(2))
def test_sums_and_products_keep_their_value(x: Index, y: Index) -> None:
    for at in points():
        a, b = value(x, at), value(y, at)
        assert value(x + y, at) == a + b and value(x - y, at) == a - b and value(x * y, at) == a * b


@settings(max_examples=100, deadline=None)
@given(indices(3), indices(2), indices(2))
def test_substitution_commutes_with_evaluation(x: Index, a: Index, b: Index) -> None:
    """Variables may be replaced by anything that stays within their range."""
    assume(ix.in_range(a, 4) and ix.in_range(b, 6))
    y = ix.substitute(x, {I: a, J: b})
    for at in points():
        assert value(y, at) == value(x, {**at, "i": value(a, at), "j": value(b, at)})


@settings(max_examples=150, deadline=None)
@given(indices(3), st.sampled_from([1, 4, 6, 24, s, 6 * s, s + 3]))
def test_proofs_hold(x: Index, size: Index) -> None:
    if ix.nonnegative(x):
        assert all(value(x, at) >= 0 for at in points())
    if ix.in_range(x, size):
        assert all(0 <= value(x, at) < value(size, at) for at in points())


@settings(max_examples=150, deadline=None)
@given(indices(3))
def test_nothing_reaches_further(x: Index) -> None:
    reached = ix.reach(x)
    for at in points():
        assert abs(value(x, at)) <= max(value(r, at) for r in reached), (x, reached, at)


def test_a_number_that_may_be_negative_proves_nothing() -> None:
    assert not ix.nonnegative(z) and not ix.nonnegative(z + 3) and not ix.in_range(i * z, 12 * s)
    assert ix.nonnegative(z - z) and ix.in_range(ix.mod(z, 3), 3)


@settings(max_examples=100, deadline=None)
@given(indices(3), st.sampled_from([I, J, N]))
def test_coefficient_splits_off_one_variable(x: Index, var: Var) -> None:
    split = ix.coefficient(x, var)
    if split is None:
        return
    c, rest = split
    assert not ix.depends(c, var) and not ix.depends(rest, var)
    assert same(c * ix.of(var) + rest, x) if not isinstance(c, int) or c else same(rest, x)


@settings(max_examples=100, deadline=None)
@given(indices(3))
def test_equal_values_built_differently_are_one_object_to_a_set(x: Index) -> None:
    y = x + i - i
    assert y == x and hash(y) == hash(x)


SHAPES = [(4, 6), (4, 6, 5), (2, 2, 6), (6, 1, 4), (ix.of(S), 6), (4, ix.of(S), 5), (ix.of(S), ix.of(S))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delinearize_is_the_inverse_of_linearize(shape: tuple[Index, ...]) -> None:
    names = [Var(f"x{d}", size) for d, size in enumerate(shape)]
    idx = tuple(0 if size == 1 else ix.of(v) for v, size in zip(names, shape, strict=True))
    assert ix.delinearize(ix.linearize(idx, shape), shape) == idx


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=1, max_size=4)
)
def test_reshape_by_brute_force(a: list[int], b: list[int]) -> None:
    """A position through any two shapes of equal size comes back, and its digits are in range."""
    total = ix.product(a)
    b = b if ix.product(b) == total else [*a[::-1]]
    flat = ix.of(Var("p", total)) if total != 1 else 0
    there = ix.delinearize(flat, tuple(b))
    back = ix.linearize(there, b)
    for p in range(total):
        at = {"p": p}
        digits = [value(x, at) for x in there]
        assert all(0 <= d < size for d, size in zip(digits, b, strict=True))
        assert value(back, at) == p


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (ix.floordiv(6 * i + j, 6), "i"),
        (ix.mod(6 * i + j, 6), "j"),
        (ix.floordiv(i, 4), "0"),
        (ix.mod(i, 4), "i"),
        (ix.floordiv(12 * i + 2 * j, 4), "(j//2) + 3*i"),
        (ix.mod(12 * i + 2 * j, 4), "2*(j%2)"),
        (6 * ix.floordiv(i + 3 * j, 6) + ix.mod(i + 3 * j, 6), "i + 3*j"),
        (ix.floordiv(ix.floordiv(k * j, 2), 3), "((j*k)//6)"),
        (ix.floordiv(s * i + n, s), "i"),
        (ix.mod(s * i + n, s), "n"),
        (ix.floordiv(s * s * i, s), "i*s0"),
        (i - i, "0"),
        ((i + 1) * (i - 1), "-1 + i*i"),
        (ix.floordiv(7, 2), "3"),
        (ix.mod(-1, 6), "5"),
    ],
)
def test_identity(given_: Index, expected: str) -> None:
    assert str(given_) == expected


def test_constant_results_are_plain_ints() -> None:
    for x in (i - i, ix.floordiv(i, 4), i * 0, ix.mod(4 * i, 2), ix.product([2, 3]), s - s + 3):
        assert type(x) is int


def test_negative_numerators_round_down() -> None:
    x = ix.floordiv(i - 3, 2)
    assert [value(x, {"i": a}) for a in range(4)] == [-2, -1, -1, 0]


def test_run_time_index_lies_in_its_range_and_counts_as_one_atom() -> None:
    class Payload:
        def __hash__(self) -> int:
            return 7

        def depends(self, var: Var) -> bool:
            return var == I

    at = ix.of(ix.Opaque(Payload(), 10))
    assert ix.in_range(at, 10) and not ix.in_range(at, 9)
    assert ix.floordiv(at, 10) == 0
    assert ix.depends(5 * at + j, I) and not ix.depends(5 * at + j, K)
    assert ix.coefficient(5 * at + j, J) == (1, 5 * at)
    assert ix.coefficient(5 * at + j, I) is None


def test_atoms_come_in_the_order_of_the_text() -> None:
    """Kernels are known by their text, and what is named in it is named in this order."""
    names = list("cahbgfed")
    assert [a.key for a in ix.atoms(ix.product(ix.of(Var(n, 4)) for n in names))] == sorted(names)


def test_variables_of_another_size_make_another_quotient() -> None:
    """Loops of different lengths may bear one name, for a while: what is a rewrite of one is not the other."""
    longer = ix.of(Var("i", 5))
    for op in (ix.floordiv, ix.mod):
        assert op(i - 1, 3) != op(longer - 1, 3)
        assert ix.substitute(op(longer - 1, 3), {Var("i", 5): i}) == op(i - 1, 3)
        assert ix.atoms(ix.substitute(op(longer - 1, 3), {Var("i", 5): i})) == ix.atoms(op(i - 1, 3))
