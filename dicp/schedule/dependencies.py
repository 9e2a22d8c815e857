"""What must come before what: the steps of a program by the memory that they read and write."""

from __future__ import annotations

from typing import Any

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.value import Indices
from dicp.passes.facts import is_pure
from dicp.schedule.defs import Buffer, Call, Def, Host, Lowered, Reduction, Scatter, View, operands
from dicp.schedule.order import Use


class Dependencies:
    """before: for each step, a bitmask of those that must come before it. uses: the memory of each. memory:
    the names of buffers to that of the memory they share."""

    def __init__(self, lowered: Lowered) -> None:
        self.before: list[int] = []
        self.needed = 0  # of those that must come before any
        self.uses: list[Use] = []
        self.memory = _memory_names(lowered)
        self.symbols = lowered.symbols
        self.writer: dict[str, int] = {}  # memory -> step that wrote it last
        self.readers: dict[str, set[int]] = {}  # memory -> steps that read it since
        self.ordered: int | None = None  # the last call that draws random numbers, checks or has an effect
        self.binder: dict[Any, int] = {}  # size read from data -> the call that it comes from

    def new_step(self) -> int:
        """The number of a step that depends on nothing yet."""
        self.before.append(0)
        self.uses.append(Use())
        return len(self.before) - 1

    def too_late(self, step: int, deps: set[int]) -> bool:
        """Whether one of those steps comes after `step`, so that what needs them all cannot be part of it."""
        return any(self.before[o] >> step & 1 for o in deps if o != step)

    def of(self, d: Def, reads: list[tuple[str, Indices]]) -> set[int]:
        """The steps that a definition has to come after, or be part of."""
        deps: set[int] = set()
        for name in {n for n, _ in reads}:
            memory = self.memory[name]
            if memory in self.writer:
                deps.add(self.writer[memory])
        for memory in self._written(d):
            if memory in self.writer:
                deps.add(self.writer[memory])
            deps |= self.readers.get(memory, set())
        if self.ordered is not None and _keeps_order(d):
            deps.add(self.ordered)
        if self.binder:
            deps |= {self.binder[s] for s in self._sizes(d) if s in self.binder}
        return deps

    def _sizes(self, d: Def) -> set[Any]:
        """The sizes read from data that a definition names."""
        hosts = [a for a in d.args if isinstance(a, Host)] if isinstance(d, Call) else []
        read = {s for n in _numbers(d) for s in self.symbols.unbacked(n)}
        return read.union(*(h.expr.free_symbols for h in hosts))

    def _written(self, d: Def) -> set[str]:
        return {self.memory[b.name] for b in d.outputs if b is not None}

    def record(self, step: int, d: Def, reads: list[tuple[str, Indices]], deps: set[int]) -> None:
        """A definition is part of a step."""
        mask = 0
        for s in deps - {step}:
            mask |= self.before[s] | (1 << s)
        if mask & ~self.before[step]:
            self.before[step] |= mask
            bit = 1 << step
            for s in range(len(self.before)) if self.needed & bit else ():
                if self.before[s] & bit:
                    self.before[s] |= mask
            self.needed |= mask
        self.uses[step].reads |= {self.memory[n] for n, _ in reads}
        self.uses[step].writes |= self._written(d)
        for memory in self._written(d):
            self.writer[memory] = step
            self.readers[memory] = set()
        for name in {n for n, _ in reads}:
            self.readers.setdefault(self.memory[name], set()).add(step)
        if _keeps_order(d):
            self.ordered = step
        if isinstance(d, Call):
            for s in {s for n in _results(d) for s in self.symbols.unbacked(n)}:
                self.binder.setdefault(s, step)


def _memory_names(lowered: Lowered) -> dict[str, str]:
    """Which buffers share memory: what updates another lives in it."""
    names: dict[str, str] = {}
    for b in lowered.buffers.values():  # a base stands before what it holds later
        names[b.name] = b.name if b.base is None else names[b.base.name]
    return names


def _keeps_order(d: Def) -> bool:
    """Whether a definition must come after all earlier ones of its sort."""
    return isinstance(d, Call) and not is_pure(d.node)


def _results(d: Call) -> list[Index]:
    """The sizes and numbers among a call's results."""
    found: list[Index] = []
    for r in d.results:
        found += [*r.shape, *r.strides] if isinstance(r, Buffer) else [r] if isinstance(r, ix.Poly) else []
    return found


def _numbers(d: Def) -> list[Index]:
    """Every size and index that a definition names."""
    found = [n for b in d.outputs if b is not None for n in (*b.shape, *b.strides)]
    if isinstance(d, Call):
        for x in operands((d.args, d.kwargs)):
            found += [*x.shape, *x.strides, x.offset] if isinstance(x, View) else [x]
        return found
    found += d.target if isinstance(d, Scatter) else ()
    own = [*d.vars, *(d.rvars if isinstance(d, Reduction) else ())]  # type: ignore[attr-defined]
    found += [v.size for v in own if v.size is not None]
    for e in ex.walk(d.expr):  # type: ignore[attr-defined]
        for a in e.args:
            found += [n for n in (a if isinstance(a, tuple) else (a,)) if isinstance(n, ix.Poly)]
    return found


__all__ = ["Dependencies"]
