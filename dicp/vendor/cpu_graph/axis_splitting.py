"""Axes whose quotients and remainders are read at, as axes of their own.

    i0 < 384, read at i0 // 12 and i0      ->      i0 < 32, i1 < 12, read at i0 and 12 * i0 + i1

Channels of a group norm are such, and windows that are laid out as rows of a product. A vector along the axis
would gather its elements one by one; along one of its parts they lie side by side, or are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, accessed, rewrite_body
from dicp.vendor.cpu_graph.lane_strides import Walk, is_read, walk
from dicp.vendor.cpu_graph.loops import choose_shape


def split_axes(kernel: Kernel, lanes: int) -> Kernel:
    """The kernel, with the axis of its vectors, or one it reduces, in parts where an element takes fewer
    operations then."""
    positions = [i for i in accessed(kernel.body) if not is_read(i)]
    if not any(isinstance(a, (ix.Div, ix.Mod)) for i in positions for a in ix.atoms(i)):
        return kernel
    along = choose_shape(kernel, lanes).vector
    if along is None:
        return kernel
    for axis in dict.fromkeys((along, *kernel.inner)):
        split = _split(kernel, axis, positions, lanes)
        if split is None:
            continue
        vectors = choose_shape(split, lanes).vector
        if vectors is not None and _operations(split, vectors, lanes) < _operations(kernel, along, lanes):
            return split
    return kernel


def _split(kernel: Kernel, axis: Axis, positions: list[Index], lanes: int) -> Kernel | None:
    """The kernel with an axis in the parts that positions name; None where they name none."""
    if axis.serial or not isinstance(axis.size, int):
        return None
    if axis.reduced and not all(map(_is_of_elements, kernel.body)):
        return None
    divided = [i for i in positions if walk(i, axis.var, lanes) == Walk.DIVIDED]
    lengths = _lengths(divided, axis.var, axis.size)
    return _with_axes(kernel, axis, lengths) if len(lengths) > 1 else None


def _is_of_elements(s: Statement) -> bool:
    """Whether a statement knows elements alone, not where they lie along a reduced axis."""
    return not isinstance(s, Scan) and not (isinstance(s, Reduce) and s.kind.startswith("arg"))


def _operations(kernel: Kernel, axis: Axis, lanes: int) -> float:
    """Of an element, with vectors along the axis: its share of a vector's, and its own."""
    together = sum(ex.cost(s.value) for s in kernel.body)
    filled = min(lanes, axis.size) if isinstance(axis.size, int) else lanes
    own = [walk(i, axis.var, lanes) for i in accessed(kernel.body) if not is_read(i)]
    return (together + own.count(Walk.TOGETHER)) / filled + sum(own)


def _lengths(indices: Iterable[Index], var: Var, size: int) -> list[int]:
    """Lengths, outermost first, of the parts of an axis of which these name quotients and remainders; one
    where it has no such parts."""
    bounds = {1, size}
    for a in dict.fromkeys(a for i in indices for a in ix.atoms(i)):
        if not isinstance(a, (ix.Div, ix.Mod)) or not ix.depends(ix.of(a), var):
            continue
        unit = _unit(a.num, var)
        if unit is None or not isinstance(a.den, int):
            return [size]
        bounds |= {unit, unit * a.den}
    ordered = sorted(bounds)
    pairs = list(itertools.pairwise(ordered))
    if ordered[-1] != size or any(large % small for small, large in pairs):
        return [size]
    return [large // small for small, large in reversed(pairs)]


def _unit(i: Index, var: Var) -> int | None:
    """d where it is var // d, or of its remainder by something."""
    if not isinstance(i, ix.Poly) or not i.is_atom:
        return None
    (atom,) = i.terms[0][0]
    if atom == var:
        return 1
    if not isinstance(atom, (ix.Div, ix.Mod)) or not isinstance(atom.den, int):
        return None
    unit = _unit(atom.num, var)
    return unit if unit is None or isinstance(atom, ix.Mod) else unit * atom.den


def _with_axes(kernel: Kernel, axis: Axis, lengths: list[int]) -> Kernel:
    parts = [Axis(Var(f"{axis.var.name}_{k}", n), axis.reduced) for k, n in enumerate(lengths)]
    whole = ix.linearize([ix.of(p.var) for p in parts], lengths)
    body = rewrite_body(kernel.body, lambda x: None, lambda i: ix.substitute(i, {axis.var: whole}))
    at = kernel.axes.index(axis)
    return replace(kernel, axes=(*kernel.axes[:at], *parts, *kernel.axes[at + 1 :]), body=tuple(body))


__all__ = ["split_axes"]
