"""Kernel IR to Triton.

Every kernel works on tiles, of one of three forms:
    line     [X]       pointwise: all axes as one line
    plane    [Y, X]    pointwise where operands are contiguous along different axes (transpositions)
    rows     [X, R]    reductions and scans: x runs over the results, r over what is reduced
Rows that fit one tile are read once and stay in registers (persistent); longer ones are passed over once
per phase, a
statement belonging to the first phase in which all it reads is known. Axes that a tile dim joins are taken
apart again
by division. Scatters whose targets may coincide use atomics; where there is no atomic, or for a product,
one program
walks the axes in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Scan, Statement, Store, canonical
from dicp.vendor.cuda_graph.expression import (
    NO_DIMS,
    TYPES,
    Dims,
    ExpressionWriter,
    Scope,
    cast_text,
    host_text,
    literal,
    typed,
)

PERSISTENT = 16384  # elements of a row kept in registers
PERSISTENT_COLUMN = 64  # the same where neighbouring results, not neighbours in the row, are contiguous
LOOP_ROW = 2048  # elements of a row that one step of a loop takes
PLANE_SIDE = 16  # a transposition pays from this many elements along both axes
ATOMIC = {
    "add": (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    "max": (torch.float32, torch.float64, torch.int32, torch.int64),
    "min": (torch.float32, torch.float64, torch.int32, torch.int64),
}
INDENT = "    "


@dataclass(frozen=True)
class Tile:
    """The form of a kernel's tiles: which axes each dim joins (outermost first), and which run one at a time.

    `contiguous`: whether the reduced axis is the contiguous one. `persistent`: whether a row is one tile.
    """

    form: str
    x: tuple[Axis, ...]
    y: tuple[Axis, ...] = ()
    r: tuple[Axis, ...] = ()
    single: tuple[Axis, ...] = ()  # a program has one position of these
    serial: tuple[Axis, ...] = ()  # a program walks these in order
    persistent: bool = True
    contiguous: bool = True
    ordered: bool = False  # scatters run one by one (also where they are one)

    @staticmethod
    def extent(axes: tuple[Axis, ...]) -> Index:
        return ix.product(a.size for a in axes)


@dataclass(frozen=True)
class Blocks:
    """Tile sizes (powers of two; y and r are 1 where the form has no such dim) and warps of a launch."""

    x: int
    y: int = 1
    r: int = 1
    warps: int = 4


@dataclass(frozen=True)
class Source:
    """An emitted kernel: the module's text, the function in it, and what a launch needs to know."""

    name: str
    text: str
    kernel: Kernel
    tile: Tile
    blocks: Blocks
    checks: bool

    stages = None  # of a software pipeline: Triton's own choice

    @property
    def params(self) -> tuple[Param, ...]:
        return self.kernel.params

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.kernel.sizes)

    @property
    def constants(self) -> dict[str, int]:
        """Tile sizes by the names they have in the text."""
        b = self.blocks
        plane = {"Y": b.y} if self.tile.form == "plane" else {}
        return {"X": b.x} | plane | ({"R": b.r} if self.tile.r else {})

    @property
    def warps(self) -> int:
        return self.blocks.warps

    @property
    def grid(self) -> str:
        """Programs of a launch, as Python text over the sizes."""
        return programs_text(self)

    @property
    def origins(self) -> tuple[str, ...]:
        return self.kernel.origins


def emit(kernel: Kernel, interpreted: bool = False) -> Source:
    """A kernel as a Triton module. Raises nothing: every kernel IR construct has a form."""
    plain = replace(canonical(kernel), origins=kernel.origins)
    name = f"{kernel.name}_{kernel.digest[:8]}"
    tile = choose_tile(plain, interpreted)
    writer = _KernelWriter(plain, name, tile)
    function = writer.function()
    blocks = choose_blocks(plain, tile, interpreted)
    source = Source(name, "", plain, tile, blocks, writer.checks)
    return replace(source, text=_module(source, function))


# -- tiles ---------------------------------------------------------------------------------------------------


