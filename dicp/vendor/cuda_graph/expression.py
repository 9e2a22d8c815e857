"""Scalar expressions as Triton text.

An expression becomes a chain of assignments, each with the aten op and the user's line it came from. Every
value has the dims of the tile it differs along: (), x, r, or both; Triton broadcasts the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.compat import e4m3_overflow
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.dependence import Dependence
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.vendor.cuda_graph.vectors import Walk

Dims = frozenset[str]
NO_DIMS: Dims = frozenset()

TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
EIGHT_BITS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Floats that are bytes to Triton (device/storage.py): it converts them as eager does not, and not on every
GPU."""
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "land": "&",
    "lor": "|",
    "lxor": "^",
    "band": "&",
    "bor": "|",
    "bxor": "^",
}
BOOL_INFIX = {"add": "|", "mul": "&", "sub": "^", "maximum": "|", "minimum": "&", "fmax": "|", "fmin": "&"}
WORDS = {"abs": "absolute", "pow": "power"}  # primitives that device/ spells otherwise
LITERAL = (
    torch.float32,
    torch.int32,
    torch.int64,
)  # dtypes of plain numbers beside an operand of the same dtype


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A plain number; inf and NaN in Triton's spelling."""
    if dtype.is_floating_point:
        value = float(value)
        if dtype == torch.float32:
            value = torch.tensor(value, dtype=torch.float32).item()
        if math.isnan(value) or math.isinf(value):
            return f'float("{value}")'
        return repr(value) if value >= 0 and not math.copysign(1, value) < 0 else f"({value!r})"
    return str(int(value)) if value >= 0 else f"({int(value)})"


def typed(value: bool | int | float, dtype: torch.dtype) -> str:
    """A constant that carries its dtype."""
    if dtype == torch.bool:
        return f"tl.full([], {bool(value)}, tl.int1)"
    return f"tl.full([], {literal(value, dtype)}, {TYPES[dtype]})"


def host_text(i: Index) -> str:
    """An index over size symbols as Python (and Triton) text; sizes and divisors are not negative."""
    if isinstance(i, int):
        return str(i)
    parts = []
    for mono, coef in i.terms:
        factors = [
            f"({host_text(a.num)}) {a.symbol} ({host_text(a.den)})"
            if isinstance(a, (ix.Div, ix.Mod))
            else a.key
            for a in mono
        ]
        factors = [f"({f})" if " " in f else f for f in factors]
        if coef != 1 or not factors:
            factors.insert(0, str(coef))
        parts.append(" * ".join(factors))
    return " + ".join(parts).replace("+ -", "- ")


@dataclass(eq=False)
class Scope:
    """A block being written: its lines, and the names expressions already have in it or around it."""

    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    names: dict[tuple[Expr, str | None], str] = field(default_factory=dict)
    provides: frozenset[Any] = frozenset()  # loop variables and refs that exist from this scope inwards

    def find(self, key: tuple[Expr, str | None]) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope.names:
                return scope.names[key]
            scope = scope.parent
        return None


@dataclass(frozen=True)
class Mask:
    """The condition under which loads may happen."""

    name: str
    dims: Dims


