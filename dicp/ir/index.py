"""Integer index algebra: polynomials over loop variables and size symbols, with floor division and modulo.

    Index = int | Poly
    Poly  = sum of coefficient * product of atoms
    Atom  = Var (loop variable or size symbol) | Div (a // b) | Mod (a % b) | Opaque (a run-time value)

Constant results are always plain ints, so graphs with static sizes never build a symbolic object for a size.
Loop variables range over [0, size); size symbols are at least `low`, or anything where that is None: numbers
that the caller gives may be negative. Divisors are positive.
Source: the usual quotient/remainder identities; (d*q + r) // d = q + r // d for every integer q, r and d > 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

Index = Union[int, "Poly"]


class Atom:
    """One indivisible factor of a monomial."""

    __slots__ = ()
    key: str


@dataclass(frozen=True, eq=False)
class Var(Atom):
    """A loop variable (`size` is its extent) or a size symbol (`size` is None, the value is at
    least `low`, or any integer where `low` is None)."""

    name: str
    size: Index | None = None
    low: int | None = 0
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Var) and self.name == other.name and self.size == other.size
        )

    def __repr__(self) -> str:
        return self.name

    @property
    def signed(self) -> bool:
        """Whether it may be negative."""
        return self.size is None and self.low is None


@dataclass(frozen=True, eq=False)
class _Pair(Atom):
    num: Index
    den: Index
    key: str = field(init=False, repr=False)

    symbol = "?"

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"(({self.num}){self.symbol}({self.den}))")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Pair)
            and type(other) is type(self)
            and self.key == other.key
            and self.num == other.num  # variables of one name may differ in their extent
            and self.den == other.den
        )

    def __repr__(self) -> str:
        return _atom_text(self, repr)


class Div(_Pair):
    symbol = "//"


class Mod(_Pair):
    symbol = "%"


@dataclass(frozen=True, eq=False)
class Opaque(Atom):
    """An index read at run time (`payload` is the Expr that yields it), known to lie in [0, size)."""

    payload: Any
    size: Index | None

    @property
    def key(self) -> str:  # type: ignore[override]
        return f"<{getattr(self.payload, 'key', self.payload)}>"

    def __hash__(self) -> int:
        return hash(self.payload)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Opaque) and self.payload == other.payload)

    def __repr__(self) -> str:
        return self.key


Monomial = tuple[Atom, ...]


class Poly:
    """A normalised, non-constant polynomial. Build through the operators; never mutate."""

    __slots__ = ("_atoms", "_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        items = terms.items()
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(
            sorted(items, key=_term_key) if len(items) > 1 else items
        )
        self._hash = hash(self.terms)
        self._atoms: tuple[Atom, ...] | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Poly) and self._hash == other._hash and self.terms == other.terms
        )

    @property
    def is_atom(self) -> bool:
        return len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1

    def __add__(self, other: Index) -> Index:
        out = dict(self.terms)
        for mono, coef in _terms(other):
            out[mono] = out.get(mono, 0) + coef
        return _build(out)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return _build({m: -c for m, c in self.terms})

    def __sub__(self, other: Index) -> Index:
        return self + (-other)

    def __rsub__(self, other: Index) -> Index:
        return (-self) + other

    def __mul__(self, other: Index) -> Index:
        if isinstance(other, int):
            return 0 if other == 0 else Poly({m: c * other for m, c in self.terms})
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                mono = tuple(sorted(m1 + m2, key=_atom_key))
                out[mono] = out.get(mono, 0) + c1 * c2
        return _build(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: Index) -> Index:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Index) -> Index:
        return floordiv(other, self)

    def __mod__(self, other: Index) -> Index:
        return mod(self, other)

    def __rmod__(self, other: Index) -> Index:
        return mod(other, self)

    def __repr__(self) -> str:
        return text(self, repr)


def text(x: Index, opaque: Callable[[Opaque], str]) -> str:
    """x as text. opaque: what stands for a value read at run time."""
    if isinstance(x, int):
        return str(x)
    parts = []
    for mono, coef in x.terms:
        factors = [_atom_text(a, opaque) for a in mono]
        if coef != 1 or not factors:
            factors.insert(0, str(coef))
        parts.append("*".join(factors))
    return " + ".join(parts)


def _atom_text(a: Atom, opaque: Callable[[Opaque], str]) -> str:
    if isinstance(a, Opaque):
        return opaque(a)
    if not isinstance(a, _Pair):
        return repr(a)
    num, den = (
        f"({text(x, opaque)})" if isinstance(x, Poly) and not x.is_atom else text(x, opaque)
        for x in (a.num, a.den)
    )
    return f"({num}{a.symbol}{den})"


def _atom_key(a: Atom) -> str:
    return a.key


def _term_key(term: tuple[Monomial, int]) -> tuple[str, ...]:
    return tuple(a.key for a in term[0])


def _terms(x: Index) -> Iterable[tuple[Monomial, int]]:
    if isinstance(x, Poly):
        return x.terms
    return (((), x),) if x else ()


def _build(terms: dict[Monomial, int]) -> Index:
    """Drop zero terms, join c*d*(n//d) + c*(n%d) into c*n, and turn constants into ints."""
    terms = {m: c for m, c in terms.items() if c}
    for mono, coef in list(terms.items()):
        for pos, atom in enumerate(mono):
            if not isinstance(atom, Mod):
                continue
            rest = mono[:pos] + mono[pos + 1 :]
            scaled = floordiv(atom.num, atom.den) * atom.den * (Poly({rest: coef}) if rest else coef)
            if isinstance(scaled, Poly) and all(terms.get(m) == c for m, c in scaled.terms):
                joined: Index = -scaled
                joined = (
                    joined + Poly({m: c for m, c in terms.items() if m != mono}) if len(terms) > 1 else joined
                )
                return joined + Poly({rest: coef}) * atom.num if rest else joined + coef * atom.num
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Poly(terms)


def of(atom: Atom) -> Poly:
    """The polynomial that is one atom."""
    return Poly({(atom,): 1})


def product(xs: Iterable[Index]) -> Index:
    out: Index = 1
    for x in xs:
        out = out * x
    return out


def atoms(x: Index) -> tuple[Atom, ...]:
    """Every atom of x once, those inside divisions and modulos too (not those inside Opaque payloads). In an
    order that is the same in every process: kernels are known by their text."""
    if isinstance(x, int):
        return ()
    if x._atoms is None:  # found once: most of what kernels ask of an index begins so
        x._atoms = _atoms(x)
    return x._atoms


def _atoms(x: Poly) -> tuple[Atom, ...]:
    out: dict[Atom, None] = {}
    stack: list[Index] = [x]
    while stack:
        cur = stack.pop()
        if isinstance(cur, Poly):
            for mono, _ in cur.terms:
                for a in mono:
                    if a not in out:
                        out[a] = None
                        if isinstance(a, _Pair):
                            stack += [a.num, a.den]
    return tuple(out)


def map_atoms(x: Index, fn: Callable[[Atom], Index | None]) -> Index:
    """Replace atoms bottom-up: fn gives the replacement of a Var or Opaque, or None to keep it."""
    if isinstance(x, int):
        return x
    total: Index = 0
    for mono, coef in x.terms:
        term: Index = coef
        for a in mono:
            if isinstance(a, _Pair):
                num, den = map_atoms(a.num, fn), map_atoms(a.den, fn)
                factor: Index = floordiv(num, den) if isinstance(a, Div) else mod(num, den)
            else:
                new = fn(a)
                factor = of(a) if new is None else new
            term = factor * term if isinstance(factor, Poly) else term * factor
        total = total + term
    return total


def substitute(x: Index, mapping: Mapping[Atom, Index]) -> Index:
    return map_atoms(x, mapping.get) if any(a in mapping for a in atoms(x)) else x


def limit(x: Index, upper: bool) -> Index | None:
    """Upper (or lower) bound of x over its loop variables, as an index over size symbols; None
    when unknown."""
    if isinstance(x, int):
        return x
    total: Index = 0
    for mono, coef in x.terms:
        if len(mono) > 1 and any(isinstance(a, Var) and a.signed for a in mono):
            return None
        want_upper = upper == (coef > 0)
        term: Index = coef
        for a in mono:
            if isinstance(a, Var) and a.size is None:
                bound: Index | None = of(a)
            elif not want_upper:
                bound = 0 if lower_is_zero(a) else None
            else:
                bound = _atom_upper(a)
            if bound is None:
                return None
            term = term * bound
        total = total + term
    return total


def lower_is_zero(a: Atom) -> bool:
    if isinstance(a, Div):
        low = limit(a.num, upper=False)
        return low is not None and nonnegative(low)
    return True


def _atom_upper(a: Atom) -> Index | None:
    if isinstance(a, Mod):
        return a.den - 1
    if isinstance(a, Div):
        top = limit(a.num, upper=True)
        return None if top is None else floordiv(top, a.den)
    size = a.size if isinstance(a, (Var, Opaque)) else None
    return None if size is None else size - 1


def nonnegative(x: Index) -> bool:
    """Whether x >= 0 is proven for all admissible values of its atoms."""
    if isinstance(x, int):
        return x >= 0
    low = 0
    for mono, coef in x.terms:
        if coef < 0 and mono:
            return False
        least = 1
        for a in mono:
            if isinstance(a, Var) and a.signed:
                return False
            least *= (a.low or 0) if isinstance(a, Var) and a.size is None else 0
            if isinstance(a, Div) and not lower_is_zero(a):
                return False
        low += coef * least
    return low >= 0


def reach(x: Index) -> list[Index]:
    """Indices over size symbols of which the largest is not below the magnitude of x, nor below those of its
    parts as it is computed. Several where symbols may be negative: those count with either sign."""
    signed = [a for a in atoms(x) if isinstance(a, Var) and a.signed]
    out = [_reach(x)]
    for a in signed:
        out += [substitute(r, {a: -of(a)}) for r in out]
    return out


def _reach(x: Index) -> Index:
    if isinstance(x, int):
        return abs(x)
    return sum((abs(coef) * product(_atom_reach(a) for a in mono) for mono, coef in x.terms), 0)


def _atom_reach(a: Atom) -> Index:
    if isinstance(a, (Var, Opaque)):
        return (of(a) if isinstance(a, Var) else 0) if a.size is None else a.size
    assert isinstance(a, _Pair)
    return _reach(a.num if isinstance(a, Div) else a.den)


def in_range(x: Index, size: Index) -> bool:
    """Whether 0 <= x < size is proven."""
    low = limit(x, upper=False)
    return low is not None and nonnegative(low) and is_below(x, size)


def is_below(x: Index, size: Index) -> bool:
    """Whether x < size is proven."""
    top = limit(x, upper=True)
    return top is not None and nonnegative(size - top - 1)


def may_be_empty(x: Index) -> tuple[Index, ...]:
    """Sizes of the dimensions that x is looked up in at run time which may have no element: there its check,
    which gives 0, does not keep an access inside of the buffer."""
    looked_up = (a.size for a in atoms(x) if isinstance(a, Opaque) and a.size is not None)
    return tuple(dict.fromkeys(n for n in looked_up if not nonnegative(n - 1)))


def _exact(mono: Monomial, coef: int, den: Index) -> Index | None:
    """coef*mono / den when the division is exact for a single-term divisor."""
    terms = list(_terms(den))
    if len(terms) != 1:
        return None
    dmono, dcoef = terms[0]
    if coef % dcoef:
        return None
    rest = list(mono)
    for a in dmono:
        if a not in rest:
            return None
        rest.remove(a)
    return _build({tuple(rest): coef // dcoef})


def _split(num: Index, den: Index) -> tuple[Index, Index]:
    """num = quotient * den + rest, taking every term that divides exactly."""
    if num == den:
        return 1, 0
    quotient: Index = 0
    rest: Index = 0
    for mono, coef in _terms(num):
        part = _exact(mono, coef, den)
        if part is None:
            rest = rest + _build({mono: coef})
        else:
            quotient = quotient + part
    return quotient, rest


def _by_gcd(rest: Index, den: Index) -> tuple[int, Index, Index] | None:
    """Find g, hi, lo with rest = g*hi + lo, g | den and 0 <= lo < g, so that division and modulo act on hi
    alone."""
    if not isinstance(den, int) or isinstance(rest, int):
        return None
    for g in sorted({math.gcd(c, den) for _, c in rest.terms}, reverse=True):
        if g <= 1:
            return None
        hi, lo = _split(rest, g)
        if in_range(lo, g):
            return g, hi, lo
    return None


def floordiv(num: Index, den: Index) -> Index:
    if isinstance(num, int) and isinstance(den, int):
        return num // den
    if den == 1:
        return num
    quotient, rest = _split(num, den)
    if in_range(rest, den):
        return quotient
    scaled = _by_gcd(rest, den)
    if scaled is not None:
        g, hi, _ = scaled
        return quotient + floordiv(hi, den // g)
    if isinstance(rest, Poly) and rest.is_atom:
        inner = rest.terms[0][0][0]
        if isinstance(inner, Div):
            return quotient + floordiv(inner.num, inner.den * den)
    return quotient + of(Div(rest, den))


def mod(num: Index, den: Index) -> Index:
    if isinstance(num, int) and isinstance(den, int):
        return num % den
    if den == 1:
        return 0
    _, rest = _split(num, den)
    if in_range(rest, den):
        return rest
    scaled = _by_gcd(rest, den)
    if scaled is not None:
        g, hi, lo = scaled
        return mod(hi, den // g) * g + lo
    return of(Mod(rest, den))


def coefficient(x: Index, var: Var) -> tuple[Index, Index] | None:
    """(c, r) with x = c*var + r and neither c nor r naming var; None when x is not linear in var."""
    if isinstance(x, int):
        return 0, x
    if any(isinstance(a, Opaque) for a in atoms(x)):  # equal payloads may note other lines of the user's
        return _coefficient(x, var)
    return _known_coefficient(x, var)


def _coefficient(x: Poly, var: Var) -> tuple[Index, Index] | None:
    coef: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for mono, c in x.terms:
        count = sum(1 for a in mono if a == var)
        others = tuple(a for a in mono if a != var)
        if count > 1 or any(_mentions(a, var) for a in others):
            return None
        if count:
            coef[others] = c
        else:
            rest[mono] = c
    return _build(coef), _build(rest)


_known_coefficient = functools.lru_cache(1 << 12)(_coefficient)


def moves_by_one(x: Index, var: Var) -> bool:
    """Whether x grows by one where var does."""
    split = coefficient(x, var)
    return split is not None and split[0] == 1


def _mentions(a: Atom, var: Var) -> bool:
    if isinstance(a, _Pair):
        return depends(a.num, var) or depends(a.den, var)
    if isinstance(a, Opaque):
        return bool(a.payload.depends(var))
    return a == var


def depends(x: Index, var: Var) -> bool:
    return isinstance(x, Poly) and any(_mentions(a, var) for mono, _ in x.terms for a in mono)


def linearize(idx: Iterable[Index], shape: Iterable[Index]) -> Index:
    """Row-major linear position of idx in shape."""
    out: Index = 0
    for i, n in zip(idx, shape, strict=True):
        out = out * n + i
    return out


def delinearize(pos: Index, shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Inverse of linearize."""
    out: list[Index] = []
    for k in range(len(shape) - 1, 0, -1):
        out.append(mod(pos, shape[k]))
        pos = floordiv(pos, shape[k])
    if shape:
        out.append(pos)
    return tuple(reversed(out))


def evaluate(x: Index, env: Callable[[Atom], Any]) -> Any:
    """Numeric value of x; env gives the value (int or integer array) of each Var and Opaque."""
    if isinstance(x, int):
        return x
    total: Any = 0
    for mono, coef in x.terms:
        term: Any = coef
        for a in mono:
            if isinstance(a, Div):
                term = term * (evaluate(a.num, env) // evaluate(a.den, env))
            elif isinstance(a, Mod):
                term = term * (evaluate(a.num, env) % evaluate(a.den, env))
            else:
                term = term * env(a)
        total = total + term
    return total
