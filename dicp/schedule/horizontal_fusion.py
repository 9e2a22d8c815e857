"""Definitions that share nothing but an iteration space: in one kernel where launching another would take
longer than what they move, as on a GPU. Such are the parts of several sums that are added up, or the scales
of several norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dicp.ir import index as ix
from dicp.schedule.defs import Call, Def, Reduction, Scatter
from dicp.schedule.unify import Mapping

if TYPE_CHECKING:
    from dicp.schedule.fuse import Group

RECENT = 8  # groups of the same space that are tried, the last first

Space = tuple[tuple[int, ...], tuple[int, ...]]
"""Extents of the axes of results, and of those reduced."""


def space_of(d: Def) -> Space | None:
    """Where its sizes are known, and it neither scans nor may write an element twice."""
    if isinstance(d, Call) or (isinstance(d, Reduction) and d.scan) or not writes_once(d):
        return None
    results, reduced = ([v.size for v in d.vars], [v.size for v in getattr(d, "rvars", ())])  # type: ignore[attr-defined]
    if not all(isinstance(n, int) for n in (*results, *reduced)):
        return None
    return tuple(results), tuple(reduced)  # type: ignore[return-value,arg-type]


def writes_once(d: Def) -> bool:
    """Whether no element is written at two points: all but scatters do, and those to places that differ."""
    return not isinstance(d, Scatter) or (d.unique and d.mode == "set")


def same_axes(group: Group, d: Def) -> Mapping | None:
    """A definition's variables as a group's axes, one for one; None where the group has other axes by now."""
    axes = [a for a in group.axes if a not in group.reduced], [a for a in group.axes if a in group.reduced]
    if space_of(d) != tuple(tuple(a.size for a in kind) for kind in axes):
        return None
    own = [*d.vars, *getattr(d, "rvars", ())]  # type: ignore[attr-defined]
    return {v: ix.of(a) for v, a in zip(own, (*axes[0], *axes[1]), strict=True)}


__all__ = ["RECENT", "Space", "same_axes", "space_of", "writes_once"]
