"""How an index walks along the lanes of a vector, where vectors begin at multiples of their length.

A quotient of such an axis by a multiple of that length is the same in all lanes, and so is what is computed
from it; the rest grows by one: what merged dims of lengths that fill vectors read is contiguous in each.
"""

from __future__ import annotations

import enum

from dicp.ir import index as ix
from dicp.ir.index import Index, Poly, Var


class Walk(enum.IntEnum):
    """How a vector reaches a position: at once, element by element, and that after a division; as
    operations of an element."""

    TOGETHER = 0
    APART = 1
    DIVIDED = 2


def walk(i: Index, axis: Var, lanes: int) -> Walk:
    """Of vectors along the axis. Nothing in the position is read from memory."""
    step = lane_stride(i, axis, lanes)
    if step in (0, 1) or lane_repeats(i, axis, lanes) is not None:
        return Walk.TOGETHER
    return Walk.DIVIDED if step is None else Walk.APART


def is_read(i: Index) -> bool:
    """Whether something in the position is read from memory."""
    return any(isinstance(a, ix.Opaque) for a in ix.atoms(i))


def lane_stride(i: Index, axis: Var, lanes: int) -> Index | None:
    """By how much it grows from lane to lane; None where that differs between lanes. Nothing in it is read
    from memory."""
    split = ix.coefficient(i, axis)
    if split is not None:
        return split[0]
    assert isinstance(i, Poly)
    step: Index = 0
    for mono, factor in i.terms:
        moving = [a for a in mono if ix.depends(ix.of(a), axis)]
        if not moving:
            continue
        own = _atom_step(moving[0], axis, lanes) if len(moving) == 1 else None
        if own is None:
            return None
        step = step + factor * own * ix.product(ix.of(a) for a in mono if a is not moving[0])
    return step


def lane_repeats(i: Index, axis: Var, lanes: int) -> int | None:
    """How many lanes read an element, the next ones the element behind it; None where they do not so."""
    if lane_stride(i, axis, lanes) == 0:
        return lanes
    moving = [(mono, factor) for mono, factor in i.terms if any(ix.depends(ix.of(a), axis) for a in mono)]  # type: ignore[union-attr]
    if len(moving) != 1 or moving[0][1] != 1 or len(moving[0][0]) != 1:
        return None
    (atom,) = moving[0][0]
    divides = isinstance(atom, ix.Div) and isinstance(atom.den, int) and lanes % atom.den == 0
    return atom.den if divides and _begins_vectors(atom.num, axis, lanes) else None  # type: ignore[union-attr, return-value]


def _atom_step(a: ix.Atom, axis: Var, lanes: int) -> int | None:
    if a == axis:
        return 1
    if not isinstance(a, (ix.Div, ix.Mod)) or not isinstance(a.den, int):
        return None
    if lane_stride(a.num, axis, lanes) == 0:
        return 0
    if a.den % lanes:
        return None
    if not _begins_vectors(a.num, axis, lanes):
        return None
    return 0 if isinstance(a, ix.Div) else 1


def _begins_vectors(i: Index, axis: Var, lanes: int) -> bool:
    """Whether it grows with the axis, and is a multiple of the length where a vector begins."""
    split = ix.coefficient(i, axis)
    if split is None or split[0] != 1:
        return False
    rest = split[1]
    return rest % lanes == 0 if isinstance(rest, int) else all(c % lanes == 0 for _, c in rest.terms)


__all__ = ["Walk", "is_read", "lane_repeats", "lane_stride", "walk"]
