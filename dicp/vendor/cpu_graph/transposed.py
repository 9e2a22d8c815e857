"""Loads and stores that lie transposed: along another axis than the one of a kernel's vectors.

A vector of such a load takes each element from a cache line of its own, and the lines are mostly gone when
the next vector wants their next elements; where strides are powers of two they share one set of the cache.
So LANES vectors are loaded along the other axis, transposed in registers and kept in a `TransposedTile` of
include/dicp_memory.h, whose columns the kernel reads:

    for outer.. { for blocks of the other axis { for vectors { transpose; for the block { store } } } }

Where all results lie transposed it is they that are kept and transposed, and blocks are walked first:

    for outer.. { for runs of blocks { for vectors { for blocks of the run {
        for the block { keep }; transpose } } } }

A run is several cache lines of each result, which the processor fetches ahead; with all of a row at once the
lines of the operands, which vectors share with their neighbours, would be gone before those are computed.

A row that is reduced, and read or stored transposed besides (a norm whose result or operand is transposed),
would be read and written an element to a cache line as well: LANES rows are kept on the stack, and transposed
together (`load_transposed`, `store_transposed`):

    for outer.. { for blocks of the other axis { transpose; for the block { reduce } transpose, store } }

Columns that are reduced, several vectors of them at a time, are read in tiles where they lie along the rows:

    for blocks of columns { for blocks of rows { transpose; for the block { for vectors { reduce } } } }
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.kernel import Axis, Kernel, Statement, Store, expressions
from dicp.vendor.cpu_graph.expression import STORAGE, ExpressionWriter, index_text
from dicp.vendor.cpu_graph.loops import Shape, few

MAX_KEPT = 1 << 16
"""Bytes of the rows of a block, on the stack of a thread and in its cache."""


RUN = 512
"""Bytes of each transposed result that are computed in a row. Measured (docs/cpu_graph.md)."""


@dataclass(frozen=True)
class Transposed:
    """The axis along which loads and stores lie, the axes around its blocks, and those loads and stores."""

    axis: Axis
    outer: tuple[Axis, ...]
    loads: tuple[Expr, ...]
    stores: tuple[Store, ...]


def find_transposed(kernel: Kernel, shape: Shape, lanes: int) -> Transposed | None:
    """What a pointwise kernel had better read and store in tiles: nothing where an axis fills no vector, or
    blocks are too few for all threads."""
    along = shape.vector
    if along is None or not _fills(along, lanes):
        return None
    found = _candidates(kernel, shape, along, lanes)
    shared = (t for t in found if not few(t.outer, t.axis.size, lanes))
    return max(shared, key=_accesses, default=None)


def run_of_blocks(kernel: Kernel, transposed: Transposed, lanes: int) -> int | None:
    """Points of a run where blocks are walked first; None where vectors are, as a result lies along them, or
    where there would be but one run."""
    stores = [s for s in kernel.body if isinstance(s, Store)]
    if len(transposed.stores) < len(stores):
        return None
    sizes = {p.name: p.dtype.itemsize for p in kernel.params}
    run = max(1, RUN // (lanes * max(sizes[s.buffer] for s in stores))) * lanes
    size = transposed.axis.size
    return None if isinstance(size, int) and size <= run else run


def masks_transposed(kernel: Kernel, along: Axis, axis: Axis) -> bool:
    """Whether a load that lies along `axis`, and not along the vectors, is read under a mask alone."""
    loads = {e for s in kernel.body for e in expressions(s) if e.op == "load"}
    masked = loads - {e for s in kernel.body for e in _unmasked(s.value)}
    return any(_lies_transposed(e.args[1], along, axis) for e in masked)


def find_transposed_rows(kernel: Kernel, shape: Shape, lanes: int) -> Transposed | None:
    """What a row kernel had better read and store in blocks of rows: nothing where rows are not of a known
    size that a stack holds, or blocks too few for all threads."""
    along = shape.vector
    if shape.kind != "rows" or along is None or len(shape.inner) != 1 or not isinstance(along.size, int):
        return None
    n = along.size
    if n < lanes:
        return None
    sizes = {p.name: p.dtype.itemsize for p in kernel.params}
    written = {s.buffer for s in kernel.body if isinstance(s, Store)}

    def kept(t: Transposed) -> int:
        buffers = (*(e.args[0] for e in t.loads), *(s.buffer for s in t.stores))
        return lanes * n * sum(sizes[b] for b in buffers)

    # what a phase writes, a later one may read
    found = (
        replace(t, loads=tuple(e for e in t.loads if e.args[0] not in written))
        for t in _candidates(kernel, shape, along, lanes)
    )
    shared = (t for t in found if not few(t.outer, t.axis.size, lanes))
    return max((t for t in shared if 0 < kept(t) <= MAX_KEPT), key=_accesses, default=None)


def _candidates(kernel: Kernel, shape: Shape, along: Axis, lanes: int) -> Iterator[Transposed]:
    """By each outer axis that fills blocks, what lies along it."""
    unmasked = dict.fromkeys(e for s in kernel.body for e in _unmasked(s.value) if e.op == "load")
    read = {e.args[0] for s in kernel.body for e in expressions(s) if e.op == "load"}
    # a store waits for its block: what is read meanwhile must not be of it
    stores = [s for s in kernel.body if isinstance(s, Store) and s.mode == "set" and s.buffer not in read]
    for axis in shape.outer:
        outer = tuple(a for a in shape.outer if a is not axis)
        if not _fills(axis, lanes):
            continue
        lying = tuple(e for e in unmasked if _lies_transposed(e.args[1], along, axis))
        stored = tuple(
            s for s in stores if _lies_transposed(s.index, along, axis) and not ix.may_be_empty(s.index)
        )
        if lying or stored:
            yield Transposed(axis, outer, lying, stored)


def _accesses(t: Transposed) -> int:
    return len(t.loads) + len(t.stores)


def find_turned(
    statements: Iterable[Statement], written: Container[str], columns: Axis, rows: Axis, lanes: int
) -> tuple[Expr, ...]:
    """The loads along `rows` that statements at each point of columns and rows had better read in tiles."""
    if not _fills(rows, lanes):
        return ()
    unmasked = dict.fromkeys(e for s in statements for e in _unmasked(s.value) if e.op == "load")
    return tuple(
        e for e in unmasked if e.args[0] not in written and _lies_transposed(e.args[1], columns, rows)
    )


def block_of_rows(buffer: str, i: ix.Index, transposed: Transposed, along: Axis, block: str) -> str:
    """Where a block of rows lies transposed: its first element, and from one of a row to the next."""
    split = ix.coefficient(i, along.var)
    assert split is not None
    start, stride = (
        index_text(x, lambda a: block if a == transposed.axis.var else a.name)  # type: ignore[attr-defined]
        for x in (split[1], split[0])
    )
    return f"{buffer} + {start}, {stride}"


def _fills(axis: Axis, lanes: int) -> bool:
    return not isinstance(axis.size, int) or axis.size >= lanes


def _lies_transposed(i: ix.Index, along: Axis, axis: Axis) -> bool:
    if any(isinstance(a, ix.Opaque) for a in ix.atoms(i)) or not ix.moves_by_one(i, axis.var):
        return False
    split = ix.coefficient(i, along.var)
    return split is not None and split[0] not in (0, 1) and not ix.depends(split[0], axis.var)


def _unmasked(*roots: Expr) -> Iterator[Expr]:
    """What is computed at every point: not what a mask guards."""
    seen, open_ = set(roots), list(roots)
    while open_:
        e = open_.pop()
        yield e
        below = (e.args[0], e.args[2]) if e.op == "masked" else ex.children(e)
        fresh = [c for c in below if isinstance(c, Expr) and c not in seen]
        seen.update(fresh)
        open_ += fresh


def stored_tile(
    s: Store, axis: Axis, along: Axis, block: str, writer: ExpressionWriter
) -> tuple[str, str, str]:
    """A tile's declaration, where in it a vector of `along` goes, and how it is stored."""
    name = writer.fresh("tile")
    there = _place(s.buffer, s.index, axis, along, block)
    declared = f"TransposedTile<{STORAGE[writer.params[s.buffer]]}> {name};"
    return declared, f"{name}.column({axis.var.name} - {block})", f"{name}.store({there}, lanes, columns);"


