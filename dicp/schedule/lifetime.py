"""How long memory is taken, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dicp.ir.index import Index


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are taken from item `start` to item `end`, both included."""

    name: str
    nbytes: Index
    start: int
    end: int

    @property
    def size(self) -> int:
        """`nbytes`, where sizes are static."""
        assert isinstance(self.nbytes, int)
        return self.nbytes


def most_alive(lives: Iterable[Lifetime]) -> int:
    """The most bytes that are alive at once."""
    change: dict[int, int] = {}
    for life in lives:
        change[life.start] = change.get(life.start, 0) + life.size
        change[life.end + 1] = change.get(life.end + 1, 0) - life.size
    alive = peak = 0
    for k in sorted(change):
        alive += change[k]
        peak = max(peak, alive)
    return peak
