"""Kernel IR to Triton: one function for a kernel, in one of the forms of tiles.py.

A row that is no more than a tile is read once. A longer one is passed over once per phase. Axes that a tile
dim joins are taken apart again by division.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, Store, canonical, expressions
from dicp.ir.phases import is_full, phases
from dicp.vendor.cuda_graph.accumulate import Accumulators
from dicp.vendor.cuda_graph.expression import (
    NO_DIMS,
    Dims,
    ExpressionWriter,
    Scope,
    host_text,
    narrowed,
    widened,
)
from dicp.vendor.cuda_graph.idioms import shortened
from dicp.vendor.cuda_graph.module import INDENT, WAIT, Source, kernel_text
from dicp.vendor.cuda_graph.tiles import Blocks, Tile, choose_blocks, choose_tile, has_tail, row_has_tail
from dicp.vendor.cuda_graph.vectors import Walk, narrowest

UPDATES = {"add": "{} + {}", "mul": "{} * {}", "max": "d.maximum({}, {})", "min": "d.minimum({}, {})"}
BOOL_UPDATES = {"add": "{} | {}", "mul": "{} & {}", "max": "{} | {}", "min": "{} & {}"}
UNROLLED = 8
"""Steps up to which a loop without masks may be unrolled as a whole, all of its loads under way at once. With
more they find no registers: the sum of 262,144 elements by 32 warps was spilled so, and read at 41 % of a
copy's bandwidth on an H200."""


def emit(
    kernel: Kernel, interpreted: bool = False, exact: bool = False, name: str | None = None
) -> Source:
    """A kernel as a Triton module; `exact`: each operation as eager rounds it; `name`: of its function.
    Raises nothing: every kernel IR construct has a form."""
    plain = replace(canonical(kernel), origins=kernel.origins)
    if not exact:
        plain = shortened(plain)
    name = name or f"{kernel.name}_{kernel.digest[:8]}"
    tile = choose_tile(plain, interpreted)
    blocks = choose_blocks(plain, tile, interpreted)
    writer = _KernelWriter(plain, name, tile, blocks)
    function = writer.function()
    source = Source(name, "", plain, tile, blocks, writer.checks)
    return replace(source, text=kernel_text(source, function))


