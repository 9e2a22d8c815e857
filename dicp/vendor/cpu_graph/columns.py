"""Reductions, scans and scatters down columns: neighbouring columns are the lanes of a vector, rows follow
one another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.kernel import Axis, Reduce, Scan, Statement, Store
from dicp.vendor.cpu_graph.accumulate import COLUMN_FLOATS
from dicp.vendor.cpu_graph.expression import VECTOR, Scope
from dicp.vendor.cpu_graph.kernel_writer import KernelWriter
from dicp.vendor.cpu_graph.loops import (
    around,
    block_loop,
    indent,
    nested,
    run_end,
    run_loop,
    runs,
    shared_vector_loop,
    unrolled,
    vector_loop,
)
from dicp.vendor.cpu_graph.transposed import find_turned, tile

MANY_BLOCKS, MANY_ROWS = 16, 64  # of several passes over columns, that threads share and caches lose


class ColumnsWriter(KernelWriter):
    def lines(self) -> list[str]:
        assert self.shape.vector is not None
        axis = self.shape.vector
        if all(isinstance(s, Store) and self.is_full(s) for s in self.kernel.body):
            return self._scattered_columns(axis)
        at_once = self._columns_at_once(axis)
        if at_once > 1:
            return self._wide_columns(axis, at_once)
        outer = Scope(lanes="lanes", provides=frozenset({axis.var}))
        for phase in range(max(self.phases, default=0) + 1):
            self._column_phase(phase, axis, outer)
        loop = shared_vector_loop(axis, outer.lines, self.lanes, self.writer.fresh)
        return around(self.kernel, self.shape.outer, loop, extra=1)

    def _column_phase(self, phase: int, axis: Axis, outer: Scope) -> None:
        mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
        full = [s for s in mine if self.is_full(s)]
        light = [s for s in mine if not self.is_full(s)]
        self.stores(light, outer)  # results of the phases before
        if not full:
            return
        inside = Scope(outer, lanes="lanes", provides=frozenset(self.inner_vars | self.scan_refs))
        around_rows = self._around_rows(axis, full)
        for s in full:
            if isinstance(s, Reduce):
                self.accumulators.add(s, inside, outer.lines)
            elif isinstance(s, Scan):
                self.accumulators.scan(s, inside, outer.lines)
        self.stores([s for s in full if isinstance(s, Store)], inside)
        outer.lines += around_rows(inside.lines)
        for s in full:
            if isinstance(s, Reduce):
                self.accumulators.column_result(s, outer)

    def _scattered_columns(self, axis: Axis) -> list[str]:
        """All columns of a run at each step of a scatter: neighbours share cache lines, and the next vector
        is another place in memory, so that no update waits for the store of the one before."""
        step = Scope(provides=self.inner_vars)
        inside = Scope(step, lanes="lanes", provides=frozenset({axis.var}))
        self.stores(list(self.kernel.body), inside)
        run = runs(self.shape.outer, axis, self.lanes)
        block = self.writer.fresh("block")
        bounds = None if run is None else (block, "end")
        vectors = vector_loop(axis, inside.lines, self.lanes, self.writer.fresh, bounds)
        loops = self.inner_loops([*step.lines, *vectors])
        if run is None:
            return around(self.kernel, self.shape.outer, loops)
        lines = [run_end(axis, run, block), *loops]
        return around(self.kernel, self.shape.outer, run_loop(axis, run, block, lines), extra=1)

    def _columns_at_once(self, axis: Axis) -> int:
        """Vectors of results to compute at a time, so that each row gives up whole neighbouring cache lines:
        what remains of a line, and of a page's translation, is gone when the next vector comes."""
        body, inner = self.kernel.body, self.shape.inner
        reduces = [k for k, s in enumerate(body) if isinstance(s, Reduce)]
        size = axis.size
        if not isinstance(size, int) or not reduces or any(isinstance(s, Scan) for s in body):
            return 1
        widths = [n // self.lanes for n in COLUMN_FLOATS if n > self.lanes and size % n == 0]
        once = all(isinstance(s, Reduce) or not self.is_full(s) for s in body) and max(self.phases) <= 1
        if once and max(self.phases[k] for k in reduces) == 0:
            return max(widths, default=1)
        rows, outer = (ix.product(a.size for a in axes) for axes in (inner, self.shape.outer))
        if isinstance(rows, int) and rows < MANY_ROWS:
            return 1
        if isinstance(outer, int):
            widths = [w for w in widths if outer * size >= MANY_BLOCKS * w * self.lanes]
        return max(widths, default=1)

    def _wide_columns(self, axis: Axis, at_once: int) -> list[str]:
        """One pass over the rows after the other, each for all vectors of a block of columns; what is known
        of columns is in arrays of `at_once` vectors."""
        self.accumulators.at_once = at_once
        body = ["constexpr Full lanes;"]
        for phase in range(max(self.phases, default=0) + 1):
            mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
            full = [s for s in mine if self.is_full(s)]
            each = Scope(lanes="lanes", provides=frozenset({axis.var}))
            self.stores([s for s in mine if not self.is_full(s)], each)  # results of the phases before
            for e in self._of_columns(full):
                name, value = self.writer.fresh("column"), self.writer.vector(e, each)
                body.append(f"{VECTOR[e.dtype]} {name}[{at_once}];")
                each.lines.append(f"{name}[u] = {value};")
                self.writer.replaced[e] = lambda s, name=name: f"{name}[u]"  # type: ignore[misc]
            body += self._each_vector(axis, each.lines)
            inside = Scope(lanes="lanes", provides=frozenset({axis.var}) | self.inner_vars)
            around_rows = self._around_rows(axis, full)
            reduces = [s for s in full if isinstance(s, Reduce)]
            for s in reduces:
                self.accumulators.add(s, inside, body, slot="[u]")
            self.stores([s for s in full if isinstance(s, Store)], inside)
            if full:
                body += around_rows(self._each_vector(axis, inside.lines))
            done = Scope(lanes="lanes", provides=frozenset({axis.var}))
            for s in reduces:
                self.accumulators.column_result(s, done, "[u]", body)
            body += self._each_vector(axis, done.lines)
        block = [
            f"for (int64_t block = 0; block < {axis.size}; block += {at_once} * LANES) {{",
            *indent(body),
            "}",
        ]
        return around(self.kernel, self.shape.outer, block, extra=1)

    def _around_rows(self, axis: Axis, full: list[Statement]) -> Callable[[list[str]], list[str]]:
        """Gives the loops around the lines of a row. Operands that lie along the rows are read in tiles."""
        *others, rows = self.shape.inner
        written = {s.buffer for s in self.kernel.body if isinstance(s, Store)}
        turned = find_turned(full, written, axis, rows, self.lanes)
        if not turned or any(isinstance(s, Scan) for s in full):
            return self.inner_loops
        block, row, vectors = self.writer.fresh("rows"), rows.var.name, self.accumulators.at_once
        made = [tile(e, rows, axis, block, self.writer, vectors) for e in turned]
        declared, loads = zip(*made, strict=True)
        loaded = list(loads) if vectors == 1 else self._each_vector(axis, list(loads))
        head = f"for (int64_t {row} = {block}; {row} < {block} + columns; ++{row}) {{"

        def loops(lines: list[str]) -> list[str]:
            inside = [*declared, *loaded, head, *indent(lines), "}"]
            return nested(tuple(others), block_loop(rows, block, inside, self.lanes))

        return loops

    def _of_columns(self, full: list[Statement]) -> list[Expr]:
        """What a phase computes of a column's results alone: once, rather than in every row."""
        found: dict[Expr, None] = {}
        pending = [s.value for s in full]
        while pending:
            e = pending.pop()
            if e.op in ("masked", "load", "ref", "const", "index") or e in self.writer.replaced:
                continue
            if self.writer.dependence.of(e) & self.inner_vars or e.dtype == torch.bool:
                pending += ex.children(e)
            else:
                found[e] = None
        return list(found)

    def _each_vector(self, axis: Axis, lines: list[str]) -> list[str]:
        return unrolled(axis, lines, "block", self.accumulators.at_once) if lines else []
