"""Fusion: which definitions share one kernel.

A group has one iteration space: axes, some of them reduced. Each member's loop variables map one to one onto
    the full space    (elementwise before, between and after the reductions; the reductions themselves), or
    the outer axes    (elementwise on reduction results).
A definition joins the group that saves most memory traffic: the values it would have read back, and the reads
it shares; a small one joins one of the same iteration space where that spares a launch
(horizontal_fusion.py). It may join when every value of the group that it reads is the one computed at the
same point, and when no step outside the group lies between the two. A scatter to places that differ joins
like an elementwise definition, where launches cost; nothing else in its group touches the memory that it
updates. A copy into another order stays out of reductions that it needs nothing of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.value import Indices
from dicp.schedule.defs import (
    Call,
    Def,
    Lowered,
    Pointwise,
    Reduction,
    Scatter,
    views,
)
from dicp.schedule.dependencies import Dependencies
from dicp.schedule.horizontal_fusion import RECENT, Space, same_axes, space_of, writes_once
from dicp.schedule.order import in_order
from dicp.schedule.unify import Mapping, loop_atoms, unify, variable

MAX_BUFFERS = 40  # arguments of one kernel
MAX_MEMBERS = 64


@dataclass(eq=False)
class Member:
    """A definition in a group: its variables in terms of the group's axes."""

    definition: Def
    mapping: Mapping
    reads: list[tuple[str, Indices]]

    def index(self, idx: Indices) -> Indices:
        return tuple(ix.substitute(i, self.mapping) for i in idx)


@dataclass(eq=False)
class Group:
    """Definitions that become one kernel."""

    axes: list[Var] = field(default_factory=list)
    reduced: set[Var] = field(default_factory=set)
    members: list[Member] = field(default_factory=list)
    produced: dict[str, Indices] = field(
        default_factory=dict
    )  # buffer -> index at which this group writes it
    closed: bool = False

    @property
    def outer(self) -> list[Var]:
        return [v for v in self.axes if v not in self.reduced]


Step = Group | Call


def fuse(lowered: Lowered) -> list[Step]:
    """Group the definitions of a lowered graph. Returns the steps in an order that respects every
    dependency."""
    return _Fusion(lowered).run()


