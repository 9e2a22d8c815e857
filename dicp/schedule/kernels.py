"""From fused groups to kernels: forward values, drop needless stores, order and merge axes.

group { t = x + y; u = relu(t) }, t read nowhere else   ->   kernel: out[i] = maximum(x[i] + y[i], 0)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.kernel import (
    Axis,
    Kernel,
    Param,
    Reduce,
    Scan,
    Statement,
    Store,
    accessed,
    expressions,
    rewrite_body,
)
from dicp.schedule.defs import Buffer, Call, Lowered, Pointwise, Reduction, Scatter, View, views
from dicp.schedule.fuse import Group, Member, Step


@dataclass(eq=False)
class Launch:
    """One kernel call: the buffers bound to the kernel's parameters, in order. `first_check`: the number
    of its first run-time check."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]
    first_check: int = 0
    in_place: dict[str, frozenset[str]] = field(default_factory=dict)  # result -> operands it may overwrite
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


Item = Launch | Call


def build_kernels(steps: list[Step], lowered: Lowered) -> list[Item]:
    """Turn groups into kernel launches; calls pass through."""
    outside = _read_outside(steps, lowered)
    items: list[Item] = []
    messages: list[str] = []
    for step in steps:
        if isinstance(step, Call):
            items.append(step)
            continue
        launch = _launch(step, lowered, outside, messages)
        if launch is not None:
            items.append(launch)
    lowered.checks = messages
    return items


def _read_outside(steps: list[Step], lowered: Lowered) -> set[str]:
    """Buffers that must be in memory: read by another step than the one that computes them, or returned."""
    producer = {
        n: g
        for g in steps
        if isinstance(g, Group)
        for m in g.members
        for n in (b.name for b in m.definition.outputs)
    }
    needed = {v.buffer.name for v in views(lowered.outputs)}
    for step in steps:
        if isinstance(step, Call):
            needed |= {v.buffer.name for v in views((step.args, step.kwargs))}
            continue
        for m in step.members:
            needed |= {n for n, _ in m.reads if producer.get(n) is not step}
            if isinstance(m.definition, Scatter):
                needed |= {m.definition.base.name, m.definition.outputs[0].name}
    return needed


def _launch(group: Group, lowered: Lowered, outside: set[str], messages: list[str]) -> Launch | None:
    written = _body(group, lowered, outside)
    if not written:
        return None
    serial = _serial(group)
    axes = [Axis(v, v in group.reduced, v in serial) for v in group.axes]
    body = _drop_dead(written)
    body, axes = _settle_axes(body, axes)
    body, checks = _number_checks(body)
    first = len(messages)
    messages += [lowered.checks[c] for c in checks]
    used = _sizes(body, axes)
    params, buffers = _params(body, lowered)
    name = _name(group)
    kernel = Kernel(name, tuple(axes), params, used, tuple(body), _origins(body, group))
    reads = frozenset(e.args[0] for s in body for e in expressions(s) if e.op == "load")
    writes = frozenset(s.buffer for s in body if isinstance(s, Store))
    return Launch(kernel, buffers, first, _overwritable(body, axes), reads, writes)


def _origins(body: list[Statement], group: Group) -> tuple[str, ...]:
    """The op and user's line of everything that the kernel computes, in the order computed."""
    notes = [note for s in body for note in (*(e.note for e in expressions(s)), s.note)]
    return tuple(dict.fromkeys(n for n in (*notes, *(m.definition.note for m in group.members)) if n))


def _serial(group: Group) -> set[Var]:
    """Axes along which a scatter may meet the same element twice: all but those that are a target
    coordinate."""
    out: set[Var] = set()
    for m in group.members:
        d = m.definition
        if isinstance(d, Scatter) and not d.unique:
            safe = {a for i in m.index(d.target) if isinstance(i, ix.Poly) and i.is_atom for a in ix.atoms(i)}
            out |= {v for v in group.axes if v not in safe}
    return out


