"""Kernels without reductions: each element by itself, a vector at a time, in tiles where an operand is
transposed."""

from __future__ import annotations

import functools
from dataclasses import replace

from dicp.vendor.cpu_graph.expression import Scope
from dicp.vendor.cpu_graph.index_set_splitting import split_ranges
from dicp.vendor.cpu_graph.kernel_writer import KernelWriter
from dicp.vendor.cpu_graph.loops import around, block_loop, few, indent, shared_vector_loop, vector_loop
from dicp.vendor.cpu_graph.transposed_loads import TransposedLoads, find_transposed, tiles


class PointwiseWriter(KernelWriter):
    def lines(self) -> list[str]:
        along = self.shape.vector
        ranges = split_ranges(self.wide, along, self.lanes) if along is not None else []
        if len(ranges) < 2:
            return self._points()
        parts = [PointwiseWriter(r.kernel, replace(self.shape, vector=r.axis), self.lanes) for r in ranges]
        # tiles have outer loops of their own, and too few of them leave the vectors' loop to be shared out
        apart = few(self.shape.outer) or any(p.transposed is not None for p in parts)
        lines: list[str] = []
        for r, p in zip(ranges, parts, strict=True):
            inner = p._points() if apart else p._row()
            lines += [f"// {r.axis.var} from {r.start}", "{", *indent(inner), "}"]
        return lines if apart else around(self.kernel, self.shape.outer, lines)

    @functools.cached_property
    def transposed(self) -> TransposedLoads | None:
        return find_transposed(self.kernel, self.shape, self.lanes)

    def _points(self) -> list[str]:
        if self.transposed is not None:
            return self._tiled(self.transposed)
        if self.shape.vector is None or not few(self.shape.outer):
            return around(self.kernel, self.shape.outer, self._row())
        inside = self._inside(None)  # too few outer iterations: share out the vector loop too
        loop = shared_vector_loop(self.shape.vector, inside.lines, self.lanes, self.writer.fresh)
        return around(self.kernel, self.shape.outer, loop, extra=1)

    def _row(self) -> list[str]:
        """All that is inside the outer loops."""
        outer = Scope(provides=frozenset())
        inside = self._inside(outer)
        if self.shape.vector is None:
            return [*outer.lines, *inside.lines]
        return [*outer.lines, *vector_loop(self.shape.vector, inside.lines, self.lanes, self.writer.fresh)]

    def _inside(self, outer: Scope | None) -> Scope:
        """The statements, of a vector if there are any."""
        axis = self.vector_var
        scope = Scope(outer, lanes="lanes" if axis else None, provides=frozenset({axis} if axis else ()))
        self.stores(list(self.kernel.body), scope)
        return scope

    def _tiled(self, transposed: TransposedLoads) -> list[str]:
        along, across = self.shape.vector, transposed.axis.var
        assert along is not None
        block = self.writer.fresh("block")
        tile = Scope(lanes="lanes", provides=frozenset({along.var}))
        tiles(transposed, along, block, self.writer, tile)
        column = Scope(tile, lanes="lanes", provides=frozenset({across}))
        self.stores(list(self.kernel.body), column)
        head = f"for (int64_t {across} = {block}; {across} < {block} + columns; ++{across}) {{"
        step = vector_loop(
            along, [*tile.lines, head, *indent(column.lines), "}"], self.lanes, self.writer.fresh
        )
        blocks = block_loop(transposed.axis, block, step, self.lanes)
        return around(self.kernel, transposed.outer, blocks, extra=1)
