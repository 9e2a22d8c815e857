"""Scalar and vector expressions as C++ text.

An expression becomes a chain of `const` declarations, each with the aten op and the user's line it came from.
The same function names serve vectors (vf32, vi64, ...) and scalars (float, int64_t, ...): see
include/dicp_vec.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.dependence import Dependence
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.vendor.cpu_graph.lane_strides import lane_repeats, lane_stride

VECTOR = {
    torch.float32: "vf32",
    torch.float64: "vf64",
    torch.int32: "vi32",
    torch.int64: "vi64",
    torch.int16: "vi32",
    torch.int8: "vi32",
    torch.uint8: "vi32",
    torch.bool: "vbool",
}
SCALAR = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.int16: "int32_t",
    torch.int8: "int32_t",
    torch.uint8: "int32_t",
    torch.bool: "bool",
}
STORAGE = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
    torch.bfloat16: "bf16",
    torch.float16: "half",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
WRAPPED = {torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t"}
SMALL = 1 << 21  # numerators below it have exact quotients by a float's product (dicp_vec.h)
WRAPPING = frozenset("add sub mul neg abs shl bnot div_trunc div_floor pow cast reciprocal".split())

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
WORDS = {"round_even": "round"}  # primitives whose C++ name differs
BOOL_WORDS = {
    "add": "lor",
    "mul": "land",
    "maximum": "lor",
    "minimum": "land",
    "sub": "lxor",
    "band": "land",
    "bor": "lor",
    "bxor": "lxor",
    "fmax": "lor",
    "fmin": "land",
    "bnot": "lnot",
}


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A constant as a C++ literal of the exact value."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        suffix = "f" if dtype == torch.float32 else ""
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return ("-" if value < 0 else "") + f"__builtin_inf{suffix}()"
        if dtype == torch.float32:
            value = ctypes.c_float(value).value
            if math.isinf(value):
                return ("-" if value < 0 else "") + "__builtin_inff()"
        text = repr(float(value)) + suffix
    else:
        if value == -(1 << 63):
            return "INT64_MIN"
        text = f"int64_t({value})" if dtype == torch.int64 else str(int(value))
    return f"({text})" if value < 0 or text.startswith("-") else text


def index_text(i: Index, names: Callable[[ix.Atom], str]) -> str:
    """An index as a C++ int64_t expression."""
    if isinstance(i, int):
        return str(i) if i >= 0 else f"({i})"
    parts = []
    for mono, coef in i.terms:
        factors = [_atom_text(a, names) for a in mono]
        if coef != 1 or not factors:
            factors.insert(0, str(coef) if abs(coef) < 1 << 31 else f"int64_t({coef})")
        parts.append(" * ".join(factors))
    return " + ".join(parts).replace("+ -", "- ")


def _sum_text(i: Index, number: Callable[[int], str], atom: Callable[[ix.Atom], str]) -> str:
    """An index as C++, its numbers and atoms spelled so."""
    if isinstance(i, int):
        return number(i)
    parts = []
    for mono, factor in i.terms:
        words = [atom(a) for a in mono]
        parts.append(" * ".join(words if words and factor == 1 else [*words, number(factor)]))
    return " + ".join(parts)


def _atom_text(a: ix.Atom, names: Callable[[ix.Atom], str]) -> str:
    if isinstance(a, (ix.Div, ix.Mod)):
        sign = "/" if isinstance(a, ix.Div) else "%"
        low = ix.limit(a.num, upper=False)
        num, den = index_text(a.num, names), index_text(a.den, names)
        if low is not None and ix.nonnegative(low):
            return (
                f"(({num}) {sign} ({den}))"
                if not den.isidentifier() and not den.isdigit()
                else f"(({num}) {sign} {den})"
            )
        return f"{'div_floor' if sign == '/' else 'remainder'}<int64_t>({num}, {den})"
    return names(a)


def wrapped(text: str, dtype: torch.dtype) -> str:
    """A value that may be past what its dtype holds."""
    return f"wrap<{WRAPPED[dtype]}>({text})" if dtype in WRAPPED else text


@dataclass(frozen=True)
class Mask:
    """The condition under which loads may happen."""

    name: str
    vector: bool


@dataclass
class Scope:
    """A block of C++ being written: its lines, and the names expressions already have in it or around it."""

    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    names: dict[tuple[Expr, Mask | None], str] = field(default_factory=dict)
    lanes: str | None = None  # name of the lanes tag in a vector scope
    provides: frozenset[Any] = frozenset()  # loop variables and refs that exist from this scope inwards

    def find(self, key: tuple[Expr, Mask | None]) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope.names:
                return scope.names[key]
            scope = scope.parent
        return None


class ExpressionWriter:
    """Writes expressions of one kernel into scopes."""

    def __init__(self, params: dict[str, torch.dtype], vector_var: Var | None, lanes: int) -> None:
        self.params = params
        self.vector_var = vector_var
        self.lanes = lanes
        self.refs: dict[str, tuple[str, bool]] = {}  # ref -> (C++ name, is a vector)
        self.replaced: dict[Expr, Callable[[Scope], str]] = {}
        self.count = 0
        self._vectors: dict[Expr, bool] = {}
        self.dependence = Dependence()
        self._visited: set[tuple[Expr, Mask | None]] = set()

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count - 1}"

    # -- facts ---------------------------------------------------------------------------------------------

    def is_vector(self, x: Expr) -> bool:
        """Whether x differs between lanes."""
        for e in () if x in self._vectors else ex.walk(x):
            own = self.vector_var is not None and self.vector_var in ex.own_variables(e)
            if e.op == "ref":
                own = self.refs[e.args[0]][1]
            self._vectors[e] = own or any(self._vectors[c] for c in ex.children(e))
        return self._vectors[x]

    def home(self, x: Expr, scope: Scope) -> Scope:
        """The outermost scope in which x can be computed."""
        needs = self.dependence.of(x)
        while scope.parent is not None and not needs & scope.provides:
            scope = scope.parent
        return scope

    # -- expressions ---------------------------------------------------------------------------------------

    def write(self, x: Expr, scope: Scope, mask: Mask | None = None) -> str:
        """The C++ name (or literal) of x, declared in scope if it has none yet. `mask`: where loads may
        happen."""
        if x.op == "const":
            return literal(x.args[0], x.dtype)
        if x.op == "ref":
            return self.refs[x.args[0]][0]
        for operand in ex.deep_operands(x, mask, self._visited):
            self.write(operand, scope, mask)
        key = (x, mask if mask is not None and self.dependence.reads_memory(x) else None)
        if key[1] is None:
            scope = self.home(x, scope)
        known = scope.find(key)
        if known is not None:
            return known
        if x in self.replaced:
            text = self.replaced[x](scope)
        else:
            text = self._text(x, scope, key[1])
        name = self.fresh()
        kind = (VECTOR if self.is_vector(x) and scope.lanes is not None else SCALAR)[x.dtype]
        note = f"  // {x.note}" if x.note else ""
        scope.lines.append(f"const {kind} {name} = {text};{note}")
        scope.names[key] = name
        return name

    def vector(self, x: Expr, scope: Scope, mask: Mask | None = None) -> str:
        """Like write, broadcast to a vector when x is the same in every lane."""
        text = self.write(x, scope, mask)
        return text if scope.lanes is None or self.is_vector(x) else f"splat<{VECTOR[x.dtype]}>({text})"

    def _text(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        if x.op == "load":
            return self._load(x, scope, mask)
        if x.op == "index" and x.dtype == torch.int32 and scope.lanes is not None:
            return self._small_index(x.args[0], scope, mask)
        if x.op == "index":
            return self.index(x.args[0], scope, mask)
        if x.op == "masked":
            return self._masked(x, scope, mask)
        if x.op == "check":
            return self._check(x, scope, mask)
        if x.op == "nonzero":
            value = self.write(x.args[0], scope, mask)
            return f"nonzero({value}, err + {x.args[1]}, {self._active(x, scope, mask)})"
        args = [self.write(a, scope, mask) for a in x.args if isinstance(a, Expr)]
        text = self._call(x, args)
        return wrapped(text, x.dtype) if x.op in WRAPPING else text

    def _call(self, x: Expr, args: list[str]) -> str:
        kinds = [a.dtype for a in x.args if isinstance(a, Expr)]
        if x.op == "cast":
            inner = x.args[0]
            if not self.is_vector(inner):
                return f"cast<{SCALAR[x.dtype]}>({args[0]})"
            return f"cast<{VECTOR[x.dtype]}>({args[0]})"
        if x.op == "round":
            return f"round_{STORAGE[x.args[1]]}({args[0]})"
        if kinds and all(k == torch.bool for k in kinds) and x.op in BOOL_WORDS:
            return f"{BOOL_WORDS[x.op]}({', '.join(args)})"
        if x.op in INFIX:
            return f"{args[0]} {INFIX[x.op]} {args[1]}"
        if x.op == "neg":
            return f"-{args[0]}"
        if x.op == "reciprocal":
            return f"{literal(1, x.dtype)} / {args[0]}"
        if (
            x.op == "where"
            and x.dtype != torch.bool
            and not any(self.is_vector(a) for a in x.args[1:])
            and self.is_vector(x.args[0])
        ):
            args[1] = f"splat<{VECTOR[x.dtype]}>({args[1]})"
        if x.op == "gcd" and x.dtype in WRAPPED:
            return f"gcd<{WRAPPED[x.dtype]}>({', '.join(args)})"
        if x.op == "pow" and not x.dtype.is_floating_point:
            return f"pow_int({', '.join(args)})"
        return f"{WORDS.get(x.op, x.op)}({', '.join(args)})"

    def _masked(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        cond, value, other = x.args
        c = self.write(cond, scope, mask)
        inner = self.both(mask, Mask(c, self.is_vector(cond) and scope.lanes is not None), scope)
        v = self.write(value, scope, inner)
        o = self.write(other, scope, mask)
        if self.is_vector(cond) and not self.is_vector(value) and not self.is_vector(other) and scope.lanes:
            v = f"splat<{VECTOR[x.dtype]}>({v})"
        return f"where({c}, {v}, {o})"

    def both(self, outer: Mask | None, inner: Mask, scope: Scope) -> Mask:
        if outer is None:
            return inner
        key = (Expr("both", (outer.name, inner.name), torch.bool), None)
        name = scope.find(key)
        if name is None:
            name = scope.names[key] = self.fresh("m")
            scope.lines.append(f"const auto {name} = land({outer.name}, {inner.name});")
        return Mask(name, outer.vector or inner.vector)

    def _check(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        position, limit, wrap, number = x.args
        p, n = self.write(position, scope, mask), self.write(limit, scope, mask)
        wraps = "true" if wrap else "false"
        return f"check_index({p}, {n}, {wraps}, err + {number}, {self._active(x, scope, mask)})"

    def _active(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        """Arguments that tell a check which lanes count."""
        lanes = scope.lanes if self.is_vector(x) and scope.lanes is not None else "One{}"
        if mask is None:
            return lanes
        return f"{lanes}, {self._any(mask, scope) if lanes == 'One{}' else mask.name}"

    def _any(self, mask: Mask, scope: Scope) -> str:
        """Whether a condition holds in any lane that is covered, for what is done once for all of them."""
        return f"hany({mask.name}, {scope.lanes})" if mask.vector else mask.name

    # -- indices -------------------------------------------------------------------------------------------

    def index(self, i: Index, scope: Scope, mask: Mask | None = None) -> str:
        """An index value: scalar text, or a vi64 when it differs between lanes."""
        v = self.vector_var
        varies = v is not None and scope.lanes is not None and self._index_varies(i)
        if not varies:
            return index_text(i, lambda a: self._atom_name(a, scope, mask))
        assert v is not None and isinstance(i, ix.Poly)
        split = ix.coefficient(i, v) if not self._opaque_varies(i) else None
        if split is not None and split[0] == 1:
            return f"iota({index_text(i, lambda a: self._atom_name(a, scope, mask))})"
        return self._vector_index(i, scope, mask)

    def _vector_index(self, i: Index, scope: Scope, mask: Mask | None) -> str:
        total = _sum_text(i, lambda n: f"int64_t({n})", lambda a: self._vector_atom(a, scope, mask))
        return total if isinstance(i, int) else f"({total})"

    def _vector_atom(self, a: ix.Atom, scope: Scope, mask: Mask | None) -> str:
        if isinstance(a, (ix.Div, ix.Mod)):
            if not self._index_varies(ix.of(a)):
                return _atom_text(a, lambda b: self._atom_name(b, scope, mask))
            word = "div_floor" if isinstance(a, ix.Div) else "remainder"
            num, den = self._vector_index(a.num, scope, mask), self._vector_index(a.den, scope, mask)
            return f"{word}({num}, {den})"
        if a == self.vector_var:
            return f"iota({a.name})"  # type: ignore[attr-defined]
        name = self._atom_name(a, scope, mask)
        narrow = isinstance(a, ix.Opaque) and a.payload.dtype == torch.int32 and self.is_vector(a.payload)
        return f"cast<vi64>({name})" if narrow else name

    def _atom_name(self, a: ix.Atom, scope: Scope, mask: Mask | None) -> str:
        if isinstance(a, ix.Opaque):
            return self.write(a.payload, scope, mask)
        return a.name  # type: ignore[attr-defined, no-any-return]

    def _index_varies(self, i: Index) -> bool:
        for a in ix.atoms(i):
            if a == self.vector_var or (isinstance(a, ix.Opaque) and self.is_vector(a.payload)):
                return True
        return False

    def _opaque_varies(self, i: Index) -> bool:
        return any(isinstance(a, ix.Opaque) and self.is_vector(a.payload) for a in ix.atoms(i))

    def place(self, buffer: str, i: Index, scope: Scope, mask: Mask | None) -> tuple[str, str]:
        """(function suffix, leading arguments) that reach position i: "" contiguous, "_strided", or
        gather/scatter."""
        if self.vector_var is None or scope.lanes is None or not self._index_varies(i):
            return "one", f"{buffer} + {self.index(i, scope, mask)}"
        step = self._step(i)
        if step is None or step == 0:
            return "indexed", self._apart(buffer, i, scope, mask)
        base = self._base(i, scope, mask)
        if step == 1:
            return "", f"{buffer} + {base}"
        return "_strided", f"{buffer} + {base}, {self._base(step, scope, mask)}"

    def is_contiguous(self, i: Index) -> bool:
        """Whether positions i of a vector's lanes follow one another."""
        return self._step(i) == 1

    def _step(self, i: Index) -> Index | None:
        """From one lane's position to the next one's; None where steps differ."""
        if self.vector_var is None or self._opaque_varies(i):
            return None
        return lane_stride(i, self.vector_var, self.lanes)

    def first(self, buffer: str, i: Index, scope: Scope) -> str:
        """Where the first lane lies."""
        return f"{buffer} + {self._base(i, scope, None)}"

    def _apart(self, buffer: str, i: Index, scope: Scope, mask: Mask | None) -> str:
        """Where the lanes read apart: memory, and the index of each. In 32 bits what differs between lanes
        and is small, since 64-bit lanes have no quotients and hardly products."""
        near: Index = 0
        for mono, factor in i.terms if isinstance(i, ix.Poly) else ():
            if any(self._index_varies(ix.of(a)) for a in mono):
                near = near + factor * ix.product(ix.of(a) for a in mono)
        if not self._is_small(near, 1 << 31):
            return f"{buffer}, {self.index(i, scope, mask)}"
        base = self._base(i - near, scope, mask)
        return f"{buffer}{f' + {base}' if base != '0' else ''}, {self._small_index(near, scope, mask)}"

    def _is_small(self, i: Index, limit: int) -> bool:
        """Whether all lanes are from 0 up to a limit, and numerators in it are few enough for a float."""
        if isinstance(i, int):
            return 0 <= i < limit
        low, high = ix.limit(i, upper=False), ix.limit(i, upper=True)
        if not isinstance(low, int) or not isinstance(high, int) or low < 0 or high >= limit:
            return False
        parts = [a for a in ix.atoms(i) if isinstance(a, (ix.Div, ix.Mod)) and self._index_varies(ix.of(a))]
        return all(c > 0 for _, c in i.terms) and all(
            isinstance(a.den, int) and self._is_small(a.num, SMALL) for a in parts
        )

    def _small_index(self, i: Index, scope: Scope, mask: Mask | None) -> str:
        return _sum_text(i, str, lambda a: self._small_atom(a, scope, mask))

    def _small_atom(self, a: ix.Atom, scope: Scope, mask: Mask | None) -> str:
        if not self._index_varies(ix.of(a)):
            return f"int32_t({_atom_text(a, lambda b: self._atom_name(b, scope, mask))})"
        if isinstance(a, (ix.Div, ix.Mod)):
            word = "small_quotient" if isinstance(a, ix.Div) else "small_remainder"
            return f"{word}({self._small_index(a.num, scope, mask)}, {a.den})"
        if isinstance(a, ix.Opaque):
            name = self.write(a.payload, scope, mask)
            return name if a.payload.dtype == torch.int32 else f"cast<vi32>({name})"
        return f"iota32(int32_t({a.name}))"  # type: ignore[attr-defined]

    def _base(self, i: Index, scope: Scope, mask: Mask | None) -> str:
        """An index in the first lane."""
        return index_text(i, lambda a: self._atom_name(a, scope, mask))

    def _load(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        buffer, i = x.args[0], x.args[1]
        how, where = self.place(buffer, i, scope, mask)
        if how == "one":
            text = f"load({where}, One{{}})"
            if mask is None:
                return text
            return f"({self._any(mask, scope)} ? {text} : {literal(0, x.dtype)})"
        rest = f"{scope.lanes}{_guard(mask)}"
        if how == "" and mask is not None:
            return f"load({where}, {scope.lanes}, {mask.name})"
        if how != "indexed":
            return f"load{how}({where}, {rest})"
        v = self.vector_var
        repeats = None if v is None or self._opaque_varies(i) else lane_repeats(i, v, self.lanes)
        if repeats is None:
            return f"gather({where}, {rest})"
        times = "LANES" if repeats == self.lanes else repeats
        return f"load_repeated<{times}>({buffer} + {self._base(i, scope, mask)}, {rest})"


def _guard(mask: Mask | None) -> str:
    """The argument for where loads of vectors may happen."""
    if mask is None:
        return ""
    return f", {mask.name}" if mask.vector else f", splat<vbool>({mask.name})"