def _body(group: Group, lowered: Lowered, outside: set[str]) -> list[Statement]:
    """Statements of a group, its own values forwarded instead of read back."""
    body: list[Statement] = []
    forwarded: dict[str, Expr] = {}

    def read(x: Expr) -> Expr | None:
        if x.op == "round" and x.args[0].op == "load":  # what memory holds is rounded
            return x.args[0] if lowered.buffers[x.args[0].args[0]].dtype == x.args[1] else None
        if x.op != "at":
            return None
        name, idx = x.args
        if name in forwarded:
            return forwarded[name]
        return _load(lowered.buffers[name], idx)

    def resolve(e: Expr, m: Member) -> Expr:
        return ex.rewrite((e,), read, lambda i: ix.substitute(i, m.mapping))[0]

    for m in group.members:
        d = m.definition
        if isinstance(d, Pointwise):
            out = d.outputs[0]
            value = ex.cast(resolve(d.expr, m), out.dtype)
            if lowered.rounds or out.name in outside:  # whoever reads it here sees what others read in memory
                value = ex.round_to(value, out.dtype)
            if value.note is None and value.op not in ("const", "index"):
                value.note = d.note
            if out.name in outside or out.kind == "input":
                kept = _as_stored(value, out.dtype)
                body.append(Store(out.name, out.flat(m.index(d.index)), kept, note=d.note))
            forwarded[out.name] = value
        elif isinstance(d, Reduction):
            _reduction(d, m, resolve(d.expr, m), outside, body, forwarded, lowered.rounds or d.rounded)
        elif isinstance(d, Scatter):
            out = d.outputs[0]
            value = ex.cast(resolve(d.expr, m), out.dtype)
            probe = Expr("index", (out.flat(d.target),), value.dtype)
            target = resolve(probe, m)
            flat: Index = target.args[0] if target.op == "index" else int(target.args[0])
            body.append(Store(out.name, flat, value, d.mode, d.unique, d.note))
    return body


def _as_stored(value: Expr, dtype: torch.dtype) -> Expr:
    """A value for a store, which rounds it itself."""
    if value.op != "round" or value.args[1] != dtype:
        return value
    exact: Expr = value.args[0]
    exact.note = exact.note or value.note
    return exact


def _load(buffer: Buffer, idx: tuple[Index, ...]) -> Expr:
    """An element of memory; 0 where it is looked up in a dimension that has none."""
    flat = buffer.flat(idx)
    load = Expr("load", (buffer.name, flat), ex.compute_dtype(buffer.dtype))
    for a in ix.atoms(flat):
        if not isinstance(a, ix.Opaque):
            continue
        for size in ix.may_be_empty(ix.of(a)):
            # of the position, so that it is checked where nothing is read
            found = Expr("lt", (ex.cast(a.payload, torch.int64), ex.index_value(size)), torch.bool)
            load = Expr("masked", (found, load, ex.const(0, load.dtype)), load.dtype)
    return load


def _reduction(
    d: Reduction,
    m: Member,
    value: Expr,
    outside: set[str],
    body: list[Statement],
    forwarded: dict[str, Expr],
    rounds: bool,
) -> None:
    refs = tuple(b.name for b in d.outputs)
    body.append((Scan if d.scan else Reduce)(refs, d.kind, value, d.note))
    for k, b in enumerate(d.outputs):
        position = d.kind in ("argmax", "argmin") and (not d.scan or k == 1)
        own = ex.compute_dtype(b.dtype) if position or d.kind in ("any", "all") else value.dtype
        ref = ex.cast(Expr("ref", (b.name,), own), b.dtype)
        forwarded[b.name] = ex.round_to(ref, b.dtype) if rounds or b.name in outside else ref
        if b.name in outside:
            body.append(Store(b.name, b.flat(m.index(d.index)), ref, note=d.note))


def _drop_dead(body: list[Statement]) -> list[Statement]:
    """Without the reductions nobody reads."""
    live: set[str] = set()
    out: list[Statement] = []
    for s in reversed(body):
        if isinstance(s, Store) or live & set(s.refs):
            out.append(s)
            live |= {e.args[0] for e in expressions(s) if e.op == "ref"}
    return out[::-1]


# -- axes --------------------------------------------------------------------------------------------------


def _stride(i: Index, v: Var) -> float:
    """How far apart in memory two neighbours along v are, on the average where quotients are read (symbolic
    factors count as 1024; indirect as far)."""
    split = ix.coefficient(i, v)
    if split is None:
        return 1 << 20 if any(isinstance(a, ix.Opaque) for a in ix.atoms(i)) else abs(_rate(i, v))
    return abs(split[0]) if isinstance(split[0], int) else abs(int(ix.evaluate(split[0], lambda a: 1024)))


