"""Static memory plan: where every temporary of a program lives in one arena.

Buffers whose lifetimes do not overlap share memory (schedule/placement.py). Symbolic sizes are planned at
those of the example, so that the plan holds for all. In-place reuse comes first: a kernel's result takes
over the buffer of an operand that dies there and is read only at the position written, and so does that of a
call which can write over an operand. Where a kernel's lies in a library's buffer then, and the arena has room
at that time anyway, the result moves there, and the library's buffer is freed sooner. Last, temporaries leave
an arena that would be larger than what is alive when the program's memory peaks (schedule/arena_spill.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ops.aliases import is_foreign
from dicp.schedule.arena_spill import spilled
from dicp.schedule.defs import Buffer, Call, Lowered, View, views
from dicp.schedule.kernels import Item, Launch
from dicp.schedule.lifetime import Lifetime, most_alive
from dicp.schedule.placement import Placed, by_size, lowest_gap, stacked
from dicp.schedule.result_reuse import Lender, borrowed

ALIGN = 64  # bytes: a cache line, and the widest vector


@dataclass(eq=False)
class MemoryPlan:
    """`offset`: bytes into the arena by buffer name. `maxima`: what symbols in offsets and in `size` stand
    for, each the largest of its numbers, in the order of computing. `root`: the buffer whose memory a buffer
    shares. `borrowed`: temporaries in a result's memory, with the result and the bytes into it. `spilled`:
    those with memory of their own, with the item before which it is allocated. `last_use`: the item after
    which a root's memory is free. `unread`: roots that only one item touches, and no caller. `size`: arena
    bytes. At the sizes of the example, `example_size` is that, and `lower_bound` the most that is alive at
    once."""

    root: dict[str, str] = field(default_factory=dict)
    offset: dict[str, Index] = field(default_factory=dict)
    maxima: dict[Var, tuple[Index, ...]] = field(default_factory=dict)
    borrowed: dict[str, tuple[str, Index]] = field(default_factory=dict)
    spilled: dict[str, int] = field(default_factory=dict)
    last_use: dict[str, int] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    size: Index = 0
    example_size: int = 0
    lower_bound: int = 0

    def find(self, name: str) -> str:
        while self.root.get(name, name) != name:
            name = self.root[name]
        return name

    def places(self) -> Iterator[Index]:
        """Every offset, wherever it counts from."""
        yield from self.offset.values()
        yield from (at for _, at in self.borrowed.values())


@dataclass(eq=False)
class _Work:
    """What the steps of planning share. owned: inputs that nobody else holds. start, end: the items of each
    root's first and last use. held: roots that may be held beyond the last."""

    items: list[Item]
    lowered: Lowered
    plan: MemoryPlan
    owned: Set[str]
    start: dict[str, int]
    end: dict[str, int]
    held: Set[str]

    def life(self, name: str, start: int, end: int) -> Lifetime:
        """A buffer in the arena from one item to another."""
        nbytes = _aligned(self.lowered.buffers[name].nbytes)
        return Lifetime(name, self.lowered.symbols.hint(nbytes), start, end)


def plan_memory(items: list[Item], lowered: Lowered, owned: Set[str] = frozenset()) -> MemoryPlan:
    """owned: inputs that nobody else holds, which are freed after their last use."""
    plan = MemoryPlan()
    plan.root.update({b.name: b.base.name for b in lowered.buffers.values() if b.base is not None})
    held = _held(items, plan)
    for b in lowered.buffers.values():
        late = lowered.symbols.late(b.nbytes)  # not known when the arena is taken
        if b.kind == "temp" and (late or b.name in held):
            b.kind = "output"
    start, end = _lifetimes(items, lowered, plan)
    work = _Work(items, lowered, plan, owned, start, end, held)
    _reuse_in_place(work)
    placed = _leave_arena(work, _leave_libraries(work, by_size(_borrow(work))))
    stack = stacked(placed, {p.life.name: _aligned(lowered.buffers[p.life.name].nbytes) for p in placed})
    plan.offset, plan.size, plan.maxima = stack.offset, stack.size, stack.maxima
    plan.example_size, plan.lower_bound = _top(placed), most_alive(p.life for p in placed)
    plan.last_use = {n: end[n] for n in start if plan.find(n) == n}
    plan.unread = frozenset(n for n in start if start[n] == end[n])
    return plan


