"""Images read at places that a grid gives: aten.grid_sampler_2d.

Along each axis, a place is a few taps: pixels, and how much each of them counts. Those depend on the grid
alone, so they are kept for all channels; what lies outside of the image has the position -1, and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import LOW_PRECISION, Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Indices, Value
from dicp.ops import scalar as s
from dicp.ops.table import Declined, Row, row

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
CUBIC = -0.75  # the parameter of the convolution kernel, as in eager


@dataclass(frozen=True)
class Axis:
    """An axis of the image: its size, and what -1 and 1 of a grid mean (align_corners: the centres of the
    outer pixels, else their edges)."""

    size: Index
    padding: int
    align_corners: bool

    def place(self, x: Expr) -> Expr:
        """In pixels, where the grid has x; not yet within the image."""
        half = ex.cast(ex.index_value(self.size), x.dtype) * 0.5
        return x * (half - 0.5 if self.align_corners else half) + (half - 0.5)

    def within(self, place: Expr) -> Expr:
        """The place as padding has it: with border and reflection in the image, also of NaN."""
        if self.padding == ZEROS:
            return place
        top = ex.cast(ex.index_value(self.size - 1), place.dtype)
        place = self._reflected(place) if self.padding == REFLECTION else place
        return ex.where(place > 0, s.minimum(place, top), s.like(0, place))

    def _reflected(self, place: Expr) -> Expr:
        """Back and forth between the centres, or the edges, of the outer pixels."""
        low = 0.0 if self.align_corners else -0.5
        span = ex.cast(ex.index_value(self.size - 1 if self.align_corners else self.size), place.dtype)
        far = s.sabs(place - low)
        rest, times = s.fmod(far, span), s.floor(far / span)
        forth = s.eq(s.floor(times * 0.5) * 2, times)
        found = ex.where(forth, rest, span - rest) + low
        return ex.where(s.eq(span, 0), s.like(0, place), found) if self.align_corners else found

    def pixel(self, place: Expr) -> Expr:
        """The pixel there as int32, -1 outside of the image."""
        inside = s.land(place >= 0, place < ex.cast(ex.index_value(self.size), place.dtype))
        return ex.cast(ex.where(inside, place, s.like(-1, place)), torch.int32)


Tap = tuple[Expr, Expr | None]
"""A pixel, and its weight; None: all of it."""


def bilinear(axis: Axis, x: Expr) -> list[Tap]:
    place = axis.within(axis.place(x))
    low = s.floor(place)
    rest = place - low
    return [(axis.pixel(low), 1 - rest), (axis.pixel(low + 1), rest)]


def nearest(axis: Axis, x: Expr) -> list[Tap]:
    return [(axis.pixel(s.round_even(axis.within(axis.place(x)))), None)]


def bicubic(axis: Axis, x: Expr) -> list[Tap]:
    """By cubic convolution. Padding moves the pixels, not the place among them."""
    place = axis.place(x)
    low = s.floor(place)
    rest = place - low
    weights = (outer(rest + 1), inner(rest), inner(1 - rest), outer(2 - rest))
    return [(axis.pixel(axis.within(low + k)), w) for k, w in zip((-1, 0, 1, 2), weights, strict=True)]


def inner(t: Expr) -> Expr:
    """The convolution's kernel at a distance of up to 1."""
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def outer(t: Expr) -> Expr:
    """The same at a distance of 1 to 2."""
    return ((CUBIC * t - 5 * CUBIC) * t + 8 * CUBIC) * t - 4 * CUBIC


MODES: dict[int, tuple[int, Callable[[Axis, Expr], list[Tap]]]] = {
    BILINEAR: (2, bilinear), NEAREST: (1, nearest), BICUBIC: (4, bicubic)}
"""How many taps, and what they are at a place."""


def grid_sampler_2d(b: Builder, node: torch.fx.Node, x: Value, grid: Value, mode: int, padding: int,
                    align_corners: bool) -> Value:
    """x: (n, c, h, w); grid: (n, oh, ow, 2), of each place the position along w, then along h."""
    if mode == NEAREST and grid.dtype in LOW_PRECISION and node.meta["val"].device.type == "cpu":
        raise Declined("the nearest pixels of a grid of low precision")  # eager finds them in that precision
    if x.dtype != grid.dtype or 0 in x.shape[2:]:
        raise Declined("an image without pixels, or of another dtype than the grid")  # eager raises an error
    axes = [Axis(size, padding, align_corners) for size in (x.shape[3], x.shape[2])]
    columns, lines = ([kept_tap(b, grid, axis, mode, component, k) for k in range(MODES[mode][0])]
                      for component, axis in enumerate(axes))

    def element(idx: Indices) -> Expr:
        n, c, *place = idx
        at = (n, *place)

        def pixel(i: Expr, j: Expr) -> Expr:
            there = tuple(ix.of(ix.Opaque(p, size)) for p, size in ((i, x.shape[2]), (j, x.shape[3])))
            return ex.masked(s.land(i >= 0, j >= 0), lambda: x((n, c, *there)), 0)

        def weight(value: Value | None) -> Expr | None:
            return None if value is None else value(at)

        def along(line: Value) -> Expr:
            return weighted([(pixel(line(at), column(at)), weight(across)) for column, across in columns])

        return weighted([(along(line), weight(down)) for line, down in lines])

    return Value(b.meta(node)[0], x.dtype, element)


def kept_tap(b: Builder, grid: Value, axis: Axis, mode: int, component: int, k: int,
             ) -> tuple[Value, Value | None]:
    """Tap k along the axis whose positions are this component of the grid's places."""
    shape = grid.shape[:-1]
    wide = ex.compute_dtype(grid.dtype)

    def part(which: int) -> Callable[[Indices], Any]:
        return lambda at: MODES[mode][1](axis, grid((*at, component)))[k][which]

    weight = None if mode == NEAREST else b.kept(Value(shape, wide, part(1)))
    return b.kept(Value(shape, torch.int32, part(0))), weight


def weighted(terms: list[Tap]) -> Expr:
    """The sum of values, each by its weight."""
    out: Expr | None = None
    for value, weight in terms:
        term = value if weight is None else value * weight
        out = term if out is None else out + term
    assert out is not None
    return out


def rows() -> Iterator[Row]:
    yield row("grid_sampler_2d", torch.ops.aten.grid_sampler_2d.default, kind="index", rule=grid_sampler_2d)
