"""How long memory is taken, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are taken from item `start` to item `end`, both included. Symbolic sizes count as they are
    in the example."""

    name: str
    nbytes: int
    start: int
    end: int

    def overlaps(self, other: Lifetime) -> bool:
        """Whether both are taken at once."""
        return self.start <= other.end and other.start <= self.end


def most_alive(lives: Iterable[Lifetime]) -> int:
    """The most bytes that are alive at once."""
    change: dict[int, int] = {}
    for life in lives:
        change[life.start] = change.get(life.start, 0) + life.nbytes
        change[life.end + 1] = change.get(life.end + 1, 0) - life.nbytes
    alive = peak = 0
    for k in sorted(change):
        alive += change[k]
        peak = max(peak, alive)
    return peak