def touched(item: Item) -> tuple[list[Buffer], list[Buffer]]:
    """(read, written) buffers of an item."""
    if isinstance(item, Launch):
        return (
            [b for b in item.buffers if b.name in item.reads],
            [b for b in item.buffers if b.name in item.writes],
        )
    return [v.buffer for v in views((item.args, item.kwargs))], [b for b in item.outputs if b is not None]


def _held(items: list[Item], plan: MemoryPlan) -> set[str]:
    """Roots that are handed to operators which may keep them: a collective of torch.distributed reads its
    operands until somebody waits for it, and a user's may put them into a list. Nothing else is ever written
    there then."""
    calls = [i for i in items if isinstance(i, Call) and i.claim is None]
    keep = [c for c in calls if is_foreign(c.node)]
    return {plan.find(v.buffer.name) for c in keep for v in views((c.args, c.kwargs))}


def _lifetimes(
    items: list[Item], lowered: Lowered, plan: MemoryPlan
) -> tuple[dict[str, int], dict[str, int]]:
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    for k, item in enumerate(items):
        reads, writes = touched(item)
        for b in (*reads, *writes):
            name = plan.find(b.name)
            start.setdefault(name, k)
            end[name] = k
    for v in views(lowered.outputs):
        end[plan.find(v.buffer.name)] = len(items)
    return start, end


def _reuse_in_place(work: _Work) -> None:
    lowered, plan, start, end = work.lowered, work.plan, work.start, work.end
    for k, item in enumerate(work.items):
        if isinstance(item, Call):
            _write_over(work, k, item)
            continue
        taken: set[str] = set()
        for out in item.buffers:
            if (
                out.name not in item.writes
                or out.kind != "temp"
                or plan.find(out.name) != out.name
                or start[out.name] != k
            ):
                continue
            for name in sorted(item.in_place.get(out.name, ())):
                source = lowered.buffers[name]
                root = plan.find(name)
                owner = lowered.buffers[root]
                if (
                    owner.kind in ("temp", "library")
                    and root not in work.held
                    and end[root] == k
                    and root not in taken
                    and source.nbytes == out.nbytes
                    and owner.nbytes == out.nbytes
                    and source.dtype.itemsize == out.dtype.itemsize
                    # Python hands the library's tensor on as it is
                    and (owner.kind == "temp" or owner.dtype == out.dtype)
                ):
                    plan.root[out.name] = root
                    taken.add(root)
                    end[root] = end[out.name]
                    break


def _write_over(work: _Work, k: int, call: Call) -> None:
    """Have a call write over an operand, where it can. What the caller gets stays a tensor of its own."""
    if call.claim is None or call.claim.over is None:
        return
    plan, out, given = work.plan, call.outputs[0], call.args[call.claim.over]
    if out is None or given is None:
        return
    root = plan.find(given.buffer.name)
    owner = work.lowered.buffers[root]
    read = [plan.find(v.buffer.name) for v in views((call.args, call.kwargs))]
    alike = (given.shape, given.strides, given.offset) == (out.shape, out.strides, 0)
    dies = work.end[root] == k and read.count(root) == 1 and work.end[out.name] < len(work.items)
    dies = dies and root not in work.held
    same = owner.nbytes == out.nbytes and owner.dtype == given.buffer.dtype == out.dtype
    if alike and dies and same and owner.kind in ("temp", "library") and work.start[out.name] == k:
        plan.root[out.name] = root
        work.end[root] = work.end[out.name]


def _borrow(work: _Work) -> list[Lifetime]:
    """Put temporaries into memory of results where that makes the arena smaller. Gives the others."""
    lowered, plan, start, end = work.lowered, work.plan, work.start, work.end
    temporaries = [n for n in start if plan.find(n) == n and lowered.buffers[n].kind == "temp"]
    lives = [work.life(n, start[n], end[n]) for n in temporaries]
    begins = _native_starts(work)
    lenders = []
    for name, first in start.items():
        b = lowered.buffers[name]
        nbytes = b.span * b.dtype.itemsize
        if b.kind == "output" and plan.find(name) == name and not lowered.symbols.late(nbytes):
            lenders.append(Lender(name, nbytes, lowered.symbols.hint(nbytes), begins[first], first - 1))
    found = borrowed(lives, lenders, {n: _aligned(lowered.buffers[n].nbytes) for n in temporaries})
    left = [x for x in lives if x.name not in found]
    if most_alive(left) == most_alive(lives):
        return lives
    plan.borrowed = found
    return left