class _KernelWriter:
    def __init__(self, kernel: Kernel, name: str, tile: Tile, blocks: Blocks) -> None:
        self.kernel, self.name, self.tile, self.blocks = kernel, name, tile, blocks
        self.order = ("y", "x") if tile.form == "plane" else ("x", "r") if tile.r else ("x",)
        dims: dict[Var, Dims] = {}
        for key, axes in (("x", tile.x), ("y", tile.y), ("r", tile.r)):
            dims |= {a.var: frozenset(key) for a in axes}
        if tile.begin is not None:  # what a place has of a row depends on where the row begins
            dims |= {a.var: frozenset("xr") for a in tile.r}
        live = {k: f"live_{k}" for k, axes, block in _outer(tile, blocks) if has_tail(axes, block)}
        if tile.r and row_has_tail(tile, blocks):
            live["r"] = "live_r"
        self.writer = ExpressionWriter(dims, self._shape, live)
        self.writer.storage = {p.name: p.dtype for p in kernel.params}
        if tile.begin is not None:
            self.writer.walk = Walk(tile.begin, tile.r[0], blocks.v, narrowest(kernel))
        self.accumulators = Accumulators(tile, self.writer, kernel.body)
        self.inner = frozenset(a.var for a in tile.r)
        self.checks = any(e.op in ex.CHECKS for s in kernel.body for e in expressions(s))
        self.scans = {r: s for s in kernel.body if isinstance(s, Scan) for r in s.refs}
        self.streamed: frozenset[str] = frozenset()  # buffers whose stores give way in the cache

    def _shape(self, dims: Dims) -> str:
        sizes = [k.upper() if k in dims else "1" for k in self.order]
        return f"[{', '.join(sizes)}]"

    def function(self) -> list[str]:
        args = [p.name for p in self.kernel.params] + [v.name for v in self.kernel.sizes]
        args += ["flags"] if self.checks else []
        constants = ["INDEX", "PDL", *(k.upper() for k in self.order)]
        constants += [] if self.tile.begin is None else ["V"]
        args += [f"{c}: tl.constexpr" for c in constants]
        body = self._positions()
        if self.tile.form == "rows":
            body += self._persistent() if self.tile.persistent else self._looped()
        else:
            body += self._pointwise()
        return ["@triton.jit", f"def {self.name}({', '.join(args)}):", *(INDENT + line for line in body)]

    # -- positions -------------------------------------------------------------------------------------------

    def _positions(self) -> list[str]:
        t = self.tile
        out = [WAIT, "program = tl.program_id(0).to(INDEX)"]
        if t.form == "plane":
            nx, ny = self._count(Tile.extent(t.x), "X"), self._count(Tile.extent(t.y), "Y")
            out += [
                f"x = program % {nx} * X + tl.arange(0, X)[None, :]",
                f"y = program // {nx} % {ny} * Y + tl.arange(0, Y)[:, None]",
            ]
            if t.single:
                out.append(f"z = program // ({nx} * {ny})")
            out += [*self._limit("x", t.x), *self._limit("y", t.y)]
            return [*out, *_apart("x", t.x), *_apart("y", t.y), *_apart("z", t.single)]
        lane = "tl.arange(0, X)[:, None]" if t.r else "tl.arange(0, X)"
        out.append(f"x = program * X + {lane}")
        out += [*self._limit("x", t.x), *_apart("x", t.x)]
        if t.r and t.persistent:
            out += ["r = tl.arange(0, R)[None, :].to(INDEX)", *self._r_positions()]
        return out

    def _count(self, extent: Index, block: str) -> str:
        return f"(({host_text(extent)} + {block} - 1) // {block})"

    def _limit(self, dim: str, axes: tuple[Axis, ...]) -> list[str]:
        """The mask of a tile dim, if it has one."""
        return [f"live_{dim} = {dim} < {host_text(Tile.extent(axes))}"] if dim in self.writer.live else []

    def _r_positions(self) -> list[str]:
        return [*self._limit("r", self.tile.r), *_apart("r", self.tile.r)]

    # -- stores ----------------------------------------------------------------------------------------------

    def _dims_of(self, s: Store) -> Dims:
        """The dims over which a store runs: those of its value and position, and all outer ones."""
        dims = (
            self.writer.dims(s.value)
            | self.writer.index_dims(s.index)
            | frozenset(k for k in self.order if k != "r")
        )
        return dims | frozenset("r") if self._is_full(s) and self.tile.r else dims

    def _is_full(self, s: Statement) -> bool:
        return is_full(s, self.inner | frozenset(self.scans), self.writer.dependence)

    def _stores(self, stores: list[Store], scope: Scope) -> None:
        """All values first, then all stores: a store may overwrite what a later value loads."""
        lines: list[str] = []
        for s in stores:
            dims = self._dims_of(s)
            value = self.writer.write(s.value, scope)
            if s.value.op == "const" or not self.writer.dims(s.value):
                value = self.writer.spread(value, NO_DIMS, dims)
            note = f"  # {s.note}" if s.note and s.value.op in ("const", "load", "index", "ref") else ""
            live, walk = self.writer.mask_text(dims), self.writer.walk
            there = [f"({self.writer.index(n, scope)} > 0)" for n in ix.may_be_empty(s.index)]
            live = " & ".join([live, *there] if live else there)
            if walk is not None and (at := walk.address(s.index)) is not None:
                kept = self._kept(s, value) + self._past_cache(s)
                first, *others = walk.store(f"{s.buffer} + ({at})", kept, live)
                lines += [first + note, *others]
                continue
            where = self.writer.pointer(s.buffer, s.index, scope, None, dims)
            lines += [line + note for line in self._store(s, where, value, live)]
        if any(self._waits_for_warps(s) for s in stores):
            scope.lines.append("tl.debug_barrier()  # every warp has read what is written over")
        scope.lines += lines

    def _waits_for_warps(self, s: Store) -> bool:
        """Whether it overwrites what each warp reads for its own part of a row."""
        if self.tile.form != "rows" or "r" in self._dims_of(s):
            return False
        return any(
            e.op == "load" and e.args[0] == s.buffer for t in self.kernel.body for e in expressions(t)
        )

    def _kept(self, s: Store, text: str) -> str:
        """A value as what its buffer keeps."""
        return narrowed(text, self.writer.storage[s.buffer])

    def _past_cache(self, s: Store) -> str:
        return ', cache_modifier=".cs"' if s.buffer in self.streamed else ""

    def _store(self, s: Store, where: str, value: str, live: str) -> list[str]:
        mask = f", mask={live}" if live else ""
        if s.mode == "set":
            return [f"tl.store({where}, {self._kept(s, value)}{mask}{self._past_cache(s)})"]
        if not s.unique and not self.tile.ordered:
            bits = 8 * self.writer.storage[s.buffer].itemsize
            if s.mode in ("max", "min") and self.writer.storage[s.buffer].is_floating_point:
                held = live or "tl.full([], True, tl.int1)"
                return [f"d.atomic_{s.mode}({where}, {value}, {held}, tl.int{bits}, tl.uint{bits})"]
            return [f'tl.atomic_{s.mode}({where}, {self._kept(s, value)}{mask}, sem="relaxed")']
        old = f"tl.load({where}{mask}{', other=0' if mask else ''})"
        old = widened(old, self.writer.storage[s.buffer])
        new = (BOOL_UPDATES if s.value.dtype == torch.bool else UPDATES)[s.mode]
        return [f"tl.store({where}, {self._kept(s, new.format(old, value))}{mask})"]

    def _pointwise(self) -> list[str]:
        scope = Scope()
        if not self.tile.serial:
            self._stores([s for s in self.kernel.body if isinstance(s, Store)], scope)
            return scope.lines
        inside = Scope(scope, provides=frozenset(a.var for a in self.tile.serial))
        self._stores([s for s in self.kernel.body if isinstance(s, Store)], inside)
        extent = host_text(Tile.extent(self.tile.serial))
        at = ["step = tl.full([], count, INDEX)", *_apart("step", self.tile.serial)]
        return [
            *scope.lines,
            f"for count in range(0, {extent}):",  # counts in 32 bits where the extent has so many
            *(INDENT + line for line in [*at, *inside.lines]),
        ]

    # -- rows in registers -----------------------------------------------------------------------------------

    def _persistent(self) -> list[str]:
        scope = Scope()
        stores: list[Store] = []
        for s in self.kernel.body:
            if isinstance(s, Store):
                self.writer.write(s.value, scope)
                stores.append(s)
            elif isinstance(s, Reduce):
                self.accumulators.reduce_row(s, scope)
            else:
                self.accumulators.scan_row(s, scope)
        self._stores(stores, scope)
        return scope.lines

    # -- rows in a loop --------------------------------------------------------------------------------------

    def _looped(self) -> list[str]:
        outer = Scope()
        if (walk := self.writer.walk) is not None:
            outer.lines += walk.positions(self.writer.index(walk.begin, outer))
        phase_of = phases(self.kernel, self._is_full, self.accumulators.found_beside)
        full = [(s, phase) for s, phase in zip(self.kernel.body, phase_of, strict=True) if self._is_full(s)]
        last = max((phase for _, phase in full), default=0)
        passes = [[s for s, mine in full if mine == phase] for phase in range(1 + last)]
        rows = [self._rows_read(mine) for mine in passes]
        for phase, mine in enumerate(passes):
            if mine:
                later, before = frozenset().union(*rows[phase + 1 :]), frozenset().union(*rows[:phase])
                again = dict.fromkeys(rows[phase] & before, "evict_first")
                self.writer.eviction = again | dict.fromkeys(rows[phase] & later, "evict_last")
                self.streamed = self._rows_written(mine) - frozenset().union(*rows) if again else frozenset()
                self._phase(mine, phase, outer)
        self.writer.eviction, self.streamed = {}, frozenset()
        self._stores([s for s in self.kernel.body if isinstance(s, Store) and not self._is_full(s)], outer)
        return outer.lines

    def _rows_read(self, statements: list[Statement]) -> frozenset[str]:
        """Buffers of which a pass with these statements reads whole rows."""
        loads = [e for s in statements for e in expressions(s) if e.op == "load"]
        return frozenset(e.args[0] for e in loads if "r" in self.writer.index_dims(e.args[1]))

    def _rows_written(self, statements: list[Statement]) -> frozenset[str]:
        stores = [s for s in statements if isinstance(s, Store)]
        return frozenset(s.buffer for s in stores if "r" in self.writer.index_dims(s.index))

    def _phase(self, mine: list[Statement], phase: int, outer: Scope) -> None:
        stores = [s for s in mine if isinstance(s, Store)]
        statements = self._with_scans(mine)
        live = self.writer.live
        for loop, whole in self._loops():
            if whole:
                self.writer.live = {k: v for k, v in live.items() if k != "r"}
            inside = Scope(outer, provides=self.inner | frozenset(self.scans))
            head = self._step_positions()
            for s in statements:
                if isinstance(s, Scan):
                    self.accumulators.scan_step(s, phase, inside, outer)
                elif isinstance(s, Reduce):
                    self.accumulators.add(s, inside, outer)
            self._stores(stores, inside)
            outer.lines += [loop[0], *(INDENT + line for line in [*loop[1:], *head, *inside.lines])]
            self.writer.live = live
        for s in mine:
            if isinstance(s, Reduce):
                self.accumulators.result(s, outer)

    def _loops(self) -> list[tuple[list[str], bool]]:
        """The loops over a row: their first lines, and whether all places of their tiles are elements. The
        steps at the ends of the row, where they are not, have a loop of their own, or one each where the
        order of steps matters."""
        extent, walk = Tile.extent(self.tile.r), self.writer.walk
        many = isinstance(extent, int) and UNROLLED * self.blocks.r < extent < 1 << 31
        if not isinstance(extent, int) or extent < self.blocks.r:
            return [([f"for start in range(0, {host_text(extent)}, R):"], "r" not in self.writer.live)]
        whole = f"{extent} // R * R"
        until = f"d.unknown({whole})" if many else whole
        if walk is not None:
            ranges = (f"R, {until}", "0, R", walk.rest)
            steps, first, rest = ([f"for start in range({t}, R):"] for t in ranges)
            if any(isinstance(s, Reduce) and s.kind.startswith("arg") for s in self.kernel.body):
                return [(first, False), (steps, True), (rest, False)]  # of equals, the first counts
            return [(steps, True), (walk.steps_at_ends, False)]
        loops = [([f"for start in range(0, {until}, R):"], True)]
        if "r" in self.writer.live:
            loops.append(([f"for start in range({whole}, {extent}, R):"], False))
        return loops

    def _step_positions(self) -> list[str]:
        if self.writer.walk is not None:
            return self.writer.walk.head(whole="r" not in self.writer.live)
        return ["r = start + tl.arange(0, R)[None, :].to(INDEX)", *self._r_positions()]

    def _with_scans(self, mine: list[Statement]) -> list[Statement]:
        """The statements of a pass, with the scans of earlier passes whose values it reads again."""
        wanted: dict[int, None] = {}

        def need(s: Statement) -> None:
            for e in expressions(s):
                if e.op == "ref" and e.args[0] in self.scans:
                    scan = self.scans[e.args[0]]
                    need(scan)
                    wanted[id(scan)] = None
            if isinstance(s, (Reduce, Scan)):
                wanted[id(s)] = None

        for s in mine:
            need(s)
        by_id = {id(s): s for s in self.kernel.body}
        return [by_id[k] for k in wanted]


def _outer(tile: Tile, blocks: Blocks) -> list[tuple[str, tuple[Axis, ...], int]]:
    """The dims of a tile but r: name, axes, elements."""
    return [("x", tile.x, blocks.x), *([("y", tile.y, blocks.y)] if tile.form == "plane" else [])]


def _apart(line: str, axes: tuple[Axis, ...]) -> list[str]:
    """Each axis' own position, from the position in all of them."""
    if not axes:
        return []
    index = ix.delinearize(ix.of(Var(line, Tile.extent(axes))), tuple(a.size or 1 for a in axes))
    return [f"{a.var} = {host_text(i)}" for a, i in zip(axes, index, strict=True)]


__all__ = ["emit"]