class _Fusion:
    def __init__(self, lowered: Lowered) -> None:
        self.buffers = lowered.buffers
        self.defs = lowered.defs
        self.machine = lowered.machine
        self.steps: list[Step] = []
        self.depends = Dependencies(lowered)
        self.by_buffer: dict[str, set[int]] = {}  # buffer -> groups that read it
        self.spaces: dict[Any, list[int]] = {}  # iteration space, and order in it -> groups that began so
        self.symbols = lowered.symbols
        self.fresh = 0

    def run(self) -> list[Step]:
        for d, reads in _needed(self.defs):
            deps = self.depends.of(d, reads)
            place = self._best(d, reads, deps) if self._may_share(d) else None
            if place is None:
                place = self._new_step(d, reads)
            self.depends.record(place, d, reads, deps)
            for name in {n for n, _ in reads}:
                self.by_buffer.setdefault(name, set()).add(place)
        order = in_order(self.depends.before, self.depends.uses, *self._memory_taken())
        return [self.steps[s] for s in order]

    def _may_share(self, d: Def) -> bool:
        """Whether its kernel may compute something besides. A scatter's addresses keep a CPU from vectors."""
        if isinstance(d, Scatter):
            return writes_once(d) and self.machine.launch_bytes > 0
        return not isinstance(d, Call)

    def _memory_taken(self) -> tuple[dict[str, int], set[str]]:
        """(bytes of memory that the program takes, at the sizes of the example; what the caller gets)."""
        taken, kept = {}, set()
        for name, b in self.buffers.items():
            if b.kind in ("temp", "library", "extern", "output") and not self.symbols.late(b.nbytes):
                taken[name] = self.symbols.hint(b.nbytes)
            if b.kind == "output":
                kept.add(name)
        return taken, kept

    def _new_step(self, d: Def, reads: list[tuple[str, Indices]]) -> int:
        if isinstance(d, Call):
            self.steps.append(d)
        else:
            own = [*d.vars, *(d.rvars if isinstance(d, Reduction) else ())]  # type: ignore[attr-defined]
            mapping: Mapping = {v: ix.of(self._axis(v.size)) for v in own}
            group = Group(closed=not self._may_share(d))
            group.axes = [variable(mapping[v]) for v in own]
            self.spaces.setdefault(self._kind(d, reads), []).append(len(self.steps))
            self.steps.append(group)
            self._add(group, d, mapping, reads)
        return self.depends.new_step()

    def _axis(self, size: Index | None) -> Var:
        self.fresh += 1
        return Var(f"a{self.fresh}", size)

    # -- choosing a group ----------------------------------------------------------------------------------

    def _best(self, d: Def, reads: list[tuple[str, Indices]], deps: set[int]) -> int | None:
        candidates = set(deps)
        for name, _ in reads:
            candidates |= self.by_buffer.get(name, set())
        best: tuple[int, int, Mapping] | None = None
        for s in sorted(candidates, reverse=True):
            group = self.steps[s]
            if not isinstance(group, Group) or group.closed or len(group.members) >= MAX_MEMBERS:
                continue
            if self.depends.too_late(s, deps):
                continue
            mapping = self._join(group, d, reads)
            if mapping is None:
                continue
            saved = self._saved(group, d, reads)
            if best is None or saved > best[0]:
                best = (saved, s, mapping)
        if best is None or best[0] <= 0:
            return self._beside(d, reads, deps)
        _, step, mapping = best
        group = self.steps[step]
        assert isinstance(group, Group)
        self._add(group, d, mapping, reads)
        return step

    def _beside(self, d: Def, reads: list[tuple[str, Indices]], deps: set[int]) -> int | None:
        """A group of the same iteration space that d may be computed beside."""
        kind = self._kind(d, reads)
        room = self.machine.launch_bytes - (self._moved([Member(d, {}, reads)]) if kind else 0)
        if kind is None or room <= 0:
            return None
        for s in reversed(self.spaces.get(kind, [])[-RECENT:]):
            group = self.steps[s]
            assert isinstance(group, Group)
            late = self.depends.too_late(s, deps)
            if late or group.closed or len(group.members) >= MAX_MEMBERS or self._moved(group.members) > room:
                continue
            mapping = same_axes(group, d)
            if mapping is None or not self._has_room(group, reads):
                continue
            if self._compatible(group, d, mapping, reads):
                self._add(group, d, mapping, reads)
                return s
        return None

    def _kind(self, d: Def, reads: list[tuple[str, Indices]]) -> tuple[Space, bool] | None:
        """Its iteration space, and whether it reduces what lies side by side; None where nothing is joined
        for that."""
        space = space_of(d) if self.machine.launch_bytes else None
        if space is None:
            return None
        inner = d.rvars[-1:] if isinstance(d, Reduction) else []
        along = any(
            ix.moves_by_one(self.buffers[n].flat(i), v) for n, i in self._indexed(reads) for v in inner
        )
        return space, along

    def _moved(self, members: list[Member]) -> int:
        """Bytes that definitions read and write, at the sizes of the example; of what a scatter updates,
        those that it writes."""
        updates = [m.definition for m in members if isinstance(m.definition, Scatter)]
        names = {n for m in members for n, _ in m.reads}
        names |= {b.name for m in members for b in m.definition.outputs if b is not None}
        names -= {name for d in updates for name in (d.base.name, d.outputs[0].name)}
        written = [ix.product(v.size for v in d.vars) * d.base.dtype.itemsize for d in updates]  # type: ignore[misc]
        return sum(self.symbols.hint(n) for n in (*written, *(self.buffers[n].nbytes for n in names)))

    def _saved(self, group: Group, d: Def, reads: list[tuple[str, Indices]]) -> int:
        """Bytes not moved, at the sizes of the example."""
        seen = {n for m in group.members for n, _ in m.reads}
        total = 0
        for name in {n for n, _ in reads}:
            if name in group.produced or name in seen:
                total += self.symbols.hint(self.buffers[name].nbytes) * (2 if name in group.produced else 1)
        return total

    def _add(self, group: Group, d: Def, mapping: Mapping, reads: list[tuple[str, Indices]]) -> None:
        member = Member(d, mapping, reads)
        group.members.append(member)
        if isinstance(d, Reduction):
            group.reduced |= {v for r in d.rvars for v in loop_atoms(mapping[r])}
        if isinstance(d, (Pointwise, Reduction)):
            for b in d.outputs:
                if b is not None:
                    group.produced[b.name] = member.index(d.index)

    # -- may it join? --------------------------------------------------------------------------------------

    def _join(self, group: Group, d: Def, reads: list[tuple[str, Indices]]) -> Mapping | None:
        """The mapping under which d joins, or None."""
        if not self._has_room(group, reads):
            return None
        for pairs in self._anchors(group, reads):
            mapping, refine = unify(pairs)
            if mapping is None:
                continue
            if refine:
                if any(isinstance(m.definition, Reduction) and m.definition.scan for m in group.members):
                    continue
                extra = {g: self._refined(parts) for g, parts in refine.items()}
                trial = _refine_group(
                    group, {g: e[0] for g, e in extra.items()}, {g: e[1] for g, e in extra.items()}
                )
                mapping.update(
                    {
                        v: ix.of(a)
                        for g, parts in refine.items()
                        for v, a in zip(parts, extra[g][1], strict=True)
                    }
                )
            else:
                trial = group
            full = self._complete(trial, d, mapping)
            if full is None or not self._compatible(trial, d, full, reads):
                continue
            if refine:
                group.axes, group.reduced = trial.axes, trial.reduced
                group.members, group.produced = trial.members, trial.produced
            return full
        return None

    def _indexed(self, reads: list[tuple[str, Indices]]) -> list[tuple[str, Indices]]:
        """Without a scatter's base, which it reads at no index."""
        return [(n, i) for n, i in reads if n in self.buffers and len(i) == len(self.buffers[n].shape)]

    def _has_room(self, group: Group, reads: list[tuple[str, Indices]]) -> bool:
        names = {p for m in group.members for p, _ in m.reads} | {n for n, _ in reads}
        return len(names) + len(group.produced) <= MAX_BUFFERS

    def _refined(self, parts: list[Var]) -> tuple[Index, list[Var]]:
        fresh = [self._axis(v.size) for v in parts]
        return ix.linearize([ix.of(a) for a in fresh], [a.size for a in fresh]), fresh  # type: ignore[misc]

    def _anchors(self, group: Group, reads: list[tuple[str, Indices]]) -> list[list[tuple[Index, Index]]]:
        """Index pairs that must coincide: reads of the group's own values first, then shared reads."""
        made, reads = group.produced, self._indexed(reads)
        own = [list(zip(idx, made[n], strict=True)) for n, idx in reads if n in made]
        if own:
            return own
        shared = []
        for name, idx in reads:
            for m in group.members:
                for other, at in m.reads:
                    if other == name and len(at) == len(idx):
                        shared.append(list(zip(idx, m.index(at), strict=True)))
        shared.sort(key=lambda pairs: -sum(not isinstance(p[0], int) for p in pairs))
        return shared[:4]

    def _complete(self, group: Group, d: Def, mapping: Mapping) -> Mapping | None:
        """Give d's unmatched variables the unused axes of equal size; None where there are too few."""
        rvars = d.rvars if isinstance(d, Reduction) else ()
        own = [*d.vars, *rvars]  # type: ignore[attr-defined]
        used = {a for v in own if v in mapping for a in loop_atoms(mapping[v])}
        free = [a for a in group.axes if a not in used]
        full = dict(mapping)
        for v in own:
            if v in full:
                continue
            pick = next((a for a in free if a.size == v.size), None)
            if pick is not None:
                free.remove(pick)
                full[v] = ix.of(pick)
            else:
                return None
        taken: list[ix.Atom] = [a for v in own for a in loop_atoms(full[v])]
        return full if len(taken) == len(set(taken)) else None

    def _compatible(self, group: Group, d: Def, mapping: Mapping, reads: list[tuple[str, Indices]]) -> bool:
        over = {a for v in d.vars for a in loop_atoms(mapping[v])}  # type: ignore[attr-defined]
        space, reduced = set(group.axes), group.reduced
        rows = isinstance(d, Reduction)
        if isinstance(d, Reduction):
            under = {a for v in d.rvars for a in loop_atoms(mapping[v])}
            if over | under != space or (reduced and reduced != under):
                return False
            if not reduced and not self._may_reduce(group, under):
                return False
            new_reduced = under
            if d.scan and len(d.rvars) == 1 and len(under) != 1:
                return False
        else:
            new_reduced = reduced
            if over == space:
                rows = bool(reduced)
            elif not reduced or over != space - reduced:
                return False
        member = Member(d, mapping, reads)
        for name, idx in reads:
            if name in group.produced and member.index(idx) != group.produced[name]:
                return False
            if (
                name in group.produced
                and over != space
                and not isinstance(d, Reduction)
                and any(a in reduced for i in group.produced[name] for a in loop_atoms(i))
            ):
                return False
        if not self._writes_are_safe(group, d, member):
            return False
        if new_reduced and any(self._turns(group, m, new_reduced) for m in (*group.members, member)):
            return False
        if not rows:
            return True
        later = any(n in group.produced and not self._full_level(group, n, new_reduced) for n, _ in reads)
        scanned = any(isinstance(m.definition, Reduction) and m.definition.scan for m in group.members)
        if later and scanned:  # a scan's values are at hand only in the loop that scans
            return False
        scans = scanned or isinstance(d, Reduction) and d.scan
        if scans and not self._scans_at_hand(group, member, new_reduced):
            return False
        return (not later and not scans) or self._row_fits(group, new_reduced, mapping, d)

    def _turns(self, group: Group, member: Member, reduced: set[Var]) -> bool:
        """Whether a definition copies what it reads along the reduced axes into another order, and needs
        nothing from its group. Between two reductions it would write one element to each line of memory: 4
        images of 32 channels and 112x112, with their sums, take 6.4 ms so, 0.46 apart (two Intel cores of the
        5th generation, one-off script)."""
        d = member.definition
        if not isinstance(d, Pointwise) or any(name in group.produced for name, _ in member.reads):
            return False

        def along(places: list[tuple[str, Indices]], axes: set[Var]) -> bool:
            flat = [self.buffers[name].flat(member.index(idx)) for name, idx in places]
            return any(ix.moves_by_one(f, v) for f in flat for v in axes)

        kept, reads = set(group.axes) - reduced, self._indexed(member.reads)
        written = [(b.name, d.index) for b in d.outputs if b is not None]
        return along(written, kept) and along(reads, reduced) and not along(reads, kept)

    def _scans_at_hand(self, group: Group, candidate: Member, reduced: set[Var]) -> bool:
        """Whether whoever reads a scan's running values, itself or through others, runs in the loop that
        scans: a loop comes after those of the reductions that its values are made of."""
        loops: dict[str, tuple[int, set[int]]] = {}  # by result: its loop, and those of the scans it reads
        for m in (*group.members, candidate):
            loop, scans = 0, set[int]()
            for name, _ in m.reads:
                if name not in loops:
                    continue
                if self._full_level(group, name, reduced):
                    loop = max(loop, loops[name][0])
                    scans |= loops[name][1]
                else:
                    loop = max(loop, loops[name][0] + 1)
            if scans - {loop}:
                return False
            own = {loop} if isinstance(m.definition, Reduction) and m.definition.scan else set()
            loops.update({b.name: (loop, scans | own) for b in m.definition.outputs if b is not None})
        return True

    def _may_reduce(self, group: Group, under: set[Var]) -> bool:
        """Existing elementwise members must tolerate that some axes become reduced: they stay
        at full level."""
        return all(
            set(group.axes) == {a for v in m.mapping.values() for a in loop_atoms(v)} for m in group.members
        )

    def _full_level(self, group: Group, name: str, reduced: set[Var]) -> bool:
        return any(a in reduced for i in group.produced[name] for a in loop_atoms(i)) or not reduced

    def _writes_are_safe(self, group: Group, d: Def, member: Member) -> bool:
        """A definition that overwrites memory the group reads must do so at the very point it is read; nobody
        can tell where a scatter does."""
        memory_of = self.depends.memory
        scattered = [s for s in (*group.members, member) if isinstance(s.definition, Scatter)]
        for s in scattered:
            memory = memory_of[s.definition.base.name]  # type: ignore[attr-defined]
            others = [m for m in (*group.members, member) if m is not s]
            touched = {n for m in others for n, _ in m.reads} | {
                b.name for m in others for b in m.definition.outputs if b is not None
            }
            if memory in {memory_of[n] for n in touched}:
                return False
        if isinstance(d, Scatter):
            return True
        for b in d.outputs:
            if b is None or b.kind not in ("input", "alias"):
                continue
            memory = self.depends.memory[b.name]
            mine = member.index(d.index)  # type: ignore[attr-defined]
            for m in (*group.members, member):
                for name, at in m.reads:
                    if self.depends.memory[name] == memory and m.index(at) != mine:
                        return False
        return True

    def _row_fits(self, group: Group, reduced: set[Var], mapping: Mapping, d: Def) -> bool:
        """Whether a row can be read again from cache by a later phase, and whether rows are enough for all
        cores."""
        size = ix.product(v.size for v in reduced if v.size is not None)
        rows = ix.product(v.size for v in group.axes if v not in reduced and v.size is not None)
        if not isinstance(size, int):
            return True
        contiguous = False
        for m in (*group.members, Member(d, mapping, _reads(d))):
            for name, at in self._indexed(m.reads):
                flat = self.buffers[name].flat(m.index(at))
                contiguous |= any(ix.moves_by_one(flat, v) for v in reduced)
        if isinstance(rows, int) and rows < self.machine.threads and size > self.machine.row // 4:
            return False
        return size <= (max(self.machine.row, self.machine.shared_row) if contiguous else self.machine.column)


