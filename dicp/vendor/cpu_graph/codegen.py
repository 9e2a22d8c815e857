"""Kernel IR to C++: one function for a kernel, in one of the loop shapes of loops.py.

Scans along the contiguous axis, and scatters that may collide along it, run as scalar loops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, Store, canonical, expressions
from dicp.ir.phases import is_full, phases
from dicp.vendor.cpu_graph.accumulate import COLUMN_FLOATS, ROW_UNROLL, Accumulators
from dicp.vendor.cpu_graph.axis_splitting import split_axes
from dicp.vendor.cpu_graph.expression import SCALAR, STORAGE, VECTOR, ExpressionWriter, Scope
from dicp.vendor.cpu_graph.idioms import EXPENSIVE
from dicp.vendor.cpu_graph.index_set_splitting import split_ranges
from dicp.vendor.cpu_graph.interleaving import are_pairs, split_pairs
from dicp.vendor.cpu_graph.loops import (
    Shape,
    around,
    block_loop,
    choose_shape,
    few,
    for_line,
    indent,
    run_loop,
    runs,
    shared_vector_loop,
    unrolled,
    unrolled_vector_loop,
    vector_loop,
)
from dicp.vendor.cpu_graph.narrow import narrowed
from dicp.vendor.cpu_graph.transposed_loads import (
    TransposedLoads,
    TransposedRows,
    block_of_rows,
    find_transposed,
    find_transposed_rows,
    tiles,
)

Pending = tuple[Store, str, str, str]
"""A store, how it reaches its place and where that is (`ExpressionWriter.place`), and the value's name."""

MANY_BLOCKS, MANY_ROWS = 16, 64  # of several passes over columns, that threads share and caches lose
MAX_SCRATCH = 8192  # elements of a row kept on the stack between phases


def emit(kernel: Kernel, name: str, lanes: int) -> str:
    """One C++ function `name(buffers.., sizes.., [err])` for a kernel."""
    split = split_axes(split_pairs(kernel, lanes), lanes)
    return _KernelWriter(canonical_with_notes(split), name, lanes).function()


def canonical_with_notes(kernel: Kernel) -> Kernel:
    """Canonical names, with the origins kept for comments."""
    return replace(canonical(kernel), origins=kernel.origins)


def signature(kernel: Kernel, name: str) -> str:
    params = [f"{'' if p.written else 'const '}{STORAGE[p.dtype]}* {p.name}" for p in kernel.params]
    params += [f"int64_t {v.name}" for v in kernel.sizes]
    if has_checks(kernel):
        params.append("int32_t* err")
    return f"void {name}({', '.join(params)})"


def has_checks(kernel: Kernel) -> bool:
    return any(e.op in ex.CHECKS for s in kernel.body for e in expressions(s))


def _zeros(kernel: Kernel) -> list[str]:
    """The call that clears memory, of a kernel that does no more than that to one whole buffer."""
    if len(kernel.body) != 1 or len(kernel.axes) != 1:
        return []
    store, axis = kernel.body[0], kernel.axes[0]
    if not isinstance(store, Store) or store.mode != "set" or store.index != ix.of(axis.var):
        return []
    number = store.value.args[0] if store.value.op == "const" else None
    is_zero = isinstance(number, (bool, int, float)) and number == 0 and math.copysign(1, number) > 0
    return [f"zeros({store.buffer}, {axis.size});"] if is_zero else []


