"""The kernel IR: what a kernel vendor turns into source text.

    kernel  := name axes params sizes statement*
    axis    := var < extent [reduced] [serial]
    reduce  := ref[, ref] = kind(expr, ...)          over the reduced axes
    scan    := ref[, ref] = kind(expr, ...)          inclusive, along the (single) reduced axis
    store   := buffer[index] (= | += | *= | max= | min=) expr
    expr    := const | [index] | buffer[index] | ref | primitive(expr, ...)      (ir/expr.py)

An expression that names a reduced axis, or a scan's result, has one value per point of the full space; any
other has one value per point of the outer (not reduced) axes. Statements are in dependency order. Indices are
flat, in elements.
A kernel's hash ignores buffer and axis names, so equal kernels are built once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import NAMES, Expr, rewrite, walk
from dicp.ir.index import Index, Var


@dataclass(frozen=True)
class Axis:
    """`serial`: two iterations may update the same element, so they run in order (or combine atomically)."""

    var: Var
    reduced: bool = False
    serial: bool = False

    @property
    def size(self) -> Index:
        assert self.var.size is not None
        return self.var.size


class _Statement:
    value: Expr

    @cached_property
    def expressions(self) -> list[Expr]:
        return walk(*self._roots())

    def _roots(self) -> list[Expr]:
        return [self.value]


@dataclass(frozen=True)
class Reduce(_Statement):
    """`refs` are the results' names: one, or (mean, m2) for welford, (position,) for argmax."""

    refs: tuple[str, ...]
    kind: str
    value: Expr
    note: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Scan(_Statement):
    """Inclusive scan; two refs (best, position) for the arg kinds."""

    refs: tuple[str, ...]
    kind: str
    value: Expr
    note: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Store(_Statement):
    buffer: str
    index: Index
    value: Expr
    mode: str = "set"
    unique: bool = True
    note: str | None = field(default=None, compare=False)

    def _roots(self) -> list[Expr]:
        return [self.value, *(a.payload for a in ix.atoms(self.index) if isinstance(a, ix.Opaque))]


Statement = Reduce | Scan | Store


@dataclass(frozen=True)
class Param:
    """One buffer argument; `written`, `read`: what the kernel does with it."""

    name: str
    dtype: torch.dtype
    written: bool
    read: bool = True


@dataclass(frozen=True)
class Kernel:
    name: str
    axes: tuple[Axis, ...]
    params: tuple[Param, ...]
    sizes: tuple[Var, ...]
    body: tuple[Statement, ...]
    origins: tuple[str, ...] = field(default=(), compare=False)

    @property
    def outer(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduced)

    @property
    def inner(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.reduced)

    @cached_property
    def digest(self) -> str:
        """Content hash, indifferent to the names of buffers, axes, refs and size symbols, and to whose lines
        it computes: equal kernels of two layers are one."""
        text = show(canonical(self), notes=False)
        if self.sizes:  # code divides by what proofs allow, and those know what a size is at least
            text += f" {[v.low for v in self.sizes]}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def expressions(s: Statement) -> list[Expr]:
    """Every expression of a statement, those of a position found at run time included."""
    return s.expressions


def places(body: Iterable[Statement]) -> list[tuple[str, Index]]:
    """Buffer and flat position of every store and then every load, each once."""
    body = list(body)
    stores = [(s.buffer, s.index) for s in body if isinstance(s, Store)]
    loads = [(e.args[0], e.args[1]) for s in body for e in expressions(s) if e.op == "load"]
    return list(dict.fromkeys(stores + loads))


def accessed(body: Iterable[Statement]) -> list[Index]:
    """Flat positions of every store and then every load, each once, of whatever buffers."""
    return list(dict.fromkeys(i for _, i in places(body)))


def rewrite_body(
    body: Iterable[Statement],
    leaf: Callable[[Expr], Expr | None],
    on_index: Callable[[Index], Index],
) -> list[Statement]:
    """Every expression and store index rewritten; expressions shared between statements stay shared."""
    body = list(body)
    roots = [s.value for s in body]
    spots: list[int] = []
    for k, s in enumerate(body):
        if isinstance(s, Store) and isinstance(s.index, ix.Poly):
            roots.append(Expr("index", (s.index,), torch.int64))
            spots.append(k)
    done = rewrite(tuple(roots), leaf, on_index)
    flats = {k: e.args[0] for k, e in zip(spots, done[len(body) :], strict=True)}
    out: list[Statement] = []
    for k, s in enumerate(body):
        if isinstance(s, Store):
            out.append(Store(s.buffer, flats.get(k, s.index), done[k], s.mode, s.unique, s.note))
        else:
            out.append(type(s)(s.refs, s.kind, done[k], s.note))
    return out


