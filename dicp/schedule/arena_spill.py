"""Temporaries that have memory of their own while they live, because an arena for all would lie there unused
when the program needs the most memory.

The arena is held from the first step to the last, as large as the temporaries of its fullest moment. Where
the program's memory peaks at another one (a language model's logits; a backward while activations shrink and
gradients grow), the arena's unused part adds to the peak. The largest temporaries then leave it, and the
program allocates and frees them, between native segments on the CPU. What libraries allocate may come from
another allocator, which never gets what the program frees: then it is no such other moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dicp.schedule.lifetime import Lifetime

SMALLEST = 1 << 16  # bytes: for less, allocating costs more than the arena's room
WORTH = 64  # part of the peak that has to be saved for any to leave
CLOSE = 256  # part of the peak above the lowest that is as good, if fewer leave
LEVELS = [2 ** (-k / 2) for k in range(1, 11)]  # parts of the full arena that are tried


def spilled(
    temporaries: Sequence[Lifetime],
    others: Iterable[Lifetime],
    items: int,
    arena: int,
    staying: Sequence[Lifetime] = (),
    apart: Iterable[Lifetime] = (),
) -> set[str]:
    """Names of the temporaries that are to leave an arena of `arena` bytes, for the lowest peak.

    others: what else the program allocates (results of libraries and of the program, inputs it owns).
    staying: what the arena holds whatever leaves it. apart: what comes from an allocator of its own."""
    base, foreign = [0] * (items + 1), [0] * (items + 1)
    for lives, total in ((others, base), (apart, foreign)):
        for life in lives:
            _add(total, life)
    now = arena + max(base) + max(foreign)
    found = []
    for level in LEVELS:
        kept, gone = _within(temporaries, int(arena * level), items, staying)
        total = list(base)
        for life in gone:
            _add(total, life)
        found.append((kept + max(total) + max(foreign), gone))
    lowest = min(peak for peak, _ in found)
    if lowest + now // WORTH > now:
        return set()
    return next({x.name for x in gone} for peak, gone in found if peak <= lowest + now // CLOSE)


def _within(
    temporaries: Sequence[Lifetime], room: int, items: int, staying: Sequence[Lifetime]
) -> tuple[int, list[Lifetime]]:
    """(bytes alive at once of those that stay, those that go) when at most `room` bytes stay. Small ones
    stay first, so that few go."""
    alive = [0] * (items + 1)
    for life in staying:
        _add(alive, life)
    room = max(room, *alive)
    gone = []
    for life in sorted(temporaries, key=lambda x: (x.nbytes, x.start)):
        fullest = max(alive[life.start : life.end + 1])
        if life.nbytes >= SMALLEST and fullest + life.nbytes > room:
            gone.append(life)
        else:
            _add(alive, life)
    return max(alive), gone


def _add(alive: list[int], life: Lifetime) -> None:
    for k in range(life.start, min(life.end, len(alive) - 1) + 1):
        alive[k] += life.nbytes