def _accesses(kernel: Kernel) -> tuple[list[Index], list[Index]]:
    """(positions loaded, positions stored)"""
    loads = [e.args[1] for s in kernel.body for e in _exprs(s) if e.op == "load"]
    return list(dict.fromkeys(loads)), list(
        dict.fromkeys(s.index for s in kernel.body if isinstance(s, Store))
    )


def _exprs(s: Statement) -> list[Expr]:
    roots = [s.value]
    if isinstance(s, Store):
        roots += [a.payload for a in ix.atoms(s.index) if isinstance(a, ix.Opaque)]
    return ex.walk(*roots)


def _unit(i: Index, a: Axis) -> bool:
    """Whether neighbours along the axis are neighbours in memory."""
    split = ix.coefficient(i, a.var)
    return split is not None and split[0] == 1


def _walks(i: Index, a: Axis) -> bool:
    return ix.depends(i, a.var) and not _unit(i, a)


def needs_order(kernel: Kernel, interpreted: bool = False) -> bool:
    """Whether a scatter has to run its serial axes one by one: no atomic does what it does."""
    dtypes = {p.name: p.dtype for p in kernel.params}
    for s in kernel.body:
        if isinstance(s, Store) and not s.unique and s.mode != "set":
            dtype = dtypes[s.buffer]
            # the interpreter has no atomics on 16-bit floats
            if dtype not in ATOMIC.get(s.mode, ()) or (interpreted and dtype in ex.LOW_PRECISION):
                return True
    return False


