"""Which parts of a range of addresses are free, and which of those have pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

_START = attrgetter("start")


@dataclass(slots=True)
class Span:
    """Free bytes from `start` to `end`, with pages (warm) or without (cold)."""

    start: int
    end: int
    warm: bool

    @property
    def size(self) -> int:
        return self.end - self.start


class Spans:
    """The free parts of a range of `nbytes` bytes, in order; those that touch differ in warmth.

    held, warm: bytes that are taken, and that are free with pages.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free = [Span(0, nbytes, False)] if nbytes else []
        self.held = self.warm = 0

    @property
    def paged(self) -> int:
        """Bytes with pages."""
        return self.held + self.warm

    def take(self, size: int) -> int | None:
        """The start of so many bytes: in the smallest warm span that holds them, else where the fewest are
        cold, the lowest of such places. None: there is no place."""
        warm = self._smallest_warm(size)
        return self._hold(self._least_cold(size) if warm is None else warm, size)

    def _hold(self, start: int | None, size: int) -> int | None:
        if start is not None:
            self._cut(start, start + size)
            self.held += size
        return start

    def _smallest_warm(self, size: int) -> int | None:
        """At the end beside what is free rather than beside what is held: of the activations of a chain of
        layers each is dropped before the next but one is made, which then finds room on both sides."""
        best, least = -1, 0
        for k, s in enumerate(self._free):
            room = s.end - s.start
            if s.warm and room >= size and (best < 0 or room < least):
                best, least = k, room
        if best < 0:
            return None
        s = self._free[best]
        return s.end - size if self._is_held(best, -1) and not self._is_held(best, 1) else s.start

    def _is_held(self, k: int, side: int) -> bool:
        """Whether what lies below (-1) or above (1) a free span is held."""
        s, beside = self._free[k], k + side
        if not 0 <= beside < len(self._free):
            return 0 < s.start if side < 0 else s.end < self._nbytes
        other = self._free[beside]
        return other.end != s.start if side < 0 else s.end != other.start

    def _least_cold(self, size: int) -> int | None:
        best: tuple[int, int] | None = None
        for run in self._runs():
            last = run[-1].end - size
            for start in sorted({s.start for s in run if s.start <= last} | {last}):
                if start >= run[0].start:
                    cold = sum(_common(s, start, start + size) for s in run if not s.warm)
                    best = min(best or (cold, start), (cold, start))
        return None if best is None else best[1]

    def _runs(self) -> Iterator[list[Span]]:
        """Spans that touch."""
        run: list[Span] = []
        for span in self._free:
            if run and run[-1].end != span.start:
                yield run
                run = []
            run.append(span)
        if run:
            yield run

    def _cut(self, start: int, end: int) -> None:
        """Without the bytes from start to end, all of which are free."""
        first = bisect_left(self._free, start + 1, key=_START) - 1
        after = bisect_left(self._free, end, key=_START)
        left: list[Span] = []
        for s in self._free[first:after]:
            if s.warm:
                self.warm -= _common(s, start, end)
            if s.start < start:
                left.append(Span(s.start, start, s.warm))
            if s.end > end:
                left.append(Span(end, s.end, s.warm))
        self._free[first:after] = left

    def give(self, start: int, end: int, warm: bool = True) -> None:
        """What was taken is free."""
        self.held -= end - start
        self.warm += (end - start) * warm
        self._insert(Span(start, end, warm))

    def _insert(self, span: Span) -> None:
        at = bisect_left(self._free, span.start, key=_START)
        first, after = at, at
        if at and self._joins(self._free[at - 1], span):
            first = at - 1
            span.start = self._free[first].start
        if at < len(self._free) and self._joins(span, self._free[at]):
            after = at + 1
            span.end = self._free[at].end
        self._free[first:after] = [span]

    @staticmethod
    def _joins(a: Span, b: Span) -> bool:
        return a.end == b.start and a.warm == b.warm

    def cool(self, nbytes: int) -> list[Span]:
        """Make so many warm bytes cold, the highest first, or all. Gives the spans that were warm."""
        gone: list[Span] = []
        for s in reversed(self.warm_spans()):
            if nbytes > 0:
                gone.append(Span(max(s.start, s.end - nbytes), s.end, True))
                nbytes -= gone[-1].size
        for span in gone:
            self._cut(span.start, span.end)
            self._insert(Span(span.start, span.end, False))
        return gone

    def warm_spans(self) -> list[Span]:
        """Those with pages, in order."""
        return [s for s in self._free if s.warm]


def _common(s: Span, start: int, end: int) -> int:
    return max(0, min(s.end, end) - max(s.start, start))
