"""Axes along which conditions change, in ranges within which they hold or do not.

    i0 < 96:  where(i0 < 32, a[i0], where(i0 < 64, b[i0 - 32], c[i0 - 64]))
          ->  i0 < 32: a[i0],  i0 < 32: b[i0],  i0 < 32: c[i0]

Parts that are put together and margins are such. A vector along the axis would load, under masks, from all of
them: as many loads as there are parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Statement, expressions, rewrite_body

MOST = 64  # ranges, each of which is text
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
    changes = sorted(set(_changes(kernel.body, axis.var, axis.size)))
    if not 0 < len(changes) < MOST:
        return whole
    found = [_part(kernel, axis, a, b) for a, b in itertools.pairwise([0, *changes, axis.size])]
    fewer = sum(_operations(r, lanes) for r in found) < _operations(whole[0], lanes)
    return found if fewer else whole


def _changes(body: Iterable[Statement], var: Var, size: int) -> Iterator[int]:
    """Where along the axis a condition that nothing else decides begins or ceases to hold."""
    for e in dict.fromkeys(e for s in body for e in expressions(s) if e.op in ("lt", "ge")):
        left, right = map(ex.as_index, e.args)
        split = ix.coefficient(left - right, var) if left is not None and right is not None else None
        if split is None:
            continue
        step, start = split  # step * var + start < 0
        if isinstance(step, int) and isinstance(start, int) and step:
            change = -(start // step) if step > 0 else start // -step + 1
            if 0 < change < size:
                yield change


def _part(kernel: Kernel, axis: Axis, start: int, end: int) -> Range:
    part = replace(axis, var=Var(axis.var.name, end - start))
    moved: dict[ix.Atom, Index] = {axis.var: ix.of(part.var) + start}
    body = rewrite_body(kernel.body, lambda x: None, lambda i: ix.substitute(i, moved))
    axes = tuple(part if a is axis else a for a in kernel.axes)
    return Range(start, part, replace(kernel, axes=axes, body=tuple(body)))


def _operations(part: Range, lanes: int) -> int:
    assert isinstance(part.axis.size, int)
    return -(-part.axis.size // lanes) * (STEP + sum(ex.cost(s.value) for s in part.kernel.body))


__all__ = ["Range", "split_ranges"]