def identity(kind: str, dtype: torch.dtype) -> bool | int | float:
    """What leaves a reduction or scan of that kind as it is; of the arg kinds, the best of nothing."""
    kind = kind.removeprefix("arg")
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if kind == "logsumexp":
        return float("-inf")
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if kind == "max" else info.max


def canonical(kernel: Kernel) -> Kernel:
    """The kernel with axes i0.., buffers b0.., refs r0.. and sizes n0.. renamed in order of appearance."""
    sizes = {v: Var(f"n{k}", None, v.low) for k, v in enumerate(kernel.sizes)}
    size_map: dict[ix.Atom, Index] = {v: ix.of(n) for v, n in sizes.items()}
    axes = {a.var: Var(f"i{k}", ix.substitute(a.size, size_map)) for k, a in enumerate(kernel.axes)}
    index_map: dict[ix.Atom, Index] = {v: ix.of(n) for v, n in axes.items()}
    index_map.update(size_map)
    buffers = {p.name: f"b{k}" for k, p in enumerate(kernel.params)}
    refs = {
        r: f"r{k}" for k, r in enumerate(r for s in kernel.body if not isinstance(s, Store) for r in s.refs)
    }

    def leaf(x: Expr) -> Expr | None:
        if x.op == "load":
            return Expr("load", (buffers[x.args[0]], *x.args[1:]), x.dtype)
        if x.op == "ref":
            return Expr("ref", (refs[x.args[0]],), x.dtype)
        return None

    def on_index(i: Index) -> Index:
        return ix.substitute(i, index_map)

    body: list[Statement] = []
    for s in rewrite_body(kernel.body, leaf, on_index):
        if isinstance(s, Store):
            body.append(Store(buffers[s.buffer], s.index, s.value, s.mode, s.unique))
        else:
            body.append(type(s)(tuple(refs[r] for r in s.refs), s.kind, s.value))
    return Kernel(
        "k",
        tuple(Axis(axes[a.var], a.reduced, a.serial) for a in kernel.axes),
        tuple(Param(buffers[p.name], p.dtype, p.written, p.read) for p in kernel.params),
        tuple(sizes.values()),
        tuple(body),
    )


_STORE_SIGN = {"set": "=", "add": "+=", "mul": "*=", "max": "max=", "min": "min="}


def show(kernel: Kernel, notes: bool = True) -> str:
    """The kernel as text; shared subexpressions get names v0, v1, ... notes: with ops and user's lines."""
    params = ", ".join(f"{p.name}: {NAMES[p.dtype]}{'*' if p.written else ''}" for p in kernel.params)
    axes = ", ".join(
        f"{a.var} < {a.size}{' reduced' if a.reduced else ''}{' serial' if a.serial else ''}"
        for a in kernel.axes
    )
    sizes = f" sizes {', '.join(v.name for v in kernel.sizes)}" if kernel.sizes else ""
    lines = [f"kernel {kernel.name}({params}){sizes}", f"  for {axes}" if axes else "  once"]
    names: dict[Expr, str] = {}

    def operand(x: Expr) -> str:
        if x.op == "const":
            return f"{x.args[0]}:{NAMES[x.dtype]}"
        return str(x.args[0]) if x.op == "ref" else names[x]

    def define(s: Statement) -> None:
        for x in expressions(s):
            if x in names or x.op in ("const", "ref"):
                continue
            names[x] = f"v{len(names)}"
            note = f"    # {x.note}" if notes and x.note else ""
            lines.append(f"  {names[x]}: {NAMES[x.dtype]} = {ex.text(x, operand)}{note}")

    for s in kernel.body:
        define(s)
        if isinstance(s, Store):
            lines.append(
                f"  {ex.place(s.buffer, s.index, operand)} {_STORE_SIGN[s.mode]} {operand(s.value)}"
                f"{'' if s.unique else '  (duplicates)'}"
            )
        else:
            word = "reduce" if isinstance(s, Reduce) else "scan"
            lines.append(f"  {', '.join(s.refs)} = {word} {s.kind} {operand(s.value)}")
    return "\n".join(lines)
