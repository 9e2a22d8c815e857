"""Reductions and scans along rows: the passes over a row follow one another while it is in a cache.

Scans along the contiguous axis, and scatters that may collide along it, run as scalar loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, Store
from dicp.vendor.cpu_graph.accumulate import ROW_UNROLL
from dicp.vendor.cpu_graph.expression import SCALAR, STORAGE, Scope
from dicp.vendor.cpu_graph.idioms import EXPENSIVE
from dicp.vendor.cpu_graph.index_set_splitting import Range, split_rows
from dicp.vendor.cpu_graph.kernel_writer import KernelWriter
from dicp.vendor.cpu_graph.loops import Shape, around, block_loop, indent
from dicp.vendor.cpu_graph.transposed import Transposed, block_of_rows, find_transposed_rows

MAX_SCRATCH = 8192  # elements of a row kept on the stack between phases


class RowsWriter(KernelWriter):
    def __init__(self, kernel: Kernel, shape: Shape, lanes: int) -> None:
        super().__init__(kernel, shape, lanes)
        self.scratch: list[str] = []
        self.written: set[int] = set()  # results of whole rows that stand already

    def lines(self) -> list[str]:
        for axis in self.shape.outer:
            ranges = split_rows(self.kernel, axis)
            if len(ranges) > 1:
                return [line for r in ranges for line in self._range(axis, r)]
        return self._rows()

    def _range(self, axis: Axis, part: Range) -> list[str]:
        """The rows of a range of an outer axis."""
        outer = tuple(part.axis if a is axis else a for a in self.shape.outer)
        inner = RowsWriter(part.kernel, replace(self.shape, outer=outer), self.lanes).lines()
        return [f"// {part.axis.var} from {part.start}", "{", *indent(inner), "}"]

    def _rows(self) -> list[str]:
        outer = Scope()
        shared = self._kept_between_phases()
        transposed = find_transposed_rows(self.kernel, self.shape, self.lanes)
        plain = functools.partial(around, self.kernel, self.shape.outer)
        finish = plain if transposed is None else self._in_blocks(transposed)
        last = max(self.phases, default=0)
        for phase in range(last + 1):
            self._row_phase(phase, outer, shared)
        return finish([*self.scratch, *outer.lines])

    def _in_blocks(self, transposed: Transposed) -> Callable[[list[str]], list[str]]:
        """Has transposed operands read from the rows of a block, and transposed results stored to them; gives
        the loops around the lines of a row."""
        along, across, block = self.shape.inner[0], transposed.axis.var, self.writer.fresh("block")
        rows, before, after = [], [], []

        def keep(buffer: str) -> tuple[str, str]:
            """The name of a block of rows on the stack, and where in it the vector at hand is."""
            name = self.writer.fresh("transposed")
            rows.append(f"alignas(64) {STORAGE[self.writer.params[buffer]]} {name}[LANES * {along.size}];")
            return name, f"{name} + ({across} - {block}) * {along.size} + {along.var}"

        for e in transposed.loads:
            name, at = keep(e.args[0])
            there = block_of_rows(e.args[0], e.args[1], transposed, along, block)
            before.append(f"load_transposed({name}, {there}, {along.size}, columns);")
            self.writer.replaced[e] = lambda s, at=at: f"load({at}, lanes)"  # type: ignore[misc]
        for s in transposed.stores:
            name, self.kept[id(s)] = keep(s.buffer)
            there = block_of_rows(s.buffer, s.index, transposed, along, block)
            after.append(f"store_transposed({there}, {name}, {along.size}, columns);")
        head = f"for (int64_t {across} = {block}; {across} < {block} + columns; ++{across}) {{"

        def around_row(lines: list[str]) -> list[str]:
            inside = [*rows, *before, head, *indent(lines), "}", *after]
            blocks = block_loop(transposed.axis, block, inside, self.lanes)
            return around(self.kernel, transposed.outer, blocks, extra=1)

        return around_row

    def _row_phase(self, phase: int, outer: Scope, shared: dict[int, list[Expr]]) -> None:
        mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
        full = [s for s in mine if self.is_full(s)]
        lanes = "lanes" if self.vector_var is not None else None
        provides = self.inner_vars | self.scan_refs
        if full:
            inside = Scope(outer, lanes=lanes, provides=frozenset(provides))
            apart = self._runs_apart(full)
            for s in full:
                if isinstance(s, Reduce):
                    self.accumulators.add(s, inside, outer.lines, slot="[u]" if apart else "")
                elif isinstance(s, Scan):
                    self.accumulators.scan(s, inside, outer.lines)
            self.stores([s for s in full if isinstance(s, Store)], inside)
            self._keep(shared.get(phase, []), inside)
            outer.lines += self.inner_loops(inside.lines, apart)
            for s in full:
                if isinstance(s, Reduce):
                    self.accumulators.row_result(s, outer, apart)
        for k, s in enumerate(self.kernel.body):  # results that this phase completed
            if (
                isinstance(s, Store)
                and not self.is_full(s)
                and self.phases[k] <= phase + 1
                and k not in self.written
            ):
                self.written.add(k)
                self.stores([s], outer)

    def _runs_apart(self, full: list[Statement]) -> bool:
        """Whether a phase is nothing but sums and extremes along rows of whole vectors, several at a time."""
        along = self.shape.inner[-1].size
        if self.vector_var is None or not isinstance(along, int) or along % (ROW_UNROLL * self.lanes):
            return False
        return all(isinstance(s, Reduce) and self.accumulators.runs_apart(s) for s in full)

    def _kept_between_phases(self) -> dict[int, list[Expr]]:
        """Dear values needed in several phases, by the phase that computes them first: kept in a row on the
        stack."""
        inner = self.shape.inner
        if (
            self.vector_var is None
            or len(inner) != 1
            or not isinstance(inner[0].size, int)
            or inner[0].size > MAX_SCRATCH
        ):
            return {}
        first: dict[Expr, int] = {}
        again: dict[Expr, int] = {}
        for k, s in enumerate(self.kernel.body):
            if not self.is_full(s):
                continue
            for e in ex.walk(s.value):
                if e.op in ("const", "index", "ref") or not self.writer.dependence.of(e) & self.inner_vars:
                    continue
                if e not in first:
                    first[e] = self.phases[k]
                elif first[e] != self.phases[k]:
                    again[e] = first[e]
        dear = {e: p for e, p in again.items() if self._dear(e)}
        covered = {c for e, p in dear.items() for c in ex.walk(e) if c is not e and dear.get(c) == p}
        out: dict[int, list[Expr]] = {}
        for e, p in dear.items():
            if e not in covered:
                out.setdefault(p, []).append(e)
        return out

    def _dear(self, e: Expr) -> bool:
        nodes = ex.walk(e)
        return e.dtype != torch.bool and (
            any(n.op in EXPENSIVE for n in nodes) or sum(n.op == "load" for n in nodes) > 2
        )

    def _keep(self, values: list[Expr], scope: Scope) -> None:
        axis = self.shape.inner[0]
        for e in values:
            row = self.writer.fresh("row")
            name = self.writer.vector(e, scope)
            kind = SCALAR[e.dtype]
            self.scratch.append(f"alignas(64) {kind} {row}[{axis.size}];")
            scope.lines.append(f"store({row} + {axis.var.name}, {name}, lanes);")
            self.writer.replaced[e] = lambda s, row=row: f"load({row} + {axis.var.name}, lanes)"  # type: ignore[misc]
