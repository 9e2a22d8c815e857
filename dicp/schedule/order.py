"""The order of a program's steps: after all that they depend on, and memory given back early.

Steps come as the graph has them, but one that gives back more memory than it takes comes as soon as it can:
what a graph returns is often computed at its end (a gradient rounded to the dtype of its weight, what is
saved for the backward), and what it is computed from would live until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field


@dataclass(eq=False)
class Use:
    """The memory that a step reads and writes, by name."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


def in_order(
    before: Sequence[int], uses: Sequence[Use], nbytes: Mapping[str, int], kept: Set[str] = frozenset()
) -> list[int]:
    """The steps' numbers in the order to run them.

    before: for each step, a bitmask of those it depends on. nbytes: of memory that the program takes. kept:
    what of it the caller gets; the rest is given back after its last use."""
    order = _Order(before, uses, nbytes, kept)
    while order.waiting:
        order.run(next(s for s in order.waiting if order.is_ready(s)))
    return order.done


class _Order:
    def __init__(
        self, before: Sequence[int], uses: Sequence[Use], nbytes: Mapping[str, int], kept: Set[str]
    ) -> None:
        self.before, self.uses, self.nbytes, self.kept = before, uses, nbytes, kept
        self.waiting = dict.fromkeys(range(len(uses)))
        self.done: list[int] = []
        self.mask = 0
        self.readers: dict[str, set[int]] = {}
        for s, use in enumerate(uses):
            for name in use.reads:
                self.readers.setdefault(name, set()).add(s)

    def is_ready(self, s: int) -> bool:
        return self.before[s] & ~self.mask == 0

    def run(self, s: int) -> None:
        """Take a step, and then those that give memory back now."""
        pending = [s]
        while pending:
            s = pending.pop()
            if s not in self.waiting:
                continue
            del self.waiting[s]
            self.mask |= 1 << s
            self.done.append(s)
            touched = self.uses[s].reads | self.uses[s].writes
            for name in self.uses[s].reads:
                self.readers[name].discard(s)
            pending += sorted(self._giving(touched), reverse=True)

    def _giving(self, touched: Iterable[str]) -> Set[int]:
        """Ready steps that are the last to read some of this memory and take less than they give back."""
        last = {next(iter(r)) for n in touched if len(r := self.readers.get(n, set())) == 1}
        return {s for s in last if s in self.waiting and self.is_ready(s) and self._gives(s)}

    def _gives(self, s: int) -> bool:
        use = self.uses[s]
        given = [n for n in use.reads - use.writes - self.kept if self.readers[n] == {s}]
        taken = [n for n in use.writes if n in self.kept or self.readers.get(n, set()) - {s}]
        return sum(self.nbytes.get(n, 0) for n in given) > sum(self.nbytes.get(n, 0) for n in taken)
