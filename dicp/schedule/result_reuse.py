"""Temporaries that lie in the memory of a result until the result itself is written.

A result is allocated where the native code begins that writes it, so what is dead when it is written costs
nothing there: its bytes are taken anyhow, and their pages touched once, sooner or later. Only what is left
needs an arena. A language model's temporaries lie in its logits, a forward's in what it saves last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.lifetime import Lifetime
from dicp.schedule.placement import fitting, stacked

SMALLEST = 1 << 16  # bytes of a result that lends


@dataclass(frozen=True)
class Lender:
    """A result's memory, free from item `start` to item `end`, both included. nbytes: in symbols; room: the
    same at the sizes of the example."""

    name: str
    nbytes: Index
    room: int
    start: int
    end: int


def borrowed(
    lives: Iterable[Lifetime], lenders: Sequence[Lender], nbytes: Mapping[str, Index]
) -> dict[str, tuple[str, Index]]:
    """By temporary, the result whose memory it lies in and at which byte. The largest result lends first, to
    the largest that fit at every size. nbytes: of the temporaries, in symbols."""
    out: dict[str, tuple[str, Index]] = {}
    left = list(lives)
    for lender in sorted(lenders, key=lambda x: (-x.room, x.start)):
        if lender.room < SMALLEST:
            break
        out.update({name: (lender.name, at) for name, at in _fitting(left, lender, nbytes).items()})
        left = [x for x in left if x.name not in out]
    return out


def _fitting(lives: Iterable[Lifetime], lender: Lender, nbytes: Mapping[str, Index]) -> dict[str, Index]:
    """The offsets of those that lie in the result's memory whatever the sizes are."""
    inside = [
        x
        for x in lives
        if lender.start <= x.start and x.end <= lender.end and ix.nonnegative(lender.nbytes - nbytes[x.name])
    ]
    while True:
        placed = fitting(inside, lender.room)
        offset = stacked(placed, nbytes).offset
        over = {n for n, at in offset.items() if not ix.nonnegative(lender.nbytes - at - nbytes[n])}
        if not over:
            return offset
        inside = [p.life for p in placed if p.life.name not in over]