def _needed(defs: list[Def]) -> list[tuple[Def, list[tuple[str, Indices]]]]:
    """The definitions, and what each reads, without those whose results nobody reads: the positions of a
    pooling's maxima, say."""
    found: list[tuple[Def, list[tuple[str, Indices]]]] = []
    read: set[str] = set()
    for d in reversed(defs):
        local = all(b is None or (b.kind == "temp" and b.name not in read) for b in d.outputs)
        if local and isinstance(d, (Pointwise, Reduction)):
            continue
        reads = _reads(d)
        read.update(name for name, _ in reads)
        found.append((d, reads))
    return found[::-1]


def _reads(d: Def) -> list[tuple[str, Indices]]:
    """What a definition reads, each access once. A scatter reads its base as well."""
    if isinstance(d, Call):
        return list({v.buffer.name: (v.buffer.name, ()) for v in views((d.args, d.kwargs))}.values())
    roots: list[Expr] = [d.expr]  # type: ignore[attr-defined]
    if isinstance(d, Scatter):
        roots += [
            a.payload
            for i in d.target
            if isinstance(i, ix.Poly)
            for a in ix.atoms(i)
            if isinstance(a, ix.Opaque)
        ]
    found = dict.fromkeys((e.args[0], e.args[1]) for e in ex.walk(*roots) if e.op == "at")
    if isinstance(d, Scatter):
        found[(d.base.name, ())] = None
    return list(found)


def _refine_group(group: Group, into: dict[Var, Index], parts: dict[Var, list[Var]]) -> Group:
    """The same group over finer axes."""
    swap: Mapping = {v: i for v, i in into.items()}  # noqa: C416 (the key type widens)
    out = Group(closed=group.closed)
    for a in group.axes:
        out.axes += parts.get(a, [a])
    out.reduced = {x for a in group.reduced for x in parts.get(a, [a])}
    out.members = [
        Member(m.definition, {v: ix.substitute(i, swap) for v, i in m.mapping.items()}, m.reads)
        for m in group.members
    ]
    out.produced = {n: tuple(ix.substitute(i, swap) for i in idx) for n, idx in group.produced.items()}
    return out