def choose_tile(kernel: Kernel, interpreted: bool = False) -> Tile:
    inner, outer = kernel.inner, kernel.outer
    loads, stores = _accesses(kernel)
    if inner:
        extent = Tile.extent(inner)
        by_row = sum(_unit(i, inner[-1]) for i in loads + stores)
        by_column = (
            sum(_unit(i, outer[-1]) for i in loads if any(ix.depends(i, a.var) for a in inner))
            if outer
            else 0
        )
        contiguous = by_row >= by_column or by_column == 0
        limit = PERSISTENT if contiguous else PERSISTENT_COLUMN
        return Tile(
            "rows",
            outer,
            r=inner,
            persistent=isinstance(extent, int) and extent <= limit,
            contiguous=contiguous,
        )
    if needs_order(kernel, interpreted):
        free, serial = (tuple(a for a in outer if a.serial == s) for s in (False, True))
        return Tile("line", free, serial=serial, ordered=True)
    if len(outer) >= 2 and not any(a.serial for a in outer):
        near = outer[-1]
        far = [a for a in outer[:-1] if any(_unit(i, a) and _walks(i, near) for i in loads + stores)]
        if far and all(not isinstance(a.size, int) or a.size >= PLANE_SIDE for a in (near, far[-1])):
            return Tile("plane", (near,), (far[-1],), single=tuple(a for a in outer[:-1] if a is not far[-1]))
    return Tile("line", outer)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def choose_blocks(kernel: Kernel, tile: Tile, interpreted: bool = False) -> Blocks:
    """Tile sizes that fill the chip and keep a tile in registers; interpreted, few and large tiles."""
    x = Tile.extent(tile.x)
    x = x if isinstance(x, int) else 1 << 16
    if interpreted:
        return _interpreted_blocks(tile, x)
    wide = max((p.dtype.itemsize for p in kernel.params), default=4)
    if tile.form == "plane":
        side = 32 if wide >= 4 else 64
        return Blocks(side, side, warps=4 if side == 32 else 8)
    if tile.form == "line":
        size = 1024 if wide <= 4 else 512
        while size > 128 and x // size < 264:  # two programs for each of 132 multiprocessors
            size //= 2
        return Blocks(min(size, _power_of_two(x)), warps=4 if size >= 512 else 2 if size >= 256 else 1)
    extent = Tile.extent(tile.r)
    r = _power_of_two(extent) if tile.persistent and isinstance(extent, int) else LOOP_ROW
    if tile.contiguous:
        rows = max(1, min(2048 // r, 32, _power_of_two(max(1, x // 264))))
        return Blocks(rows, r=r, warps=max(1, min(16, rows * r // 256)))
    columns = max(8, min(64, _power_of_two(max(1, x // 132)), _power_of_two(x)))
    r = r if tile.persistent else 4096 // columns
    return Blocks(columns, r=r, warps=max(1, min(8, columns * r // 256)))


def _interpreted_blocks(tile: Tile, x: int) -> Blocks:
    """About three programs, the last one with a tail."""
    part = _power_of_two(max(1, -(-x // 3)))
    if tile.form == "line":
        return Blocks(min(part, 1 << 16))
    if tile.form == "plane":
        y = Tile.extent(tile.y)
        return Blocks(min(part, 256), min(256, _power_of_two(-(-y // 2)) if isinstance(y, int) else 64))
    extent = Tile.extent(tile.r)
    r = _power_of_two(extent) if tile.persistent and isinstance(extent, int) else 512
    return Blocks(max(1, min(part, (1 << 18) // r)), r=r)


# -- the module ----------------------------------------------------------------------------------------------


def _module(source: Source, function: list[str]) -> str:
    kernel, t = source.kernel, source.tile
    axes = ", ".join(f"{a.var} < {a.size}" + (" reduced" if a.reduced else "") for a in kernel.axes) or "once"
    head = [
        '"""' + source.name,
        "",
        *(f"    {o}" for o in kernel.origins),
        "",
        f"{t.form}{'' if t.persistent else ', looped'}: {axes}",
        '"""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from dicp.vendor.cuda_graph import device as d",
        "",
        "",
    ]
    alone = example_lines(source.name, example(source), source.sizes)
    return "\n".join([*head, *function, "", "", *alone, ""])


def example_lines(name: str, example: dict[str, object], sizes: Sequence[str]) -> list[str]:
    """The end of a module: runs its kernel alone, on random inputs."""
    return [
        'if __name__ == "__main__":',
        INDENT + "from dicp.vendor.cuda_graph.launch import try_alone",
        "",
        INDENT + f"try_alone({name}, {example!r})" + (f"  # sizes: {', '.join(sizes)}" if sizes else ""),
    ]


def example(source: Source) -> dict[str, object]:
    """What the module needs alone: buffers as (dtype, elements, written), sizes, grid and constants."""
    kernel = source.kernel
    sizes = dict.fromkeys(kernel.sizes, 64)

    def number(i: Index) -> int:
        return int(ix.evaluate(i, lambda a: sizes.get(a, 1)))  # type: ignore[call-overload]

    reach: dict[str, int] = {p.name: 1 for p in kernel.params}
    for s in kernel.body:
        spots = [(e.args[0], e.args[1]) for e in _exprs(s) if e.op == "load"]
        for name, i in [*spots, *([(s.buffer, s.index)] if isinstance(s, Store) else [])]:
            top = ix._limit(i, upper=True)
            reach[name] = max(reach[name], number(top) + 1 if top is not None else 1)
    return {
        "buffers": [(str(p.dtype).removeprefix("torch."), reach[p.name], p.written) for p in kernel.params],
        "sizes": [64] * len(kernel.sizes),
        "flags": source.checks,
        "programs": programs(source, lambda i: number(i)),
        "constants": source.constants,
        "warps": source.warps,
    }


def programs(source: Source, number) -> int:  # type: ignore[no-untyped-def]
    """Programs of a launch; `number` evaluates an index over sizes."""
    t, b = source.tile, source.blocks
    count = -(-number(Tile.extent(t.x)) // b.x) * -(-number(Tile.extent(t.y)) // b.y)
    return int(count * number(Tile.extent(t.single)))


def programs_text(source: Source) -> str:
    """The same as Python text over the kernel's size names."""
    t, b = source.tile, source.blocks
    parts = []
    for axes, block in ((t.x, b.x), (t.y, b.y), (t.single, 1)):
        extent = Tile.extent(axes)
        if isinstance(extent, int):
            parts.append(str(-(-extent // block)))
        else:
            parts.append(f"-(-({host_text(extent)}) // {block})")
    return " * ".join(p for p in parts if p != "1") or "1"


# -- the function --------------------------------------------------------------------------------------------


class _KernelWriter:
    def __init__(self, kernel: Kernel, name: str, tile: Tile) -> None:
        self.kernel, self.name, self.tile = kernel, name, tile
        self.order = ("y", "x") if tile.form == "plane" else ("x", "r") if tile.r else ("x",)
        dims: dict[Var, Dims] = {}
        for key, axes in (("x", tile.x), ("y", tile.y), ("r", tile.r)):
            dims |= {a.var: frozenset(key) for a in axes}
        live = {"x": "live_x"} | ({"y": "live_y"} if tile.form == "plane" else {})
        extent = Tile.extent(tile.r)
        if tile.r and not (
            isinstance(extent, int)
            and (extent & (extent - 1) == 0 and extent > 0)
            and (tile.persistent or extent % LOOP_ROW == 0)
        ):
            live["r"] = "live_r"
        self.writer = ExpressionWriter(dims, self._shape, live)
        self.writer.storage = {p.name: p.dtype for p in kernel.params}
        self.inner = frozenset(a.var for a in tile.r)
        self.checks = any(e.op in ex.CHECKS for s in kernel.body for e in _exprs(s))
        self.scans = {r: s for s in kernel.body if isinstance(s, Scan) for r in s.refs}

    def _shape(self, dims: Dims) -> str:
        sizes = [k.upper() if k in dims else "1" for k in self.order]
        return f"[{', '.join(sizes)}]"

    def function(self) -> list[str]:
        args = [p.name for p in self.kernel.params] + [v.name for v in self.kernel.sizes]
        args += ["flags"] if self.checks else []
        constants = ["INDEX", *(k.upper() for k in self.order)]
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
        out = ["program = tl.program_id(0).to(INDEX)"]
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
        return [f"live_{dim} = {dim} < {host_text(Tile.extent(axes))}"]

    def _r_positions(self) -> list[str]:
        return [
            *(self._limit("r", self.tile.r) if "r" in self.writer.live else []),
            *_apart("r", self.tile.r),
        ]

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
        if not isinstance(s, Store):
            return True
        needs = self.writer.needs(s.value) | self.writer.index_needs(s.index)
        return bool(needs & (self.inner | frozenset(self.scans))) or s.mode != "set"

    def _stores(self, stores: list[Store], scope: Scope) -> None:
        """All values first, then all stores: a store may overwrite what a later value loads."""
        lines: list[str] = []
        for s in stores:
            dims = self._dims_of(s)
            value = self.writer.write(s.value, scope)
            if s.value.op == "const" or not self.writer.dims(s.value):
                value = self.writer.spread(value, NO_DIMS, dims)
            where = self.writer.pointer(s.buffer, s.index, scope, None, dims)
            note = f"  # {s.note}" if s.note and s.value.op in ("const", "load", "index", "ref") else ""
            lines += [line + note for line in self._store(s, where, value, self.writer.mask_text(dims))]
        scope.lines += lines

    def _store(self, s: Store, where: str, value: str, live: str) -> list[str]:
        dtype = self.writer.storage[s.buffer]
        low = dtype in ex.LOW_PRECISION

        def kept(text: str) -> str:
            return f"d.narrow({text}, {TYPES[dtype]})" if low else text

        mask = f", mask={live}" if live else ""
        if s.mode == "set":
            return [f"tl.store({where}, {kept(value)}{mask})"]
        if not s.unique and not self.tile.ordered:
            return [f'tl.atomic_{s.mode}({where}, {kept(value)}{mask}, sem="relaxed")']
        kind = s.value.dtype
        old = f"tl.load({where}{mask}{', other=0' if mask else ''})"
        old = f"d.widen({old})" if low else old
        new = {"add": "{} + {}", "mul": "{} * {}", "max": "d.maximum({}, {})", "min": "d.minimum({}, {})"}[
            s.mode
        ]
        if kind == torch.bool:
            new = {"add": "{} | {}", "mul": "{} & {}", "max": "{} | {}", "min": "{} & {}"}[s.mode]
        return [f"tl.store({where}, {kept(new.format(old, value))}{mask})"]

    def _pointwise(self) -> list[str]:
        scope = Scope()
        if not self.tile.serial:
            self._stores([s for s in self.kernel.body if isinstance(s, Store)], scope)
            return scope.lines
        inside = Scope(scope, provides=frozenset(a.var for a in self.tile.serial))
        self._stores([s for s in self.kernel.body if isinstance(s, Store)], inside)
        extent = host_text(Tile.extent(self.tile.serial))
        return [
            *scope.lines,
            f"for step in range(0, {extent}):",
            *(INDENT + line for line in [*_apart("step", self.tile.serial), *inside.lines]),
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
                self._reduce_row(s, scope)
            else:
                self._scan_row(s, scope)
        self._stores(stores, scope)
        return scope.lines

    def _tile_value(self, s: Reduce | Scan, scope: Scope) -> tuple[str, torch.dtype]:
        """The value over the whole tile, and its dtype: bools count as int32."""
        text, dtype = self.writer.full(s.value, scope, frozenset("xr")), s.value.dtype
        if dtype == torch.bool or s.kind in ("any", "all"):
            text = text if dtype == torch.bool else f"({text} != 0)"
            text, dtype = f"{text}.to(tl.int32)", torch.int32
        return text, dtype

    def _where_live(self, text: str, other: str, scope: Scope) -> str:
        if "r" not in self.writer.live:
            return text
        name = self.writer.fresh("t")
        scope.lines.append(f"{name} = tl.where(live_r, {text}, {other})")
        return name

    def _reduce_row(self, s: Reduce, scope: Scope) -> None:
        value, dtype = self._tile_value(s, scope)
        kind = _kind(s)
        if kind == "welford":
            count = literal(1, dtype) if self.tile.r == () else host_text(Tile.extent(self.tile.r))
            kept = self._where_live(value, literal(0.0, dtype), scope)
            mean = self._name(s, 0, f"d.div(d.row_sum({kept}), tl.full([], {count}, {TYPES[dtype]}))", scope)
            away = self.writer.fresh("t")
            scope.lines.append(f"{away} = {value} - {mean}")
            away = self._where_live(away, literal(0.0, dtype), scope)
            self._name(s, 1, f"d.row_sum({away} * {away})", scope)
            return
        kept = self._where_live(value, literal(_identity(s, kind, dtype), dtype), scope)
        if kind.startswith("arg"):
            position = f"tl.broadcast_to(r.to(tl.int64), {self._shape(frozenset('xr'))})"
            self._name(s, 0, f"d.row_{kind}({kept}, {position})", scope)
            return
        self._finish(s, f"d.row_{kind}({kept})", scope)

    def _finish(self, s: Reduce | Scan, text: str, scope: Scope) -> None:
        """Name a result; one of a bool reduction becomes bool again."""
        boolean = s.value.dtype == torch.bool or s.kind in ("any", "all")
        self._name(s, 0, f"{text} != 0" if boolean else text, scope)

    def _name(self, s: Reduce | Scan, k: int, text: str, scope: Scope) -> str:
        ref = s.refs[k]
        scope.lines.append(f"{ref} = {text}" + (f"  # {s.note}" if s.note else ""))
        self.writer.refs[ref] = ref
        self.writer.ref_dims[ref] = frozenset("xr" if isinstance(s, Scan) else "x")
        return ref

    def _scan_row(self, s: Scan, scope: Scope) -> None:
        value, dtype = self._tile_value(s, scope)
        kind = _kind(s)
        kept = self._where_live(value, literal(_identity(s, kind, dtype), dtype), scope)
        if kind.startswith("arg"):
            position = f"tl.broadcast_to(r.to(tl.int64), {self._shape(frozenset('xr'))})"
            scope.lines.append(f"{s.refs[0]}, {s.refs[1]} = d.scan_{kind}({kept}, {position})")
            for ref in s.refs:
                self.writer.refs[ref], self.writer.ref_dims[ref] = ref, frozenset("xr")
            return
        self._finish(s, f"d.scan_{kind}({kept})", scope)

    # -- rows in a loop --------------------------------------------------------------------------------------

    def _looped(self) -> list[str]:
        outer = Scope()
        phases, body = self._phases(), list(self.kernel.body)
        last = max(phases.values(), default=0)
        for phase in range(last + 1):
            mine = [s for k, s in enumerate(body) if phases.get(k) == phase]
            if mine:
                self._phase(mine, phase, outer)
        light = [s for k, s in enumerate(body) if k not in phases and isinstance(s, Store)]
        self._stores(light, outer)
        return outer.lines

    def _phases(self) -> dict[int, int]:
        """The pass over the row in which each statement at full level runs."""
        known: dict[str, int] = {}
        out: dict[int, int] = {}
        for k, s in enumerate(self.kernel.body):
            phase = max((known[e.args[0]] for e in _exprs(s) if e.op == "ref"), default=0)
            if self._is_full(s):
                out[k] = phase
            if not isinstance(s, Store):
                known |= {r: phase + (1 if isinstance(s, Reduce) else 0) for r in s.refs}
        last = max(out.values(), default=0)
        read = {e.args[0] for s in self.kernel.body for e in _exprs(s) if e.op == "load"}
        for k in out:  # what is overwritten is read in every pass before
            s = self.kernel.body[k]
            if isinstance(s, Store) and s.buffer in read:
                out[k] = last
        return out

    def _phase(self, mine: list[Statement], phase: int, outer: Scope) -> None:
        inside = Scope(outer, provides=self.inner | frozenset(self.scans))
        stores = [s for s in mine if isinstance(s, Store)]
        for s in self._with_scans(mine):
            if isinstance(s, Scan):
                self._scan_step(s, phase, inside, outer)
            elif isinstance(s, Reduce):
                self._accumulate(s, inside, outer)
        self._stores(stores, inside)
        outer.lines += [
            f"for start in range(0, {host_text(Tile.extent(self.tile.r))}, R):",
            INDENT + "r = start + tl.arange(0, R)[None, :].to(INDEX)",
            *(INDENT + line for line in [*self._r_positions(), *inside.lines]),
        ]
        for s in mine:
            if isinstance(s, Reduce):
                self._combine(s, outer)

    def _with_scans(self, mine: list[Statement]) -> list[Statement]:
        """The statements of a pass, with the scans of earlier passes whose values it reads again."""
        wanted: dict[int, None] = {}

        def need(s: Statement) -> None:
            for e in _exprs(s):
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

    def _start(self, name: str, value: str, dtype: torch.dtype, outer: Scope, dims: str = "xr") -> None:
        outer.lines.append(f"{name} = tl.full({self._shape(frozenset(dims))}, {value}, {TYPES[dtype]})")

    def _accumulate(self, s: Reduce, inside: Scope, outer: Scope) -> None:
        value, dtype = self._tile_value(s, inside)
        kind, acc = _kind(s), f"acc_{s.refs[0]}"
        if kind == "welford":
            for part in ("mean", "m2", "n"):
                self._start(f"{acc}_{part}", literal(0.0, dtype), dtype, outer)
            live = "live_r" if "r" in self.writer.live else None
            step, away = self.writer.fresh("t"), self.writer.fresh("t")
            inside.lines.append(
                f"{step} = {live}.to({TYPES[dtype]})" if live else f"{step} = {typed(1.0, dtype)}"
            )
            inside.lines += [
                f"{acc}_n += {step}",
                f"{away} = {value} - {acc}_mean",
                f"{acc}_mean += {step} * {away} / tl.where({acc}_n > 0, {acc}_n, 1)",
                f"{acc}_m2 += {step} * {away} * ({value} - {acc}_mean)",
            ]
            if live:  # an infinity beyond the end would be NaN times 0
                inside.lines[-3:-2] = [f"{away} = tl.where({live}, {value} - {acc}_mean, 0)"]
                inside.lines[-1] = f"{acc}_m2 += {away} * tl.where({live}, {value} - {acc}_mean, 0)"
            return
        identity = literal(_identity(s, kind, dtype), dtype)
        self._start(acc, identity, dtype, outer)
        kept = self._where_live(value, identity, inside)
        if kind.startswith("arg"):
            outer.lines.append(f"{acc}_at = tl.broadcast_to(tl.arange(0, R)[None, :].to(tl.int64), [X, R])")
            better, sign = self.writer.fresh("t"), ">" if kind == "argmax" else "<"
            inside.lines += [
                f"{better} = ({kept} {sign} {acc}) | (({kept} != {kept}) & ({acc} == {acc}))",
                f"{acc}_at = tl.where({better}, r.to(tl.int64), {acc}_at)",
                f"{acc} = tl.where({better}, {kept}, {acc})",
            ]
            return
        step = {
            "sum": "{0} + {1}",
            "prod": "{0} * {1}",
            "max": "d.maximum({0}, {1})",
            "min": "d.minimum({0}, {1})",
        }[kind]
        note = f"  # {s.note}" if s.note else ""
        inside.lines.append(f"{acc} = {step.format(acc, kept)}{note}")

    def _combine(self, s: Reduce, outer: Scope) -> None:
        kind, acc = _kind(s), f"acc_{s.refs[0]}"
        if kind == "welford":
            mean, m2 = s.refs
            outer.lines.append(f"{mean}, {m2} = d.row_moments({acc}_mean, {acc}_m2, {acc}_n)")
            for ref in s.refs:
                self.writer.refs[ref], self.writer.ref_dims[ref] = ref, frozenset("x")
        elif kind.startswith("arg"):
            self._name(s, 0, f"d.row_{kind}({acc}, {acc}_at)", outer)
        else:
            self._finish(s, f"d.row_{kind}({acc})", outer)

    def _scan_step(self, s: Scan, phase: int, inside: Scope, outer: Scope) -> None:
        """One block of a scan, continued from what the blocks before came to."""
        value, dtype = self._tile_value(s, inside)
        kind, before = _kind(s), f"before{phase}_{s.refs[0]}"
        identity = literal(_identity(s, kind, dtype), dtype)
        kept = self._where_live(value, identity, inside)
        self._start(before, identity, dtype, outer, "x")
        column = "tl.arange(0, R)[None, :]"
        if kind.startswith("arg"):
            best, at = s.refs
            self._start(f"{before}_at", "0", torch.int64, outer, "x")
            inside.lines += [
                f"{best}, {at} = d.scan_{kind}({kept}, tl.broadcast_to(r.to(tl.int64), [X, R]))",
                f"{best}, {at} = d.continue_{kind}({before}, {before}_at, {best}, {at})",
                f"{before} = d.row_last({best}, {column}, R - 1)",
                f"{before}_at = d.row_last({at}, {column}, R - 1)",
            ]
            for ref in s.refs:
                self.writer.refs[ref], self.writer.ref_dims[ref] = ref, frozenset("xr")
            return
        line = self.writer.fresh("t")
        inside.lines += [
            f"{line} = d.continue_{kind}({before}, d.scan_{kind}({kept}))",
            f"{before} = d.row_last({line}, {column}, R - 1)",
        ]
        self._finish(s, line, inside)


def _apart(line: str, axes: tuple[Axis, ...]) -> list[str]:
    """Each axis' own position, from the position in all of them."""
    if not axes:
        return []
    index = ix.delinearize(ix.of(Var(line, Tile.extent(axes))), tuple(a.size or 1 for a in axes))
    out = []
    for a, i in zip(axes, index, strict=True):
        out.append(f"{a.var} = {_plain(i)}")
    return out


def _plain(i: Index) -> str:
    return host_text(i)


def _kind(s: Reduce | Scan) -> str:
    """The kind, in the words of device.py; bools reduce as int32 zeros and ones."""
    if s.kind in ("any", "all"):
        return {"any": "max", "all": "min"}[s.kind]
    if s.value.dtype == torch.bool:
        return {"sum": "max", "prod": "min"}.get(s.kind, s.kind)
    return s.kind


def _identity(s: Reduce | Scan, kind: str, dtype: torch.dtype) -> bool | int | float:
    """What leaves a reduction of that kind unchanged."""
    if kind in ("max", "min") and (s.value.dtype == torch.bool or s.kind in ("any", "all")):
        return kind == "min"
    kind = kind.removeprefix("arg")
    if kind == "sum":
        return 0
    if kind == "prod":
        return 1
    if dtype.is_floating_point:
        return float("inf") if kind == "min" else float("-inf")
    info = torch.iinfo(dtype)
    return info.max if kind == "min" else info.min


__all__ = [
    "Blocks",
    "Source",
    "Tile",
    "cast_text",
    "choose_blocks",
    "choose_tile",
    "emit",
    "programs",
    "programs_text",
]