class ExpressionWriter:
    """Writes expressions of one kernel into scopes.

    dims: the tile dims a loop variable runs along. shape: the text of a tile's shape with these dims. live:
    the masks of dims whose last tile may reach beyond the end.
    """

    def __init__(self, dims: dict[Var, Dims], shape: Callable[[Dims], str], live: dict[str, str]) -> None:
        self.var_dims, self.shape, self.live = dims, shape, live
        self.walk: Walk | None = None  # along rows that begin at no whole vector
        self.eviction: dict[str, str] = {}  # of the buffers whose rows are read more than once
        self.refs: dict[str, str] = {}
        self.ref_dims: dict[str, Dims] = {}
        self.count = 0
        self._dims: dict[Expr, Dims] = {}
        self.dependence = Dependence()
        self._visited: set[tuple[Expr, Mask | None]] = set()

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count - 1}"

    # -- facts -----------------------------------------------------------------------------------------------

    def dims(self, x: Expr) -> Dims:
        """Tile dims along which x differs."""
        for e in () if x in self._dims else ex.walk(x):
            own = NO_DIMS.union(*(self.var_dims.get(v, NO_DIMS) for v in ex.own_variables(e)))
            if e.op == "ref":
                own = self.ref_dims[e.args[0]]
            self._dims[e] = own.union(*(self._dims[c] for c in ex.children(e)))
        return self._dims[x]

    def index_dims(self, i: Index) -> Dims:
        out = NO_DIMS
        for a in ix.atoms(i):
            if isinstance(a, ix.Opaque):
                out |= self.dims(a.payload)
            elif isinstance(a, Var):
                out |= self.var_dims.get(a, NO_DIMS)
        return out

    def _home(self, x: Expr, scope: Scope) -> Scope:
        needs = self.dependence.of(x)
        while scope.parent is not None and not needs & scope.provides:
            scope = scope.parent
        return scope

    # -- expressions -----------------------------------------------------------------------------------------

    def write(self, x: Expr, scope: Scope, mask: Mask | None = None) -> str:
        """The name of x's value, assigned in scope if it has none yet. `mask`: where loads may happen."""
        if x.op == "const":
            return typed(x.args[0], x.dtype)
        if x.op == "ref":
            return self.refs[x.args[0]]
        for operand in ex.deep_operands(x, mask, self._visited):
            self.write(operand, scope, mask)
        key = (x, mask.name if mask is not None and self.dependence.reads_memory(x) else None)
        if key[1] is None:
            scope, mask = self._home(x, scope), None
        known = scope.find(key)
        if known is not None:
            return known
        text = self._text(x, scope, mask)
        if x.dtype == torch.bool and not self.dims(x) and x.op != "load":
            text = f"d.truth({text})"  # interpreted, it would be spread as numbers of what was compared
        name = self.fresh()
        scope.lines.append(f"{name} = {text}" + (f"  # {x.note}" if x.note else ""))
        scope.names[key] = name
        return name

    def full(self, x: Expr, scope: Scope, dims: Dims, mask: Mask | None = None) -> str:
        """x's value spread over a tile."""
        return self.spread(self.write(x, scope, mask), self.dims(x), dims)

    def spread(self, text: str, have: Dims, want: Dims) -> str:
        return text if have == want or not want else f"tl.broadcast_to({text}, {self.shape(want)})"

    def _text(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        if x.op == "load":
            return self._load(x, scope, mask)
        if x.op == "index":
            return self._index_value(x.args[0], scope, mask)
        if x.op == "masked":
            return self._masked(x, scope, mask)
        if x.op == "check":
            return self._check(x, scope, mask)
        if x.op == "nonzero":
            return self._nonzero(x, scope, mask)
        if x.op == "cast":
            return cast_text(self.write(x.args[0], scope, mask), x.args[0].dtype, x.dtype)
        if x.op == "round":
            return widened(narrowed(self.write(x.args[0], scope, mask), x.args[1]), x.args[1])
        return self._operation(x, scope, mask)

    def _operation(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        operands = list(x.args)
        booleans = all(a.dtype == torch.bool for a in operands)
        sign = BOOL_INFIX.get(x.op) if booleans else None
        sign = sign or INFIX.get(x.op)
        if sign is not None and booleans and x.op in ("lt", "le", "gt", "ge"):  # one signed bit would be -1
            return f" {sign} ".join(f"{self.write(a, scope, mask)}.to(tl.int8)" for a in operands)
        if sign is not None:
            return f" {sign} ".join(self._operand(a, operands, scope, mask) for a in operands)
        args = [self.write(a, scope, mask) for a in operands]
        if x.op == "bnot" and x.dtype == torch.uint8:
            return f"{args[0]} ^ {typed(255, torch.uint8)}"
        if x.op in ("lnot", "bnot"):
            return f"{args[0]} == 0" if booleans else f"~{args[0]}"
        if x.op == "where":
            return f"tl.where({', '.join(args)})"
        if x.op in ("floor", "ceil", "trunc", "round_even") and not x.dtype.is_floating_point:
            return args[0]
        if x.op in ("isnan", "isinf") and not operands[0].dtype.is_floating_point:
            return f"{args[0]} != {args[0]}"
        if x.op == "signbit" and not operands[0].dtype.is_floating_point:
            return f"{args[0]} < 0"
        if x.op == "abs" and x.dtype in (torch.bool, torch.uint8):
            return args[0]
        if len(operands) > 1:  # the interpreter mixes up the dtypes of comparisons between bare numbers
            args = [
                self._constant_tile(o, self.dims(x)) if o.op == "const" else a
                for o, a in zip(operands, args, strict=True)
            ]
        return f"d.{WORDS.get(x.op, x.op)}({', '.join(args)})"

    def _constant_tile(self, x: Expr, dims: Dims) -> str:
        shape = self.shape(dims) if dims else "[]"
        return typed(x.args[0], x.dtype).replace("tl.full([]", f"tl.full({shape}", 1)

    def _operand(self, a: Expr, operands: list[Expr], scope: Scope, mask: Mask | None) -> str:
        """An operand of an infix operator; a constant beside another operand is a plain number."""
        if a.op == "const" and a.dtype in LITERAL and any(o.op != "const" for o in operands):
            return literal(a.args[0], a.dtype)
        return self.write(a, scope, mask)

    def _masked(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        cond, value, other = x.args
        c = self.write(cond, scope, mask)
        inner = self._both(mask, Mask(c, self.dims(cond)), scope)
        v = self.write(value, scope, inner)
        return f"tl.where({c}, {v}, {self.write(other, scope, mask)})"

    def _both(self, outer: Mask | None, inner: Mask, scope: Scope) -> Mask:
        if outer is None:
            return inner
        key = (Expr("both", (outer.name, inner.name), torch.bool), None)
        name = scope.find(key)
        if name is None:
            name = scope.names[key] = self.fresh("m")
            scope.lines.append(f"{name} = {outer.name} & {inner.name}")
        return Mask(name, outer.dims | inner.dims)

    def _check(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        position, limit, wrap, number = x.args
        dims = self.dims(x) | (mask.dims if mask is not None else NO_DIMS)
        p = self.full(position, scope, dims, mask)
        live = self.mask_text(dims, mask) or "tl.full([], True, tl.int1)"
        return f"d.check({p}, {self.write(limit, scope, mask)}, {bool(wrap)}, flags + {number}, {live})"

    def _nonzero(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        dims = self.dims(x) | (mask.dims if mask is not None else NO_DIMS)
        live = self.mask_text(dims, mask) or "tl.full([], True, tl.int1)"
        return f"d.nonzero({self.full(x.args[0], scope, dims, mask)}, flags + {x.args[1]}, {live})"

    # -- memory ----------------------------------------------------------------------------------------------

    def mask_text(self, dims: Dims, mask: Mask | None = None) -> str:
        """The condition under which the elements of a tile exist, and `mask` holds; empty when always."""
        parts = [self.live[k] for k in sorted(dims, reverse=True) if k in self.live]
        return " & ".join(parts + ([mask.name] if mask is not None else []))

    def _load(self, x: Expr, scope: Scope, mask: Mask | None) -> str:
        buffer, i = x.args[0], x.args[1]
        dims = self.index_dims(i)
        want = dims | (mask.dims if mask is not None else NO_DIMS)
        live, dtype = self.mask_text(want, mask), self.storage[buffer]
        if self.walk is not None and mask is None and (at := self.walk.address(i)) is not None:
            where, live = f"{buffer} + ({at})", self.walk.read(live, dtype.itemsize)
        else:
            where = self.pointer(buffer, i, scope, mask, want)
        arguments = f"{where}, mask={live}, other=0" if live else where
        if "r" in dims and buffer in self.eviction:
            arguments += f', eviction_policy="{self.eviction[buffer]}"'
        return widened(f"tl.load({arguments})", dtype)

    storage: dict[str, torch.dtype]

    def pointer(self, buffer: str, i: Index, scope: Scope, mask: Mask | None, want: Dims) -> str:
        """The addresses of an index, as a tile with the dims `want`."""
        text = self.index(i, scope, mask)
        if self.index_dims(i) == want:
            return buffer if text == "0" else f"{buffer} + ({text})" if " " in text else f"{buffer} + {text}"
        if isinstance(i, int):
            return f"{buffer} + tl.full({self.shape(want)}, {text}, INDEX)"
        return f"{buffer} + tl.broadcast_to({text}, {self.shape(want)})"

    # -- indices ---------------------------------------------------------------------------------------------

    def _index_value(self, i: Index, scope: Scope, mask: Mask | None) -> str:
        """An index as an int64 value."""
        if not self.index_dims(i) and not any(isinstance(a, ix.Opaque) for a in ix.atoms(i)):
            return (
                f"tl.full([], {self.index(i, scope, mask)}, tl.int64)"
                if isinstance(i, int)
                else f"({self.index(i, scope, mask)}).to(tl.int64)"
            )
        return f"({self.index(i, scope, mask)}).to(tl.int64)"

    def index(self, i: Index, scope: Scope, mask: Mask | None = None) -> str:
        if isinstance(i, int):
            return str(i)
        parts = []
        for mono, coef in i.terms:
            factors = [self._atom(a, scope, mask) for a in mono]
            if coef != 1 or not factors:
                factors.append(str(coef) if coef >= 0 or not factors else f"({coef})")
            parts.append(" * ".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    def _atom(self, a: ix.Atom, scope: Scope, mask: Mask | None) -> str:
        if isinstance(a, ix.Opaque):
            found = self.write(a.payload, scope, mask)
            return f"{found}.to(INDEX)" if a.payload.dtype == torch.int32 else found
        if isinstance(a, (ix.Div, ix.Mod)):
            low = ix.limit(a.num, upper=False)
            num, den = self.index(a.num, scope, mask), self.index(a.den, scope, mask)
            if low is not None and ix.nonnegative(low):
                den = den if den.isidentifier() or den.isdigit() else f"({den})"
                return f"(({num}) {a.symbol} {den})"
            return f"d.{'floor' if isinstance(a, ix.Div) else 'mod'}_index({num}, {den})"
        return a.key


def widened(text: str, dtype: torch.dtype) -> str:
    """What memory holds, as what computes."""
    if dtype in EIGHT_BITS:
        return f"d.from_{EIGHT_BITS[dtype]}({text})"
    return f"d.widen({text})" if dtype in ex.LOW_PRECISION else text


def narrowed(text: str, dtype: torch.dtype) -> str:
    """A value as what memory holds."""
    if dtype == torch.float8_e4m3fn:
        return f"d.to_e4m3({text}, {e4m3_overflow()})"
    if dtype in EIGHT_BITS:
        return f"d.to_{EIGHT_BITS[dtype]}({text})"
    return f"d.narrow({text}, {TYPES[dtype]})" if dtype in ex.LOW_PRECISION else text


def cast_text(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A conversion as torch makes it: bool compares with zero, small integers by way of int32."""
    if target == torch.bool:
        return f"{text} != 0"
    if source.is_floating_point and target in (torch.int8, torch.uint8, torch.int16):
        return f"{text}.to(tl.int32).to({TYPES[target]})"
    return f"{text}.to({TYPES[target]})"
