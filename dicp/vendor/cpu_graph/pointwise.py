"""Kernels without reductions: each element by itself, a vector at a time, in tiles where an operand or a
result is transposed."""

from __future__ import annotations

import functools

from dicp.vendor.cpu_graph.expression import Scope
from dicp.vendor.cpu_graph.index_set_splitting import Range, split_ranges
from dicp.vendor.cpu_graph.kernel_writer import KernelWriter
from dicp.vendor.cpu_graph.loops import (
    around,
    block_loop,
    choose_shape,
    few,
    indent,
    run_end,
    run_loop,
    shared_vector_loop,
    vector_loop,
)
from dicp.vendor.cpu_graph.transposed import (
    Transposed,
    find_transposed,
    masks_transposed,
    run_of_blocks,
    stored_tile,
    tile,
)


class PointwiseWriter(KernelWriter):
    def lines(self) -> list[str]:
        ranges = self._ranges()
        if len(ranges) < 2:
            return self._points()
        # what is read and written under no condition may be walked along another axis than the whole
        parts = [PointwiseWriter(r.kernel, choose_shape(r.kernel, self.lanes), self.lanes) for r in ranges]
        # tiles and other axes have outer loops of their own; of too few, the vectors are shared out
        apart = few(self.shape.outer) or any(
            p.transposed is not None or p.shape.outer != self.shape.outer for p in parts
        )
        lines: list[str] = []
        for r, p in zip(ranges, parts, strict=True):
            inner = p._points() if apart else p._row()
            lines += [f"// {r.axis.var} from {r.start}", "{", *indent(inner), "}"]
        return lines if apart else around(self.kernel, self.shape.outer, lines)

    def _ranges(self) -> list[Range]:
        """In which conditions along the vectors hold or do not; or along an axis that masked loads lie along,
        which tiles can then read."""
        along = self.shape.vector
        if along is None:
            return []
        axes = (along, *(a for a in self.shape.outer if masks_transposed(self.wide, along, a)))
        found = (split_ranges(self.wide, a, self.lanes) for a in axes)
        return next((ranges for ranges in found if len(ranges) > 1), [])

    @functools.cached_property
    def transposed(self) -> Transposed | None:
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

    def _tiled(self, transposed: Transposed) -> list[str]:
        along, across = self.shape.vector, transposed.axis.var
        assert along is not None
        block = self.writer.fresh("block")
        points = Scope(lanes="lanes", provides=frozenset({along.var}))
        after: list[str] = []
        for e in transposed.loads:
            points.lines += tile(e, transposed.axis, along, block, self.writer)
        for s in transposed.stores:
            declared, self.kept[id(s)], stored = stored_tile(s, transposed.axis, along, block, self.writer)
            points.lines.append(declared)
            after.append(stored)
        column = Scope(points, lanes="lanes", provides=frozenset({across}))
        self.stores(list(self.kernel.body), column)
        head = f"for (int64_t {across} = {block}; {across} < {block} + columns; ++{across}) {{"
        inside = [*points.lines, head, *indent(column.lines), "}", *after]
        run = run_of_blocks(self.kernel, transposed, self.lanes)
        if run is None:
            step = vector_loop(along, inside, self.lanes, self.writer.fresh)
            blocks = block_loop(transposed.axis, block, step, self.lanes)
            return around(self.kernel, transposed.outer, blocks, extra=1)
        axis, first = transposed.axis, self.writer.fresh("first")
        of_run = block_loop(axis, block, inside, self.lanes, (first, "end"))
        vectors = [run_end(axis, run, first), *of_run]
        loop = run_loop(axis, run, first, shared_vector_loop(along, vectors, self.lanes, self.writer.fresh))
        return around(self.kernel, transposed.outer, loop, extra=2)