class _KernelWriter:
    def __init__(self, kernel: Kernel, name: str, lanes: int, shape: Shape | None = None) -> None:
        self.wide, self.name, self.lanes = kernel, name, lanes  # wide: with positions of 64 bits
        self.shape = shape or choose_shape(kernel, lanes)
        self.vector_var = self.shape.vector.var if self.shape.vector is not None else None
        self.kernel = narrowed(kernel, self.vector_var)
        self.writer = ExpressionWriter({p.name: p.dtype for p in kernel.params}, self.vector_var, lanes)
        self.inner_vars = frozenset(a.var for a in self.shape.inner)
        self.scan_refs = frozenset(r for s in kernel.body if isinstance(s, Scan) for r in s.refs)
        self.accumulators = Accumulators(self.shape, self.writer, lanes)
        self.phases = phases(self.kernel, self._is_full)
        self.scratch: list[str] = []
        self.written: set[int] = set()  # outer-level stores of a row kernel that stand already
        self.kept: dict[int, str] = {}  # where transposed stores, by their ids, go on the stack

    # -- the function --------------------------------------------------------------------------------------

    def function(self) -> str:
        shapes = {"pointwise": self._pointwise, "rows": self._rows, "columns": self._columns}
        body = _zeros(self.kernel) or shapes[self.shape.kind]()
        head = [f"// {o}" for o in self.kernel.origins]
        axes = (
            ", ".join(f"{a.var} < {a.size}{' (reduced)' if a.reduced else ''}" for a in self.kernel.axes)
            or "once"
        )
        head.append(f"// {self.shape.kind}: {axes}")
        return "\n".join([*head, f"{signature(self.kernel, self.name)} {{", *indent(body), "}"])

    def _is_full(self, s: Statement) -> bool:
        return is_full(s, self.inner_vars | self.scan_refs, self.writer.dependence)

    # -- pointwise -----------------------------------------------------------------------------------------

    def _pointwise(self) -> list[str]:
        along = self.shape.vector
        ranges = split_ranges(self.wide, along, self.lanes) if along is not None else []
        if len(ranges) < 2:
            return self._points()
        parts = [
            _KernelWriter(r.kernel, self.name, self.lanes, replace(self.shape, vector=r.axis)) for r in ranges
        ]
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
        self._stores(list(self.kernel.body), scope)
        return scope

    def _tiled(self, transposed: TransposedLoads) -> list[str]:
        along, across = self.shape.vector, transposed.axis.var
        assert along is not None
        block = self.writer.fresh("block")
        tile = Scope(lanes="lanes", provides=frozenset({along.var}))
        tiles(transposed, along, block, self.writer, tile)
        column = Scope(tile, lanes="lanes", provides=frozenset({across}))
        self._stores(list(self.kernel.body), column)
        head = f"for (int64_t {across} = {block}; {across} < {block} + columns; ++{across}) {{"
        step = vector_loop(
            along, [*tile.lines, head, *indent(column.lines), "}"], self.lanes, self.writer.fresh
        )
        blocks = block_loop(transposed.axis, block, step, self.lanes)
        return around(self.kernel, transposed.outer, blocks, extra=1)

    def _stores(self, stores: list[Statement], scope: Scope) -> None:
        """All values first, then all stores: a store may overwrite what a later value loads."""
        pending: list[Pending] = []
        for s in stores:
            assert isinstance(s, Store)
            how, where = self.writer.place(s.buffer, s.index, scope, None)
            copied = self._copied(s, scope) if how == "" else None
            value = copied or self.writer.write(s.value, scope)
            if how != "one" and not self.writer.is_vector(s.value):
                value = f"splat<{VECTOR[s.value.dtype]}>({value})"
            elif how == "one" and self.writer.is_vector(s.value):
                # an expanded result: every lane writes the same place
                value = f"last_lane({value}, {scope.lanes})"
            pending.append((s, how, where, value))
        for s, how, where, value in self._without_pairs(pending, scope):
            note = f"  // {s.note}" if s.note and s.value.op in ("const", "load", "index", "ref") else ""
            if id(s) in self.kept:
                scope.lines.append(f"store({self.kept[id(s)]}, {value}, {scope.lanes});{note}")
                continue
            there = [f"{self.writer.index(n, scope)} > 0" for n in ix.may_be_empty(s.index)]
            held = f"if ({' && '.join(there)}) " if there else ""
            scope.lines.append(held + self._store(s, how, where, value, scope) + note)

    def _without_pairs(self, pending: list[Pending], scope: Scope) -> list[Pending]:
        """Writes the stores that fill a buffer in turn; the others."""
        left: list[Pending] = []
        for s, how, where, value in pending:
            first = next((p for p in left if how == "_strided" and self._are_pairs(p[0], s)), None)
            if first is None:
                left.append((s, how, where, value))
                continue
            left.remove(first)
            there = self.writer.first(s.buffer, first[0].index, scope)
            scope.lines.append(f"store_pairs({there}, {first[3]}, {value}, {scope.lanes});")
        return left

    def _are_pairs(self, first: Store, second: Store) -> bool:
        kept = id(first) in self.kept or id(second) in self.kept
        return not kept and are_pairs(first, second, self.writer.vector_var, self.lanes)

    def _copied(self, s: Store, scope: Scope) -> str | None:
        """The bits of what is stored as it was loaded, in a narrow dtype: they need no conversion."""
        params, value = self.writer.params, s.value
        if s.mode != "set" or id(s) in self.kept or value.op != "load" or value in self.writer.replaced:
            return None
        if params[value.args[0]] != params[s.buffer] or params[s.buffer].itemsize >= 4:
            return None
        how, where = self.writer.place(value.args[0], value.args[1], scope, None)
        if how != "":
            return None
        name = self.writer.fresh("bits")
        scope.lines.append(f"const auto {name} = load_bits({where}, {scope.lanes});")
        return name

    def _store(self, s: Store, how: str, where: str, value: str, scope: Scope) -> str:
        if s.mode != "set":
            return self._update(s, how, where, value, scope)
        if how == "one":
            return f"store({where}, {value}, One{{}});"
        if how == "indexed":
            return f"scatter({where}, {value}, {scope.lanes});"
        return f"store{how}({where}, {value}, {scope.lanes});"

    def _update(self, s: Store, how: str, where: str, value: str, scope: Scope) -> str:
        word = {
            "add": "{0} + {1}",
            "mul": "{0} * {1}",
            "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }[s.mode]
        if s.value.dtype == torch.bool:
            word = {
                "add": "lor({0}, {1})",
                "mul": "land({0}, {1})",
                "max": "lor({0}, {1})",
                "min": "land({0}, {1})",
            }[s.mode]
        lanes = "One{}" if how == "one" else scope.lanes
        if how == "indexed":
            if s.mode == "add":
                return f"scatter_add({where}, {value}, {lanes});"
            return f"scatter({where}, {word.format(f'gather({where}, {lanes})', value)}, {lanes});"
        return (
            f"store{'' if how == 'one' else how}({where}, "
            f"{word.format(f'''load{'' if how == 'one' else how}({where}, {lanes})''', value)}, {lanes});"
        )

    # -- rows ----------------------------------------------------------------------------------------------

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

    def _in_blocks(self, transposed: TransposedRows) -> Callable[[list[str]], list[str]]:
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
        full = [s for s in mine if self._is_full(s)]
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
            self._stores([s for s in full if isinstance(s, Store)], inside)
            self._keep(shared.get(phase, []), inside)
            outer.lines += self._inner_loops(inside.lines, apart)
            for s in full:
                if isinstance(s, Reduce):
                    self.accumulators.row_result(s, outer, apart)
        for k, s in enumerate(self.kernel.body):  # results that this phase completed
            if (
                isinstance(s, Store)
                and not self._is_full(s)
                and self.phases[k] <= phase + 1
                and k not in self.written
            ):
                self.written.add(k)
                self._stores([s], outer)

    def _runs_apart(self, full: list[Statement]) -> bool:
        """Whether a phase is nothing but sums and extremes along rows of whole vectors, several at a time."""
        along = self.shape.inner[-1].size
        if self.vector_var is None or not isinstance(along, int) or along % (ROW_UNROLL * self.lanes):
            return False
        return all(isinstance(s, Reduce) and self.accumulators.runs_apart(s) for s in full)

    def _inner_loops(self, lines: list[str], apart: bool = False) -> list[str]:
        """The loops over the reduced (or serial) axes around one phase's body."""
        axes = list(self.shape.inner)
        if apart:
            lines = unrolled_vector_loop(axes.pop(), lines, ROW_UNROLL, self.writer.fresh)
        elif self.vector_var is not None and self.shape.kind == "rows":
            lines = vector_loop(axes.pop(), lines, self.lanes, self.writer.fresh)
        for a in reversed(axes):
            lines = [for_line(a), *indent(lines), "}"]
        return lines

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
            if not self._is_full(s):
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

    # -- columns -------------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        assert self.shape.vector is not None
        axis = self.shape.vector
        if all(isinstance(s, Store) and self._is_full(s) for s in self.kernel.body):
            return self._scattered_columns(axis)
        at_once = self._columns_at_once(axis)
        if at_once > 1:
            return self._wide_columns(axis, at_once)
        outer = Scope(lanes="lanes", provides=frozenset({axis.var}))
        for phase in range(max(self.phases, default=0) + 1):
            self._column_phase(phase, outer)
        loop = shared_vector_loop(axis, outer.lines, self.lanes, self.writer.fresh)
        return around(self.kernel, self.shape.outer, loop, extra=1)

    def _column_phase(self, phase: int, outer: Scope) -> None:
        mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
        full = [s for s in mine if self._is_full(s)]
        light = [s for s in mine if not self._is_full(s)]
        self._stores(light, outer)  # results of the phases before
        if not full:
            return
        inside = Scope(outer, lanes="lanes", provides=frozenset(self.inner_vars | self.scan_refs))
        for s in full:
            if isinstance(s, Reduce):
                self.accumulators.add(s, inside, outer.lines)
            elif isinstance(s, Scan):
                self.accumulators.scan(s, inside, outer.lines)
        self._stores([s for s in full if isinstance(s, Store)], inside)
        outer.lines += self._inner_loops(inside.lines)
        for s in full:
            if isinstance(s, Reduce):
                self.accumulators.column_result(s, outer)

    def _scattered_columns(self, axis: Axis) -> list[str]:
        """All columns of a run at each step of a scatter: neighbours share cache lines, and the next vector
        is another place in memory, so that no update waits for the store of the one before."""
        step = Scope(provides=self.inner_vars)
        inside = Scope(step, lanes="lanes", provides=frozenset({axis.var}))
        self._stores(list(self.kernel.body), inside)
        run = runs(self.shape.outer, axis, self.lanes)
        block = self.writer.fresh("block")
        bounds = None if run is None else (block, "end")
        vectors = vector_loop(axis, inside.lines, self.lanes, self.writer.fresh, bounds)
        loops = self._inner_loops([*step.lines, *vectors])
        if run is None:
            return around(self.kernel, self.shape.outer, loops)
        return around(self.kernel, self.shape.outer, run_loop(axis, run, block, loops), extra=1)

    def _columns_at_once(self, axis: Axis) -> int:
        """Vectors of results to compute at a time, so that each row gives up whole neighbouring cache lines:
        what remains of a line, and of a page's translation, is gone when the next vector comes."""
        body, inner = self.kernel.body, self.shape.inner
        reduces = [k for k, s in enumerate(body) if isinstance(s, Reduce)]
        size = axis.size
        if not isinstance(size, int) or not reduces or any(isinstance(s, Scan) for s in body):
            return 1
        widths = [n // self.lanes for n in COLUMN_FLOATS if n > self.lanes and size % n == 0]
        once = all(isinstance(s, Reduce) or not self._is_full(s) for s in body) and max(self.phases) <= 1
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
            full = [s for s in mine if self._is_full(s)]
            each = Scope(lanes="lanes", provides=frozenset({axis.var}))
            self._stores([s for s in mine if not self._is_full(s)], each)  # results of the phases before
            for e in self._of_columns(full):
                name, value = self.writer.fresh("column"), self.writer.vector(e, each)
                body.append(f"{VECTOR[e.dtype]} {name}[{at_once}];")
                each.lines.append(f"{name}[u] = {value};")
                self.writer.replaced[e] = lambda s, name=name: f"{name}[u]"  # type: ignore[misc]
            body += self._each_vector(axis, each.lines)
            inside = Scope(lanes="lanes", provides=frozenset({axis.var}) | self.inner_vars)
            reduces = [s for s in full if isinstance(s, Reduce)]
            for s in reduces:
                self.accumulators.add(s, inside, body, slot="[u]")
            self._stores([s for s in full if isinstance(s, Store)], inside)
            if full:
                body += self._inner_loops(self._each_vector(axis, inside.lines))
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