def _rate(i: Index, v: Var) -> float:
    """By how much an index grows with v, but for the steps back of remainders."""

    def of(a: ix.Atom) -> float:
        if not isinstance(a, (ix.Div, ix.Mod)):
            return float(a == v)
        return _rate(a.num, v) / (_size(a.den) if isinstance(a, ix.Div) else 1)

    terms = () if isinstance(i, int) else i.terms
    return sum(c * of(a) * 1024 ** (len(mono) - 1) for mono, c in terms for a in mono)


def _size(n: Index) -> int:
    return n if isinstance(n, int) else 1024


def _settle_axes(body: list[Statement], axes: list[Axis]) -> tuple[list[Statement], list[Axis]]:
    """Order axes by stride (outermost largest; reduced ones after the outer ones) and merge what is one."""
    accesses = accessed(body)

    def far(a: Axis) -> tuple[int, float]:
        strides = [_stride(i, a.var) for i in accesses]
        near = sum(1 for s in strides if s == 1)
        return (-near, max(strides, default=0)) if near else (0, max(strides, default=0))

    scanning = any(isinstance(s, Scan) for s in body)
    positions = any(isinstance(s, Reduce) and s.kind in ("argmax", "argmin") for s in body)
    outer = sorted((a for a in axes if not a.reduced and not a.serial), key=far, reverse=True)
    inner = [a for a in axes if a.reduced or a.serial]
    logical = positions or scanning or any(a.serial for a in inner)
    if not logical:
        inner.sort(key=far, reverse=True)
    return _merge(body, outer + inner, accesses, logical)


def _merge(
    body: list[Statement], axes: list[Axis], accesses: list[Index], logical: bool
) -> tuple[list[Statement], list[Axis]]:
    """a < m, b < n with every position linear in n*a + b  ->  one axis of m*n, in the place of b, if the axes
    between them step over all of it. logical: inner axes keep their order, so only neighbours are one."""
    values = [e.args[0] for s in body for e in expressions(s) if e.op == "index"]
    walks = {a.var: [ix.coefficient(i, a.var) for i in accesses] for a in axes}

    def steps_over(x: Axis, a: Axis, b: Axis) -> bool:
        extent = a.size * b.size
        return all(
            p is not None and q is not None and (0 in (p[0], q[0]) or ix.nonnegative(p[0] - q[0] * extent))
            for p, q in zip(walks[x.var], walks[b.var], strict=True)
        )

    def joint(a: Axis, b: Axis) -> bool:
        first, last = sorted((axes.index(a), axes.index(b)))
        between = axes[first + 1 : last]
        return (
            (a.reduced, a.serial) == (b.reduced, b.serial)
            and not (logical and (a.reduced or a.serial) and axes.index(b) != axes.index(a) + 1)
            and all(
                p is not None and q is not None and p[0] == q[0] * b.size
                for p, q in zip(walks[a.var], walks[b.var], strict=True)
            )
            and all(steps_over(x, a, b) for x in between)
            and not any(ix.depends(i, a.var) or ix.depends(i, b.var) for i in values)
        )

    while pair := next((p for p in itertools.permutations(axes, 2) if joint(*p)), None):
        a, b = pair
        merged = Axis(Var(b.var.name, a.size * b.size), a.reduced, a.serial)
        swap: dict[ix.Atom, Index] = {a.var: 0, b.var: ix.of(merged.var)}
        body = _substitute(body, swap)
        axes = [merged if x is b else x for x in axes if x is not a]
        accesses = [ix.substitute(i, swap) for i in accesses]
        walks = {a.var: [ix.coefficient(i, a.var) for i in accesses] for a in axes}
    return _rename(body, axes)


def _rename(body: list[Statement], axes: list[Axis]) -> tuple[list[Statement], list[Axis]]:
    """Axes called i0, i1, ... from the outside in."""
    new = [Axis(Var(f"i{k}", a.size), a.reduced, a.serial) for k, a in enumerate(axes)]
    swap: dict[ix.Atom, Index] = {a.var: ix.of(n.var) for a, n in zip(axes, new, strict=True)}
    return _substitute(body, swap), new


