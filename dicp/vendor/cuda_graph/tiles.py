"""Tiles: the form in which a kernel's programs take its iteration space, and how large they are.

    line     [X]       pointwise: all axes as one line
    plane    [Y, X]    pointwise where operands are contiguous along different axes (transpositions)
    rows     [X, R]    reductions and scans: x runs over the results, r over what is reduced

Rows that fit one tile are read once and stay in registers (persistent); longer ones run in a loop. Scatters
whose targets may coincide use atomics; where there is no atomic, or for a product, one program walks the axes
in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.kernel import Axis, Kernel, Reduce, Store, expressions
from dicp.vendor.cuda_graph import vectors

PERSISTENT = 16384  # elements of a row kept in registers
PERSISTENT_COLUMN = 64
"""The same where neighbouring results, not neighbours in the row, are contiguous: longer ones run in a loop
over whole lines of memory,"""
CACHED_COLUMN, CACHED_ELEMENTS = 1024, 1 << 18
"""unless all there is to read lies in L2, as the parts of a reduction in two steps do."""
COLUMNS, COLUMN_TILE = 64, 8192
"""Columns of a tile in such a loop, and its elements, 32 a thread. On an H100, 65,536x1,024 elements of
bfloat16 are read at 87 % of a copy's bandwidth so; with tiles of half that height, in four times as many
parts, at 67 %, with tiles of 256 columns at 72 %."""
LINE_TILE, ROW_TILE = 1024, 1024
"""Elements of a tile of a line, 8 a thread, and of whole rows, 16 a thread;"""
SLIGHT = 4
"""twice as many, 16 a thread, where an element moves so few bytes: an H200 begins about one program a
nanosecond. GELU of bfloat16 reads and writes there at 97 % of a copy's bandwidth with 2,048 elements, at
79 with 1,024; softmax and layer norm of rows of 1,024 at 97 and 79 as well (each program having waited for
the kernel before, as long launches no longer do)."""
ROW_WARPS, LONG_ROW = 8, 8192
"""Warps of a tile of one row, up to so many elements, and twice as many beyond. On an H200 moments and
argmax of rows of 8,192 in bfloat16 read at 98 and 85 % of a copy's bandwidth with 8 warps, at 79 and 71 with
16."""
LOOP_ROW, LONG_LOOP_ROW = 2048, 8192
"""Elements of a row that one step of a loop takes; of one taken by whole vectors. On an H200, softmax of rows
of 32,000 in bfloat16 reads and writes at 62 and 82 % of a copy's bandwidth."""
REGISTERS = 1 << 16  # of a multiprocessor
PLANE_SIDE = 16  # a transposition pays from this many elements along both axes
ATOMIC = {
    "add": (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    "max": (torch.float32, torch.float64, torch.int32, torch.int64),
    "min": (torch.float32, torch.float64, torch.int32, torch.int64),
}


@dataclass(frozen=True)
class Tile:
    """The form of a kernel's tiles: which axes each dim joins (outermost first), and which run one at a time.

    `contiguous`: whether the reduced axis is the contiguous one. `persistent`: whether a row is one tile.
    `begin`: where a row begins, if one that a loop takes begins at no whole vector (vectors.py).
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
    begin: Index | None = None

    @staticmethod
    def extent(axes: tuple[Axis, ...]) -> Index:
        return ix.product(a.size for a in axes)


@dataclass(frozen=True)
class Blocks:
    """Tile sizes (powers of two; y and r are 1 where the form has no such dim), elements of a vector (1 where
    rows begin at whole ones), warps of a launch, and registers of a thread at the most."""

    x: int
    y: int = 1
    r: int = 1
    v: int = 1
    warps: int = 4
    registers: int | None = None


# -- the form ------------------------------------------------------------------------------------------------


def _accesses(kernel: Kernel) -> tuple[list[Index], list[Index]]:
    """(positions loaded, positions stored)"""
    loads = [e.args[1] for s in kernel.body for e in expressions(s) if e.op == "load"]
    return list(dict.fromkeys(loads)), list(
        dict.fromkeys(s.index for s in kernel.body if isinstance(s, Store))
    )


def _walks(i: Index, a: Axis) -> bool:
    return ix.depends(i, a.var) and not ix.moves_by_one(i, a.var)


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


def _by_rows(inner: tuple[Axis, ...], outer: tuple[Axis, ...], positions: list[Index]) -> bool:
    """Whether neighbours along what is reduced, rather than neighbouring results, are contiguous in most of
    what is read and written for each element: what only a row or a result has is small beside it."""
    whole = [i for i in positions if all(ix.depends(i, a.var) for a in (*inner, *outer))]
    full = whole or [
        i for i in positions if all(any(ix.depends(i, a.var) for a in axes) for axes in (inner, outer))
    ]
    if not outer or not full:
        return True
    along = sum(ix.moves_by_one(i, inner[-1].var) for i in full)
    return along >= sum(ix.moves_by_one(i, outer[-1].var) for i in full)


def _persistent(extent: Index, results: Index, contiguous: bool) -> bool:
    """Whether a row is one tile."""
    if not isinstance(extent, int):
        return False
    if contiguous or extent <= PERSISTENT_COLUMN:
        return extent <= PERSISTENT
    return isinstance(results, int) and extent <= CACHED_COLUMN and extent * results <= CACHED_ELEMENTS


def choose_tile(kernel: Kernel, interpreted: bool = False) -> Tile:
    inner, outer = kernel.inner, kernel.outer
    loads, stores = _accesses(kernel)
    if inner:
        contiguous = _by_rows(inner, outer, loads + stores)
        persistent = _persistent(Tile.extent(inner), Tile.extent(outer), contiguous)
        begin = vectors.begin_of_rows(kernel, inner) if contiguous and not persistent else None
        return Tile("rows", outer, r=inner, persistent=persistent, contiguous=contiguous, begin=begin)
    if needs_order(kernel, interpreted):
        free, serial = (tuple(a for a in outer if a.serial == s) for s in (False, True))
        return Tile("line", free, serial=serial, ordered=True)
    if len(outer) >= 2 and not any(a.serial for a in outer):
        near = outer[-1]
        walking = [i for i in loads + stores if _walks(i, near)]
        far = [a for a in outer[:-1] if any(ix.moves_by_one(i, a.var) for i in walking)]
        if far and all(not isinstance(a.size, int) or a.size >= PLANE_SIDE for a in (near, far[-1])):
            return Tile("plane", (near,), (far[-1],), single=tuple(a for a in outer[:-1] if a is not far[-1]))
    return Tile("line", outer)


# -- the sizes -----------------------------------------------------------------------------------------------


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def choose_blocks(kernel: Kernel, tile: Tile, interpreted: bool = False) -> Blocks:
    """Tile sizes that fill the chip and keep a tile in registers; interpreted, few and large tiles."""
    x = Tile.extent(tile.x)
    x = x if isinstance(x, int) else 1 << 16
    if interpreted:
        blocks = _interpreted_blocks(tile, x)
        return blocks if tile.begin is None else replace(blocks, v=vectors.vector(kernel))
    wide = max((p.dtype.itemsize for p in kernel.params), default=4)
    narrow = min((p.dtype.itemsize for p in kernel.params if not p.written), default=4)
    if tile.form == "plane":
        side = 32 if wide >= 4 else 64
        return Blocks(side, side, warps=4 if side == 32 else 8)
    if tile.form == "line":
        size = LINE_TILE * (2 if _moved(kernel) <= SLIGHT else 1) // (1 if wide <= 4 else 2)
        while size > 128 and x // size < 264:  # two programs for each of 132 multiprocessors
            size //= 2
        return Blocks(min(size, _power_of_two(x)), warps=4 if size >= 512 else 2 if size >= 256 else 1)
    extent = Tile.extent(tile.r)
    if not tile.contiguous:
        return _column_blocks(kernel, tile, x)
    if not tile.persistent:
        whole = tile.begin is not None or isinstance(extent, int) and extent % (16 // narrow) == 0
        step = LONG_LOOP_ROW if whole and extent >= 2 * LONG_LOOP_ROW else LOOP_ROW  # type: ignore[operator]
        v = 1 if tile.begin is None else vectors.vector(kernel)
        return Blocks(1, r=step, v=v, warps=step // 256, registers=_registers(kernel, step // 256))
    r = _power_of_two(extent)  # type: ignore[arg-type]
    several = ROW_TILE * (2 if _moved(kernel) <= SLIGHT else 1) // r
    rows = max(1, min(several, 32, _power_of_two(max(1, x // 264))))
    most = ROW_WARPS * (1 if r <= LONG_ROW else 2)
    return Blocks(rows, r=r, warps=max(1, min(most, rows * r // 512)))


def _registers(kernel: Kernel, warps: int) -> int | None:
    """A softmax waits for its row twice: a second program of 32 warps has something to do meanwhile, if the
    registers are enough for both. log_softmax of 50,257 reads and writes at 78 % of a copy's bandwidth so on
    an H200, at 68 where one alone takes more; where there is no softmax they would not suffice."""
    softmax = any(isinstance(s, Reduce) and s.value.op == "exp_below" for s in kernel.body)
    return REGISTERS // (2 * 32 * warps) if softmax and warps == 32 else None


def _moved(kernel: Kernel) -> int:
    """Bytes read and written for a point of the whole iteration space; what a row alone has is not
    counted."""
    size = {p.name: p.dtype.itemsize for p in kernel.params}
    loads = [e.args[:2] for s in kernel.body for e in expressions(s) if e.op == "load"]
    stores = [(s.buffer, s.index) for s in kernel.body if isinstance(s, Store)]
    whole = [a for a in (*loads, *stores) if all(ix.depends(a[1], axis.var) for axis in kernel.axes)]
    return sum(size[name] for name, _ in dict.fromkeys(whole))


def _column_blocks(kernel: Kernel, tile: Tile, x: int) -> Blocks:
    """Of reductions whose neighbouring results are contiguous. A thread has 32 elements, or 16 where each is
    made of several: registers are what it has to spare."""
    loads = {e.args[:2] for s in kernel.body for e in expressions(s) if e.op == "load"}
    several = sum(all(ix.depends(i, a.var) for a in kernel.axes) for _, i in loads) > 1
    most = min(_power_of_two(max(1, x // 264)), _power_of_two(x))  # two programs for each multiprocessor
    if tile.persistent:
        r = _power_of_two(Tile.extent(tile.r))  # type: ignore[arg-type]
        columns = max(8, min(4096 // r, most))
    else:
        columns = max(8, min(COLUMNS, most))
        r = COLUMN_TILE // columns // (2 if several else 1)
    return Blocks(columns, r=r, warps=max(1, min(8, columns * r // (512 if several else 1024))))


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


def has_tail(axes: tuple[Axis, ...], block: int) -> bool:
    """Whether the last tile along axes may reach beyond their end."""
    extent = Tile.extent(axes)
    return not isinstance(extent, int) or extent <= 0 or extent % block != 0


def row_has_tail(tile: Tile, blocks: Blocks) -> bool:
    """Whether the last tile of a row may."""
    return tile.begin is not None or has_tail(tile.r, blocks.r)
