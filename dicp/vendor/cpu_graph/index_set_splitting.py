"""Axes along which conditions change, in ranges within which they hold or do not; and axes along which
positions begin again.

    i0 < 96:  where(i0 < 32, a[i0], where(i0 < 64, b[i0 - 32], c[i0 - 64]))
          ->  i0 < 32: a[i0],  i0 < 32: b[i0],  i0 < 32: c[i0]
    i0 < 96:  a[(i0 + 93) % 96]
          ->  i0 < 3: a[i0 + 93],  i0 < 93: a[i0]

Parts that are put together and margins are of the first kind. A vector along the axis would load, under
masks, from all of them: as many loads as there are parts. What is rolled is of the second: a vector would
gather its elements one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Statement, accessed, expressions, rewrite_body
from dicp.ir.ranges import change
from dicp.vendor.cpu_graph.lane_strides import is_read, walk

MOST, MOST_OF_ROWS = 64, 4  # ranges, each of which is text
LEAST_ROWS = 16  # of a range, which threads share out
TURNS = 3  # at which a position begins again; of more, axis_splitting.py makes axes
UNROLLED = 8  # vectors, whose positions are constants then: gathered faster than stored under two masks
STEP = 4  # what a vector takes besides its operations, in these


@dataclass(frozen=True)
class Range:
    """A kernel over a range of an axis, which begins at `start` of the whole and at 0 here."""

    start: int
    axis: Axis
    kernel: Kernel


def split_ranges(kernel: Kernel, axis: Axis, lanes: int) -> list[Range]:
    """The kernel in ranges of an axis, one after the other; in one where that takes fewer operations."""
    whole = [Range(0, axis, kernel)]
    if axis.reduced or axis.serial or not isinstance(axis.size, int):
        return whole
    turns = _turns(kernel.body, axis.var, axis.size) if axis.size > UNROLLED * lanes else ()
    changes = sorted({*_changes(kernel.body, axis.var, axis.size), *turns})
    if not 0 < len(changes) < MOST:
        return whole
    found = [_part(kernel, axis, a, b) for a, b in itertools.pairwise([0, *changes, axis.size])]
    fewer = sum(_operations(r, lanes) for r in found) < _operations(whole[0], lanes)
    return found if fewer else whole


def split_rows(kernel: Kernel, axis: Axis) -> list[Range]:
    """The same of an axis around rows, of which conditions alone are decided: a row takes each of its vectors
    from one part."""
    whole = [Range(0, axis, kernel)]
    if axis.reduced or axis.serial or not isinstance(axis.size, int):
        return whole
    changes = sorted(set(_changes(kernel.body, axis.var, axis.size)))
    bounds = list(itertools.pairwise([0, *changes, axis.size]))
    if not 0 < len(changes) < MOST_OF_ROWS or min(b - a for a, b in bounds) < LEAST_ROWS:
        return whole
    found = [_part(kernel, axis, a, b) for a, b in bounds]
    least = min(sum(ex.cost(s.value) for s in r.kernel.body) for r in found)
    return found if least < sum(ex.cost(s.value) for s in kernel.body) else whole


def _changes(body: Iterable[Statement], var: Var, size: int) -> Iterator[int]:
    """Where along the axis a condition that nothing else decides begins or ceases to hold."""
    for e in dict.fromkeys(e for s in body for e in expressions(s) if e.op in ("lt", "ge")):
        found = change(e, var)
        if found is not None and 0 < found[0] < size:
            yield found[0]


def _turns(body: Iterable[Statement], var: Var, size: int) -> Iterator[int]:
    """Where along the axis a quotient grows, and its remainder begins again, if that is seldom."""
    positions = [i for i in accessed(body) if not is_read(i)]
    for a in dict.fromkeys(a for i in positions for a in ix.atoms(i)):
        if not isinstance(a, (ix.Div, ix.Mod)) or not isinstance(a.den, int):
            continue
        step, start = ix.coefficient(a.num, var) or (0, 0)
        if isinstance(step, int) and isinstance(start, int) and step > 0:
            first, last = start // a.den, (step * (size - 1) + start) // a.den
            if last - first <= TURNS:
                yield from (-((start - k * a.den) // step) for k in range(first + 1, last + 1))


def _part(kernel: Kernel, axis: Axis, start: int, end: int) -> Range:
    part = replace(axis, var=Var(axis.var.name, end - start))
    moved: dict[ix.Atom, Index] = {axis.var: ix.of(part.var) + start}
    body = rewrite_body(kernel.body, lambda x: None, lambda i: ix.substitute(i, moved))
    axes = tuple(part if a is axis else a for a in kernel.axes)
    return Range(start, part, replace(kernel, axes=axes, body=tuple(body)))


def _operations(part: Range, lanes: int) -> int:
    assert isinstance(part.axis.size, int)
    vectors = -(-part.axis.size // lanes) * (STEP + sum(ex.cost(s.value) for s in part.kernel.body))
    positions = [i for i in accessed(part.kernel.body) if not is_read(i)]
    return vectors + part.axis.size * sum(walk(i, part.axis.var, lanes) for i in positions)


__all__ = ["Range", "split_ranges", "split_rows"]