def _substitute(body: list[Statement], swap: dict[ix.Atom, Index]) -> list[Statement]:
    def on_index(i: Index) -> Index:
        return ix.substitute(i, swap)

    return rewrite_body(body, lambda x: None, on_index)


# -- the rest ----------------------------------------------------------------------------------------------


def _number_checks(body: list[Statement]) -> tuple[list[Statement], list[int]]:
    """Checks numbered from 0 within the kernel, so that equal kernels stay equal."""
    numbers = list(dict.fromkeys(e.args[-1] for s in body for e in expressions(s) if e.op in ex.CHECKS))
    if not numbers:
        return body, []

    def leaf(x: Expr) -> Expr | None:
        if x.op in ex.CHECKS:
            return Expr(x.op, (*x.args[:-1], numbers.index(x.args[-1])), x.dtype, x.note)
        return None

    return rewrite_body(body, leaf, lambda i: i), numbers


def _sizes(body: list[Statement], axes: list[Axis]) -> tuple[Var, ...]:
    found: dict[str, Var] = {}
    indices = (
        [a.size for a in axes]
        + accessed(body)
        + [e.args[0] for s in body for e in expressions(s) if e.op == "index"]
    )
    for i in indices:
        for a in ix.atoms(i):
            if isinstance(a, Var) and a.size is None:
                found[a.name] = a
    return tuple(found[n] for n in sorted(found))


def _params(body: list[Statement], lowered: Lowered) -> tuple[tuple[Param, ...], tuple[Buffer, ...]]:
    reads = dict.fromkeys(e.args[0] for s in body for e in expressions(s) if e.op == "load")
    writes = dict.fromkeys(s.buffer for s in body if isinstance(s, Store))
    updated = {s.buffer for s in body if isinstance(s, Store) and s.mode != "set"}
    names = list(dict.fromkeys([*reads, *writes]))
    buffers = tuple(lowered.buffers[n] for n in names)
    params = tuple(Param(n, lowered.buffers[n].dtype, n in writes, n in reads or n in updated) for n in names)
    return params, buffers


def _overwritable(body: list[Statement], axes: list[Axis]) -> dict[str, frozenset[str]]:
    """For each stored buffer, the loaded buffers that are only read at the very position it is stored to.

    With reductions only a store that follows all of them counts: an earlier one would change what later
    phases read. One with a value per outer point still comes before the last pass over the whole space; so
    nobody but itself and the reductions may read what it overwrites.
    """
    reduced = {r for s in body if not isinstance(s, Store) for r in s.refs}
    scanned = {r for s in body if isinstance(s, Scan) for r in s.refs}
    inside = [a.var for a in axes if a.reduced or a.serial]

    def per_outer_point(s: Store) -> bool:
        exprs = expressions(s)
        indices = [s.index, *(i for e in exprs for i in e.args if isinstance(i, ix.Poly))]
        refs = {e.args[0] for e in exprs if e.op == "ref"}
        return (
            bool(inside) and not refs & scanned and not any(ix.depends(i, v) for i in indices for v in inside)
        )

    at: dict[str, set[Index]] = {}
    storing: dict[str, set[int]] = {}
    for k, s in enumerate(body):
        for e in expressions(s):
            if e.op == "load":
                at.setdefault(e.args[0], set()).add(e.args[1])
                storing.setdefault(e.args[0], set()).update({k} if isinstance(s, Store) else ())
    out: dict[str, frozenset[str]] = {}
    for k, s in enumerate(body):
        if (
            isinstance(s, Store)
            and s.mode == "set"
            and reduced <= {e.args[0] for e in expressions(s) if e.op == "ref"}
        ):
            alone = per_outer_point(s)
            out[s.buffer] = frozenset(
                n for n, where in at.items() if where == {s.index} and not (alone and storing[n] - {k})
            )
    return out


def _name(group: Group) -> str:
    """A name that says what was fused, for profiles and generated code."""
    words: list[str] = []
    for m in group.members:
        word = m.definition.note.split(" ")[0].split(".")[0].lstrip("_")
        if word and (not words or words[-1] != word):
            words.append(word)
    text = "_".join(words[:6]) or "kernel"
    return "".join(c if c.isalnum() else "_" for c in text)[:60]


__all__ = ["Item", "Launch", "View", "build_kernels"]