def _aligned(n: Index) -> Index:
    return ix.floordiv(n + (ALIGN - 1), ALIGN) * ALIGN


def _top(placed: list[Placed]) -> int:
    return max((p.end for p in placed), default=0)


def _leave_libraries(work: _Work, placed: list[Placed]) -> list[Placed]:
    """Move what took over a library's buffer into the arena, where that does not grow it."""
    lowered, plan, start, end = work.lowered, work.plan, work.start, work.end
    size = _top(placed)
    guests: dict[str, list[str]] = {}
    for name in plan.root:
        guests.setdefault(plan.find(name), []).append(name)
    for host, names in guests.items():
        if lowered.buffers[host].kind != "library" or any(lowered.buffers[n].kind != "temp" for n in names):
            continue
        first = min(names, key=lambda n: start[n])
        life = work.life(first, start[first], end[host])
        at = lowest_gap(life, [p for p in placed if p.life.overlaps(life)])
        if at + life.nbytes > size:
            continue
        placed.append(Placed(at, life))
        for name in names:
            plan.root[name] = first
        end[first], end[host] = end[host], start[first]
    return placed


def _leave_arena(work: _Work, placed: list[Placed]) -> list[Placed]:
    """Give temporaries memory of their own where that lowers the program's peak, and place the rest anew."""
    plan = work.plan
    movable, workspaces = _movable(work, placed), _workspaces(work)
    own = [p.life for p in placed if p.life.name in movable - workspaces]
    staying = [p.life for p in placed if p.life.name in workspaces]
    others, apart = _outside(work)
    gone = spilled(own, others, len(work.items), _top(placed), staying, apart)
    if not gone:
        return placed
    plan.spilled = {name: work.start[name] for name in sorted(gone)}
    return by_size(p.life for p in placed if p.life.name not in gone)


def _workspaces(work: _Work) -> set[str]:
    """They stay: a call takes its time from fresh pages, and they are the same ones again in the arena."""
    calls = [i for i in work.items if isinstance(i, Call) and i.claim is not None]
    return {c.outputs[-1].name for c in calls if c.claim.workspace is not None}


def _movable(work: _Work, placed: list[Placed]) -> set[str]:
    """Temporaries that may leave the arena: native code makes them, and Python, which knows a tensor by its
    dtype, would see none of theirs as another's."""
    plan, dtypes = work.plan, dict[str, set[Any]]()
    for name, b in work.lowered.buffers.items():
        dtypes.setdefault(plan.find(name), set()).add(b.dtype)
    names = [p.life.name for p in placed]
    return {n for n in names if len(dtypes[n]) == 1 and not _from_python(work.items[work.start[n]])}


def _from_python(item: Item) -> bool:
    return isinstance(item, Call) and item.claim is None


def _native_starts(work: _Work) -> list[int]:
    """For each item, the one at which the results are allocated that it writes first: where its native code
    begins. That of a program that owns inputs begins anew wherever enough of them are dead."""
    first, begins = [], 0
    for k, item in enumerate(work.items):
        begins = k if work.owned or _from_python(item) else begins
        first.append(begins)
    return first


def _outside(work: _Work) -> tuple[list[Lifetime], list[Lifetime]]:
    """What the program holds beside its temporaries: what is allocated as those are, and what by others.
    Inputs that it owns are there from the first."""
    out: list[Lifetime] = []
    apart: list[Lifetime] = []
    libraries = out if work.lowered.machine.one_allocator else apart
    items, plan, end = work.items, work.plan, work.end
    first = _native_starts(work)
    for name, begin in work.start.items():
        b = work.lowered.buffers[name]
        if plan.find(name) != name or work.lowered.symbols.late(b.nbytes):
            continue
        nbytes = work.lowered.symbols.hint(b.nbytes)
        if b.kind == "output":
            out.append(Lifetime(name, nbytes, first[begin], len(items)))
        elif b.kind in ("library", "extern"):
            libraries.append(Lifetime(name, nbytes, begin, end[name]))
        elif name in work.owned:
            out.append(Lifetime(name, nbytes, 0, end[name]))
    return out, apart


__all__ = ["Call", "MemoryPlan", "View", "plan_memory", "touched"]