def tile(
    e: Expr, axis: Axis, along: Axis, block: str, writer: ExpressionWriter, vectors: int = 1
) -> tuple[str, str]:
    """A tile's declaration, and how it is loaded where a block of `axis` begins; `writer` then reads `e` from
    it. Of several vectors of `along` there is one for each, in an array."""
    name, each = writer.fresh("tile"), "[u]" if vectors > 1 else ""
    there = _place(e.args[0], e.args[1], axis, along, block)
    column = f"{name}{each}.column({axis.var.name} - {block})"
    writer.replaced[e] = lambda s: f"load({column}, lanes)"
    array = f"[{vectors}]" if vectors > 1 else ""
    declared = f"TransposedTile<{STORAGE[writer.params[e.args[0]]]}> {name}{array};"
    return declared, f"{name}{each}.load({there}, lanes, columns);"


def _place(buffer: str, i: ix.Index, axis: Axis, along: Axis, block: str) -> str:
    """Where a tile lies: its first element, and from one of a vector to the next."""
    split = ix.coefficient(i, along.var)
    assert split is not None
    start, stride = (
        index_text(x, lambda a: block if a == axis.var else a.name)  # type: ignore[attr-defined]
        for x in (i, split[0])
    )
    return f"{buffer} + {start}, {stride}"


__all__ = [
    "Transposed",
    "block_of_rows",
    "find_transposed",
    "find_transposed_rows",
    "find_turned",
    "masks_transposed",
    "run_of_blocks",
    "stored_tile",
    "tile",
]
