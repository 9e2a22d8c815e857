"""The compiled form of a graph: an explicit list of steps, which runner.py writes as a Python function.

    Segment   a run of kernels and library calls, one call into generated code
    Call      an aten call made from Python, counted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.schedule.defs import Buffer, Call, Lowered, views
from dicp.schedule.kernels import Item, Launch
from dicp.schedule.memory import MemoryPlan


@dataclass(eq=False)
class Segment:
    """Consecutive native items. `allocs`, `frees`: by position in `items`, the roots to allocate before it
    (of the plan's spilled ones), and those to free after it. `kept`: library results that later steps or the
    caller need. `late`: those of them whose sizes are known only from the tensor; the call that makes them is
    the segment's last item."""

    number: int
    items: list[Item] = field(default_factory=list)
    allocs: dict[int, list[str]] = field(default_factory=dict)
    frees: dict[int, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


ResultMemory = Literal["new", "kept", "saved"]
"""Where results lie: in new memory; the large ones in the pool (runtime/pool.py), as temporaries with their
own memory do; or there, and what is saved for a backward too."""


@dataclass(frozen=True)
class BuildStats:
    """What one build came to: distinct units found in the cache and compiled (where the vendor knows which;
    else all count as compiled), and wall seconds."""

    hits: int = 0
    compiled: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Program:
    """Everything a vendor needs to emit and run a graph."""

    name: str
    lowered: Lowered
    items: list[Item]
    plan: MemoryPlan
    steps: list[Segment | Call] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # generated, by file name
    begun: Any = None  # what the vendor began to build before there was a program (vendor.base.Vendor.begin)
    build_stats: BuildStats = field(default_factory=BuildStats)
    save: Callable[[], Any] | None = None  # makes the Artifact; None: the vendor's results cannot be saved
    owned: Set[str] = frozenset()  # inputs that nobody else holds
    saved: Set[str] = frozenset()  # inputs that autograd kept for a backward, where hooks see them
    results: ResultMemory = "new"
    where: dict[int, int] = field(default_factory=dict)  # item -> step
    verify: bool = False  # whether calls of libraries are watched

    @property
    def launches(self) -> list[Launch]:
        return [i for i in self.items if isinstance(i, Launch)]

    def kernel_names(self) -> dict[str, str]:
        """A function name for each distinct kernel, by digest: it ends in half of the digest, or in all of it
        where another kernel has the short name."""
        names: dict[str, str] = {}
        for kernel in (x.kernel for x in self.launches):
            if kernel.digest not in names:
                short = f"{kernel.name}_{kernel.digest[:8]}"
                names[kernel.digest] = f"{kernel.name}_{kernel.digest}" if short in names.values() else short
        return names

    @property
    def library_calls(self) -> list[Call]:
        return [i for i in self.items if isinstance(i, Call) and i.claim is not None]

    @property
    def externs(self) -> list[Call]:
        return [c for c in self.python_calls if not c.host]

    @property
    def python_calls(self) -> list[Call]:
        """What the Python function does itself between segments: externs, and reads and checks of numbers."""
        return [i for i in self.items if isinstance(i, Call) and i.claim is None]

    @cached_property
    def sizes(self) -> list[Var]:
        """Size symbols that native code may name, in a fixed order."""
        found: dict[str, Var] = {}

        def note(i: Index) -> None:
            for a in ix.atoms(i):
                if isinstance(a, Var) and a.size is None:
                    found[a.name] = a

        for b in self.lowered.buffers.values():
            for n in (*b.shape, *b.strides):
                note(n)
        for launch in self.launches:
            found.update({size.name: size for size in launch.kernel.sizes})
        for call in self.library_calls:
            for v in views((call.args, call.kwargs)):
                for n in (*v.shape, *v.strides, v.offset):
                    note(n)
            for n in _indices((call.args, call.kwargs)):
                note(n)
        for n in self.plan.places():
            note(n)
        return [found[n] for n in sorted(found)]


RELEASE_BYTES = 2 << 20  # memory held though dead, or not needed yet, for whose sake a segment ends


def make_program(
    name: str,
    lowered: Lowered,
    items: list[Item],
    plan: MemoryPlan,
    owned: Set[str] = frozenset(),
    results: ResultMemory = "new",
    saved: Set[str] = frozenset(),
) -> Program:
    """Cut the items into native segments and extern calls, and decide what outlives a segment.

    owned: inputs that nobody else holds (saved activations of a backward). A segment ends where enough of
    them are dead, and they are freed there: activations shrink while gradients grow, as in eager.
    """
    program = Program(name, lowered, items, plan, owned=owned, results=results, saved=saved)
    _cut(program)
    _allocate_and_free(program)
    return program


def _cut(program: Program) -> None:
    """Items into steps."""
    lowered = program.lowered
    dying, coming = _dying(lowered, program.plan, program.owned), _coming(lowered, program.plan)
    known = {s for b in lowered.inputs if b is not None for s in _unbacked(lowered, b)}
    dead = early = 0  # bytes that the segment holds after their last use, and before their first
    for k, item in enumerate(program.items):
        last = program.steps[-1] if program.steps else None
        if isinstance(item, Call) and item.claim is None:
            program.steps.append(item)
        elif isinstance(last, Segment) and not last.late and max(dead, early + coming[k]) < RELEASE_BYTES:
            last.items.append(item)
            early += coming[k]
        else:
            program.steps.append(Segment(sum(isinstance(s, Segment) for s in program.steps), [item]))
            dead = early = 0
        if isinstance(item, Call):
            late = _sized_late(lowered, item, known)
            if item.claim is not None:
                program.steps[-1].late += late  # type: ignore[union-attr]
        dead += dying[k]
        program.where[k] = len(program.steps) - 1


def _allocate_and_free(program: Program) -> None:
    """What has memory of its own, and where in the segments that begins and ends."""
    plan, where = program.plan, program.where
    returned = {plan.find(v.buffer.name) for v in views(program.lowered.outputs)}
    position = {id(item): k for k, item in enumerate(program.items)}
    spilled: dict[int, list[str]] = {}
    for name, k in plan.spilled.items():
        spilled.setdefault(k, []).append(name)
    for step in program.steps:
        if not isinstance(step, Segment):
            continue
        for at, item in enumerate(step.items):
            k = position[id(item)]
            if k in spilled:
                step.allocs[at] = spilled[k]
            libraries = _library_results(item, plan)
            for name in (*spilled.get(k, ()), *libraries):
                final = plan.last_use.get(name, k)
                outlives = name in returned or where.get(final, -1) != where[k]
                if name not in step.late and not outlives:
                    step.frees.setdefault(at + final - k, []).append(name)
                elif name in libraries:
                    step.kept.append(name)


def _library_results(item: Item, plan: MemoryPlan) -> list[str]:
    """What the library allocates for a call: not what it writes over an operand."""
    outputs = [b for b in item.outputs if b is not None] if isinstance(item, Call) else []
    return [b.name for b in outputs if b.kind == "library" and plan.find(b.name) == b.name]


def _sized_late(lowered: Lowered, call: Call, known: set[Any]) -> list[str]:
    """The results of a call whose sizes no earlier step knows; adds those sizes to `known`."""
    late = []
    for r in call.results:
        new = set() if r is None else _unbacked(lowered, r) - known
        if new and isinstance(r, Buffer):
            late.append(r.name)
    known.update(s for r in call.results if r is not None for s in _unbacked(lowered, r))
    return late


def _unbacked(lowered: Lowered, x: Any) -> set[Any]:
    """The sizes read from data that a buffer's geometry, or a number, is made of."""
    numbers = [*x.shape, *x.strides] if isinstance(x, Buffer) else [x] if isinstance(x, ix.Poly) else []
    return {s for n in numbers for s in lowered.symbols.unbacked(n)}


def _dying(lowered: Lowered, plan: MemoryPlan, owned: Set[str]) -> Counter[int]:
    """Bytes that each item is the last to use: of owned inputs, and of temporaries with their own memory."""
    inputs = {b.name for b in lowered.inputs if isinstance(b, Buffer)} & owned & plan.last_use.keys()
    out: Counter[int] = Counter()
    for name in (*inputs, *plan.spilled):
        out[plan.last_use[name]] += lowered.symbols.hint(lowered.buffers[name].nbytes)
    return out


def _coming(lowered: Lowered, plan: MemoryPlan) -> Counter[int]:
    """Bytes of the temporaries with their own memory that each item is the first to use."""
    out: Counter[int] = Counter()
    for name, k in plan.spilled.items():
        out[k] += lowered.symbols.hint(lowered.buffers[name].nbytes)
    return out


def _indices(x: Any) -> list[Index]:
    if isinstance(x, ix.Poly):
        return [x]
    if isinstance(x, (list, tuple)):
        return [i for item in x for i in _indices(item)]
    if isinstance(x, dict):
        return [i for item in x.values() for i in _indices(item)]
    return []


__all__ = ["Program", "Segment", "make_program"]
