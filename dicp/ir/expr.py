"""Scalar expressions: what one element of a tensor is computed by.

An `Expr` is a node `(op, args, dtype)`, frozen but for its note; shared subexpressions are shared objects.
Floats of sixteen and of eight bits are computed in float32, so an Expr's dtype is one of COMPUTE_DTYPES;
loads widen and stores round.

    const(value)   index(Index)   load(buffer, flat Index)   at(value name, logical index tuple)   ref(name)
    cast(x)   round(x, storage dtype)
    masked(condition, x, other)       x, whose loads happen only where the condition holds
    check(position, size, wrap, k)    the position; out of range, the program raises its k-th error
    nonzero(x, k)                     x; where it is 0, the program raises its k-th error
    and the primitives of UNARY, BINARY and TERNARY
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Union

import torch

from dicp.ir import index as ix
from dicp.ir.exact_positions import whole_part
from dicp.ir.index import Index

COMPUTE_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
)
LOW_PRECISION = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Converted and moved, as in eager; no op computes with them."""
_RANGES = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in COMPUTE_DTYPES
    if dtype != torch.bool and not dtype.is_floating_point
}
NAMES = {
    torch.bool: "b8",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

UNARY = frozenset(
    """neg abs sign sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh
    cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid floor ceil trunc round_even isnan isinf
    signbit lnot bnot""".split()
)
BINARY = frozenset(
    """add sub mul div div_trunc div_floor remainder fmod pow atan2 hypot copysign nextafter
    minimum maximum fmin fmax lt le gt ge eq ne land lor lxor band bor bxor shl shr gcd lcm""".split()
)
TERNARY = frozenset(["where", "fma"])
PRIMITIVES = UNARY | BINARY | TERNARY
STRUCTURE = frozenset("const index load at ref cast round masked check nonzero".split())
"""What is no primitive: every vendor writes it."""
TO_BOOL = frozenset("lt le gt ge eq ne land lor lxor lnot isnan isinf signbit".split())
CHECKS = ("check", "nonzero")  # the last argument is the check's number
# What takes a call, or a polynomial of many terms.
EXPENSIVE = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    erf erfc erfinv lgamma digamma sigmoid pow atan2 hypot fmod remainder""".split()
)

LONG = 100  # characters of a text that is written out

Number = bool | int | float
Operand = Union["Expr", bool, int, float]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements stored as `dtype` are computed."""
    return torch.float32 if dtype in LOW_PRECISION or dtype in FLOAT8 else dtype


class Expr:
    """One scalar operation. `note` (op and user line, for comments in generated code) takes no part in
    equality."""

    __slots__ = ("_children", "_hash", "_key", "args", "dtype", "note", "op")

    def __init__(self, op: str, args: tuple[Any, ...], dtype: torch.dtype, note: str | None = None) -> None:
        self.op, self.args, self.dtype, self.note = op, args, dtype, note
        self._hash = hash((op, args, dtype, type(args[0]) if op == "const" else None))
        self._children: tuple[Expr, ...] | None = None
        self._key: str | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        if self is other:
            return True
        return (
            isinstance(other, Expr)
            and self._hash == other._hash
            and self.op == other.op
            and self.dtype == other.dtype
            and self.args == other.args
            and (self.op != "const" or repr(self.args) == repr(other.args))
        )

    def __repr__(self) -> str:
        return text(self, repr)

    @property
    def key(self) -> str:
        """Its text, but of a long one the beginning and a digest: where operands are shared, each with all of
        theirs, a whole text doubles with every step."""
        if self._key is None:
            for x in walk(self):
                if x._key is None:
                    whole = text(x, lambda operand: operand.key)
                    whole += f":{NAMES[x.dtype]}" if x.op in ("const", "index") else ""
                    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
                    x._key = whole if len(whole) <= LONG else f"{whole[: LONG // 2]}..{digest}"
        return self._key  # type: ignore[return-value]

    def depends(self, var: ix.Var) -> bool:
        """Whether the value changes with a loop variable (directly, or through a load's index)."""
        return var in variables(self)

    def __add__(self, o: Operand) -> Expr:
        return binary("add", self, o)

    def __radd__(self, o: Operand) -> Expr:
        return binary("add", o, self)

    def __sub__(self, o: Operand) -> Expr:
        return binary("sub", self, o)

    def __rsub__(self, o: Operand) -> Expr:
        return binary("sub", o, self)

    def __mul__(self, o: Operand) -> Expr:
        return binary("mul", self, o)

    def __rmul__(self, o: Operand) -> Expr:
        return binary("mul", o, self)

    def __truediv__(self, o: Operand) -> Expr:
        return binary("div", self, o)

    def __rtruediv__(self, o: Operand) -> Expr:
        return binary("div", o, self)

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __lt__(self, o: Operand) -> Expr:
        return binary("lt", self, o)

    def __le__(self, o: Operand) -> Expr:
        return binary("le", self, o)

    def __gt__(self, o: Operand) -> Expr:
        return binary("gt", self, o)

    def __ge__(self, o: Operand) -> Expr:
        return binary("ge", self, o)

    def __and__(self, o: Operand) -> Expr:
        return binary("land" if self.dtype == torch.bool else "band", self, o)

    def __or__(self, o: Operand) -> Expr:
        return binary("lor" if self.dtype == torch.bool else "bor", self, o)

    def __xor__(self, o: Operand) -> Expr:
        return binary("lxor" if self.dtype == torch.bool else "bxor", self, o)

    def __invert__(self) -> Expr:
        return unary("lnot" if self.dtype == torch.bool else "bnot", self)


def const(value: Number, dtype: torch.dtype) -> Expr:
    """A constant of a compute dtype; the Python number is converted as torch converts it, integers modulo
    what the dtype holds."""
    dtype = compute_dtype(dtype)
    if dtype == torch.bool:
        value = bool(value)
    elif dtype.is_floating_point:
        value = float(value)
    else:
        value = _wrapped(int(value), dtype)
    return Expr("const", (value,), dtype)


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """An integer as the integer dtype holds it (uint8: -1 -> 255)."""
    low, high = _RANGES[dtype]
    return value if low <= value <= high else (value - low) % (high - low + 1) + low


def index_value(i: Index) -> Expr:
    """The value of an index as an int64."""
    return const(i, torch.int64) if isinstance(i, int) else Expr("index", (i,), torch.int64)


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """x converted to a compute dtype (no rounding to what is stored: see round_to)."""
    dtype = compute_dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.op == "const" and not (isinstance(x.args[0], float) and not dtype.is_floating_point):
        return const(_held(x) if dtype == torch.float64 else x.args[0], dtype)
    if x.op == "where" and dtype.is_floating_point and x.args[1].op == x.args[2].op == "const":
        return where(x.args[0], cast(x.args[1], dtype), cast(x.args[2], dtype))
    if dtype == torch.int64 and (position := whole_part(x)) is not None:
        return index_value(position)
    return Expr("cast", (x,), dtype)


def _held(x: Expr) -> Number:
    """The number that a constant of float32 is; as written it may have more digits."""
    return ctypes.c_float(x.args[0]).value if x.dtype == torch.float32 else x.args[0]  # type: ignore[no-any-return]


def round_to(x: Expr, dtype: torch.dtype) -> Expr:
    """x (float32) rounded to the values of a dtype that is computed in float32; of others, x."""
    if compute_dtype(dtype) == dtype or (x.op == "round" and x.args[1] == dtype):
        return x
    if x.op == "load" and len(x.args) > 2 and x.args[2] == dtype:
        return x
    x = cast(x, torch.float32)
    narrow = (torch.bool,) if dtype in FLOAT8 else (torch.bool, torch.int8, torch.uint8)
    if x.op == "cast" and x.args[0].dtype in narrow:
        return x  # all of those are among them
    if x.op == "const":
        return const(torch.tensor(x.args[0], dtype=dtype).item(), torch.float32)
    return Expr("round", (x, dtype), torch.float32)


def _pair(a: Operand, b: Operand) -> tuple[Expr, Expr]:
    """Both operands in one dtype: a Python number takes the other's, but a float makes integers float32."""
    if not isinstance(a, Expr):
        assert isinstance(b, Expr)
        y, x = _pair(b, a)
        return x, y
    if not isinstance(b, Expr):
        if isinstance(b, float) and not a.dtype.is_floating_point:
            a = cast(a, torch.float32)
        return a, const(b, a.dtype)
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        return cast(a, wide), cast(b, wide)
    return a, b


def unary(op: str, x: Expr) -> Expr:
    assert op in UNARY, op
    if op == "lnot" and x.dtype != torch.bool:
        x = cast(x, torch.bool)
    return Expr(op, (x,), torch.bool if op in TO_BOOL else x.dtype)


def binary(op: str, a: Operand, b: Operand) -> Expr:
    assert op in BINARY, op
    x, y = _pair(a, b)
    if op in ("land", "lor", "lxor"):
        x, y = cast(x, torch.bool), cast(y, torch.bool)
    folded = _fold(op, x, y)
    return folded if folded is not None else Expr(op, (x, y), torch.bool if op in TO_BOOL else x.dtype)


def _fold(op: str, x: Expr, y: Expr) -> Expr | None:
    """Identities that hold for every value of the dtype, NaN and -0 included, and integer
    index arithmetic."""
    if op == "mul" and y.op == "const" and y.args[0] == 1 and x.dtype != torch.bool:
        return x  # x * 1 -> x
    if op == "mul" and x.op == "const" and x.args[0] == 1 and y.dtype != torch.bool:
        return y  # 1 * x -> x
    if op == "div" and y.op == "const" and y.args[0] == 1 and x.dtype.is_floating_point:
        return x  # x / 1 -> x
    if x.dtype == torch.int64 and op in ("add", "sub", "mul"):
        a, b = as_index(x), as_index(y)
        if a is not None and b is not None:
            made = a + b if op == "add" else a - b if op == "sub" else a * b
            largest = _RANGES[torch.int64][1]  # coefficients beyond it are no C++ integers
            if isinstance(made, int) or all(abs(c) <= largest for _, c in made.terms):
                return index_value(made)
            return None
    if x.op == "const" and y.op == "const" and op in ("lt", "le", "gt", "ge", "eq", "ne"):
        p, q = _held(x), _held(y)
        return const(
            {"lt": p < q, "le": p <= q, "gt": p > q, "ge": p >= q, "eq": p == q, "ne": p != q}[op], torch.bool
        )
    if op in ("land", "lor"):
        for u, v in ((x, y), (y, x)):
            if u.op == "const":
                return (v if u.args[0] else u) if op == "land" else (u if u.args[0] else v)
    return None


def as_index(x: Expr) -> Index | None:
    """The index that an int64 is, where it is one."""
    if x.op == "index":
        return x.args[0]  # type: ignore[no-any-return]
    return int(x.args[0]) if x.op == "const" and x.dtype == torch.int64 else None


def where(cond: Expr, a: Operand, b: Operand) -> Expr:
    """a where cond, else b."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        kind = torch.float32 if isinstance(a, float) or isinstance(b, float) else torch.int64
        a = const(a, kind)
    x, y = _pair(a, b)
    if cond.op == "const":
        return x if cond.args[0] else y
    if x.op == "const" and x == y:
        return x
    return Expr("where", (cast(cond, torch.bool), x, y), x.dtype)


def masked(cond: Expr, value: Callable[[], Expr], other: Operand) -> Expr:
    """value() where cond, else other; the loads inside value are done only where cond holds."""
    if cond.op == "const":
        if cond.args[0]:
            return value()
        inner = value()
        return other if isinstance(other, Expr) else const(other, inner.dtype)
    x, y = _pair(value(), other)
    if x.op == "const" and x == y:
        return x
    return Expr("masked", (cond, x, y), x.dtype)


def less(i: Index, n: Index) -> Expr:
    """i < n, decided at compile time when it can be."""
    if isinstance(i, int) and isinstance(n, int):
        return const(i < n, torch.bool)
    if ix.is_below(i, n):
        return const(True, torch.bool)
    if ix.nonnegative(i - n):
        return const(False, torch.bool)
    return Expr("lt", tuple(map(index_value, _in_whole_steps(i, n))), torch.bool)


def at_least(i: Index, n: Index) -> Expr:
    """i >= n, decided at compile time when it can be."""
    if isinstance(i, int) and isinstance(n, int):
        return const(i >= n, torch.bool)
    low = ix.limit(i - n, upper=False)
    if low is not None and ix.nonnegative(low):
        return const(True, torch.bool)
    if ix.is_below(i, n):
        return const(False, torch.bool)
    return Expr("ge", tuple(map(index_value, _in_whole_steps(i, n))), torch.bool)


def _in_whole_steps(i: Index, n: Index) -> tuple[Index, Index]:
    """What compares as i with n, of fewer terms where there are such: 16 j + k < 32 is j < 2 for 0 <= k < 16.
    The condition then holds for whole rows."""
    if isinstance(i, int) or not isinstance(n, int):
        return i, n
    for _, step in i.terms:
        if step > 1 and n % step == 0:
            j = ix.floordiv(i, step)
            if isinstance(j, int) or len(j.terms) < len(i.terms):
                return _in_whole_steps(j, n // step)
    return i, n


def index_text(i: Index, operand: Callable[[Expr], str]) -> str:
    """An index as text; what it reads from memory in angle brackets."""
    return ix.text(i, lambda a: f"<{operand(a.payload)}>")


def place(buffer: str, i: Index, operand: Callable[[Expr], str]) -> str:
    """An element of a buffer as text."""
    return f"{buffer}[{index_text(i, operand)}]"


def text(x: Expr, operand: Callable[[Expr], str]) -> str:
    """The operation as text. operand: what stands for each expression that it reads."""

    def argument(a: Any) -> str:
        if isinstance(a, Expr):
            return operand(a)
        if isinstance(a, (int, ix.Poly)) and not isinstance(a, bool):
            return index_text(a, operand)
        if isinstance(a, tuple):
            return f"({', '.join(map(argument, a))}{',' if len(a) == 1 else ''})"
        return repr(a)

    if x.op in ("const", "ref"):
        return str(x.args[0])
    if x.op == "index":
        return f"[{index_text(x.args[0], operand)}]"
    if x.op == "load":
        return place(x.args[0], x.args[1], operand)
    if x.op == "cast":
        return f"{NAMES[x.dtype]}({operand(x.args[0])})"
    return f"{x.op}({', '.join(map(argument, x.args))})"


def texts(x: Expr) -> list[str]:
    """x as text: the last line, before it those of long operands that are read more than once."""
    readers = Counter(c for e in walk(x) for c in set(children(e)))
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for e in walk(x):
        names[e] = text(e, names.__getitem__)
        if readers[e] > 1 and len(names[e]) > LONG // 4:
            lines.append(f"v{len(lines)} = {names[e]}")
            names[e] = f"v{len(lines) - 1}"
    return [*lines, names[x]]


def children(x: Expr) -> tuple[Expr, ...]:
    """The expressions x reads, those inside its index atoms too."""
    if x._children is None:  # found once: walks over expressions are much of a compile
        x._children = tuple(_children(x))
    return x._children


def _children(x: Expr) -> Iterator[Expr]:
    for a in x.args:
        if isinstance(a, Expr):
            yield a
        elif isinstance(a, ix.Poly):
            yield from _in_index(a)
        elif isinstance(a, tuple):
            for i in a:
                if isinstance(i, ix.Poly):
                    yield from _in_index(i)


def _in_index(i: Index) -> Iterator[Expr]:
    for a in ix.atoms(i):
        if isinstance(a, ix.Opaque):
            yield a.payload


def walk(*roots: Expr) -> list[Expr]:
    """Every distinct expression reachable from the roots, operands before users."""
    seen: set[Expr] = set()
    out: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        x, done = stack.pop()
        if done:
            out.append(x)
            continue
        if x in seen:
            continue
        seen.add(x)
        below = children(x)
        if below:
            stack.append((x, True))
            stack += [(c, False) for c in reversed(below) if c not in seen]
        else:
            out.append(x)
    return out


DEEP = 64
"""Operands beneath an expression above which they are written before it, not from within it."""
GUARDING = frozenset(["load", "index", "masked", "check", "nonzero", "const", "ref"])
"""Ops whose operands are written as they say: elsewhere, or where a mask holds."""


def deep_operands(x: Expr, place: Any, visited: set[tuple[Expr, Any]]) -> list[Expr]:
    """What is computed where x is and on the way to it, operands before users, if that is more than recursion
    of a writer's should go through: sums of hundreds of terms. visited: what was given before, by place."""
    order: list[Expr] = []
    stack = [(x, False)]
    while stack:
        e, done = stack.pop()
        if done:
            order.append(e)
        elif (e, place) not in visited:
            visited.add((e, place))
            stack.append((e, True))
            stack += [(a, False) for a in reversed(children(e) if e.op not in GUARDING else ())]
    return order[:-1] if len(order) > DEEP else []


def own_variables(x: Expr) -> set[ix.Var]:
    """Loop variables and size symbols in x's own indices."""
    out: set[ix.Var] = set()
    for a in x.args:
        for i in a if isinstance(a, tuple) else (a,):
            if isinstance(i, ix.Poly):
                out |= {v for v in ix.atoms(i) if isinstance(v, ix.Var)}
    return out


def variables(*roots: Expr) -> set[ix.Var]:
    out: set[ix.Var] = set()
    for x in walk(*roots):
        out |= own_variables(x)
    return out


def rewrite(
    roots: tuple[Expr, ...],
    leaf: Callable[[Expr], Expr | None],
    on_index: Callable[[Index], Index] | None = None,
) -> tuple[Expr, ...]:
    """Rebuild expressions bottom-up. `leaf` may replace a rebuilt node; `on_index` maps every index first.
    What does not change is the same object afterwards."""
    done: dict[Expr, Expr] = {}

    def atom(a: ix.Atom) -> Index | None:
        if isinstance(a, ix.Opaque) and a.payload in done:
            size = a.size if a.size is None or on_index is None else on_index(a.size)
            return ix.of(ix.Opaque(done[a.payload], size))
        return None

    def new_index(i: ix.Poly) -> Index:
        new: Index = i
        if any(done.get(p) is not p for p in _in_index(i)):
            new = ix.map_atoms(i, atom)
        if on_index is not None:
            new = on_index(new)
        return i if new == i else new

    def renewed(a: Any) -> Any:
        if isinstance(a, Expr):
            return done[a]
        if isinstance(a, ix.Poly):
            return new_index(a)
        if isinstance(a, tuple):
            new = tuple(map(renewed, a))
            return a if all(n is old for n, old in zip(new, a, strict=True)) else new
        return a

    for x in walk(*roots):
        args = tuple(map(renewed, x.args))
        same = all(a is b for a, b in zip(args, x.args, strict=True))
        y = x if same else _rebuild(x, args)
        replaced = leaf(y)
        if replaced is not None and replaced is not y:
            if replaced.note is None and replaced.op not in ("const", "index"):
                replaced.note = x.note
            y = replaced
        done[x] = y
    return tuple(done[r] for r in roots)


def _rebuild(x: Expr, args: tuple[Any, ...]) -> Expr:
    if x.op == "index" and isinstance(args[0], int):
        return const(args[0], torch.int64)
    if x.op in ("lt", "ge") and all(a.op in ("index", "const") and a.dtype == torch.int64 for a in args):
        a, b = as_index(args[0]), as_index(args[1])
        if a is not None and b is not None:
            return less(a, b) if x.op == "lt" else at_least(a, b)
    if x.op in ("masked", "where") and args[0].op == "const":
        return args[1] if args[0].args[0] else args[2]  # type: ignore[no-any-return]
    if x.op in ("masked", "where") and args[1].op == "const" and args[1] == args[2] and not _checks(args[0]):
        return args[1]  # type: ignore[no-any-return]
    if x.op in ("land", "lor"):
        return binary(x.op, *args)
    return Expr(x.op, args, x.dtype, x.note)


def _checks(x: Expr) -> bool:
    """Whether computing x may raise an error of the user's."""
    return any(e.op in ("check", "nonzero") for e in walk(x))


def _truncates(x: Expr) -> bool:
    """Whether a cast makes whole numbers of floats, for which not every vector unit has an instruction."""
    return x.args[0].dtype.is_floating_point and not x.dtype.is_floating_point and x.dtype != torch.bool


def cost(x: Expr) -> int:
    """Rough work per element, in adds, for the choice between recomputing a value and keeping it."""
    return sum(
        16
        if e.op in EXPENSIVE
        else 4
        if e.op in ("div", "sqrt", "rsqrt") or e.op == "cast" and _truncates(e)
        else 0
        if e.op in ("const", "index", "ref", "cast")
        else 1
        for e in walk(x)
    )
