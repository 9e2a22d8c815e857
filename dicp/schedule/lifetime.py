"""How long memory is taken, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


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


class Timeline(Generic[T]):
    """What is alive when: found without a look at all that ever was."""

    def __init__(self) -> None:
        self._all: list[T] = []
        self._alive: dict[int, list[int]] = {}  # by item, positions in `_all`

    def add(self, x: T, life: Lifetime) -> None:
        """Have x alive for that long."""
        for k in range(life.start, life.end + 1):
            self._alive.setdefault(k, []).append(len(self._all))
        self._all.append(x)

    def during(self, life: Lifetime) -> list[T]:
        """What is alive at some time of a life, in the order of adding."""
        found: set[int] = set()
        for k in range(life.start, life.end + 1):
            found.update(self._alive.get(k, ()))
        return [self._all[n] for n in sorted(found)]


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
