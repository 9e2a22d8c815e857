"""Where buffers lie in an arena whose sizes may be symbolic.

Offsets are chosen at the sizes of the example, largest buffer first, each at the lowest offset that is free
during its life. What that decides is which buffer lies under which, and from this follow the offsets at all
other sizes: a buffer begins where the highest of those under it ends. At the example's sizes these are the
offsets that were chosen; at others nothing that is alive at once can overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.schedule.lifetime import Lifetime, Timeline


@dataclass(eq=False)
class Placed:
    """A buffer's life and its bytes of the arena at the sizes of the example: [offset, end)."""

    offset: int
    life: Lifetime

    @property
    def end(self) -> int:
        return self.offset + self.life.nbytes


def by_size(lives: Iterable[Lifetime]) -> list[Placed]:
    """Offsets in bytes at the sizes of the example."""
    return fitting(lives, None)


def fitting(lives: Iterable[Lifetime], room: int | None) -> list[Placed]:
    """The same of as many as there is room for, the largest first."""
    placed: list[Placed] = []
    alive = Timeline[Placed]()
    for life in sorted(lives, key=lambda x: (-x.nbytes, x.start)):
        p = Placed(lowest_gap(life, alive.during(life)), life)
        if room is None or p.end <= room:
            placed.append(p)
            alive.add(p, life)
    return placed


def lowest_gap(life: Lifetime, others: Iterable[Placed]) -> int:
    """The lowest offset for a buffer where none of those lies that are alive during its life."""
    at = 0
    for other in sorted(others, key=lambda p: p.offset):
        if at + life.nbytes <= other.offset:
            break
        at = max(at, other.end)
    return at


@dataclass(eq=False)
class Stack:
    """offset: bytes into the arena by buffer. size: arena bytes. maxima: what symbols among them stand for,
    each the largest of its numbers, in an order in which they can be computed."""

    offset: dict[str, Index] = field(default_factory=dict)
    size: Index = 0
    maxima: dict[Var, tuple[Index, ...]] = field(default_factory=dict)

    def highest(self, ends: Iterable[Index]) -> Index:
        """The largest of the numbers: one of them where that is proven, else a symbol."""
        given = list(dict.fromkeys(ends))
        top = [e for e in given if not any(_exceeds(f, e) for f in given)] or [0]
        if len(top) == 1:
            return top[0]
        for symbol, numbers in self.maxima.items():
            if set(numbers) == set(top):
                return ix.of(symbol)
        symbol = Var(f"at{len(self.maxima)}", None, 0)
        self.maxima[symbol] = tuple(top)
        return ix.of(symbol)


def stacked(placed: Iterable[Placed], nbytes: Mapping[str, Index]) -> Stack:
    """Offsets for every size, from the order at the sizes of the example. nbytes: by buffer, in symbols."""
    stack = Stack()
    below: list[Placed] = []
    alive = Timeline[Placed]()
    for p in sorted(placed, key=lambda p: p.offset):  # stable: of equal offsets one has no bytes
        stack.offset[p.life.name] = _above(alive.during(p.life), stack, nbytes)
        alive.add(p, p.life)
        below.append(p)
    stack.size = _above(below, stack, nbytes)
    return stack


def _above(under: list[Placed], stack: Stack, nbytes: Mapping[str, Index]) -> Index:
    """Where the highest of them ends. Of numbers the largest is found sooner than what lies on what."""
    ends = {o.life.name: stack.offset[o.life.name] + nbytes[o.life.name] for o in under}
    numbers = [e for e in ends.values() if isinstance(e, int)]
    if len(numbers) == len(ends):
        return max(numbers, default=0)
    return stack.highest(ends[o.life.name] for o in _directly(under))


def _directly(under: list[Placed]) -> list[Placed]:
    """Those with nothing between: what lies on another of them ends higher."""
    return [o for k, o in enumerate(under) if not any(o.life.overlaps(p.life) for p in under[k + 1 :])]


def _exceeds(a: Index, b: Index) -> bool:
    return a is not b and a != b and ix.nonnegative(a - b)
