"""Views as index transforms: no element is computed or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dicp.compat import is_traced, known_equal, size_hint
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.ranges import assuming
from dicp.ir.value import Builder, Indices, Shape, Value
from dicp.ops.aliases import base_of, order_in_memory
from dicp.ops.rules.pointwise import broadcast, constant, convert
from dicp.ops.table import Declined, Row, row


def groups(old: Shape, new: Shape) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split two shapes of one element count into the shortest runs of dimensions with equal products.

    [2, 3, 4] -> [6, 4] gives ((0, 1), (0,)) and ((2,), (1,)). Dimensions of size one belong to no run.
    """
    a = [d for d, n in enumerate(old) if n != 1]
    b = [d for d, n in enumerate(new) if n != 1]
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        ends = _matching_ends(old, new, a, b, i, j)
        if ends is None:
            break
        out.append((tuple(a[i:ends[0]]), tuple(b[j:ends[1]])))
        i, j = ends
    if i < len(a) or j < len(b):
        out.append((tuple(a[i:]), tuple(b[j:])))
    return out


def _matching_ends(
    old: Shape, new: Shape, a: list[int], b: list[int], i: int, j: int
) -> tuple[int, int] | None:
    """Ends of the shortest runs of a[i:] and b[j:] whose sizes have one product."""
    products: dict[Index, int] = {}
    run: Index = 1
    for end in range(i, len(a)):
        run = run * old[a[end]]
        products[run] = end + 1
    run = 1
    for end in range(j, len(b)):
        run = run * new[b[end]]
        if run in products:
            return products[run], end + 1
    return None


def reshape(x: Value, shape: Shape) -> Value:
    """x with another shape of the same element count, row-major."""
    if x.shape == shape:
        return x
    if 0 in x.shape or 0 in shape:
        return constant(0, shape, x.dtype)
    old = x.shape
    runs = groups(old, shape)

    def source(idx: Indices) -> Indices:
        out: list[Index] = [0] * len(old)
        for into, out_of in runs:
            if len(into) == len(out_of) == 1:
                out[into[0]] = idx[out_of[0]]
                continue
            pos = ix.linearize([idx[d] for d in out_of], [shape[d] for d in out_of])
            for d, i in zip(into, ix.delinearize(pos, tuple(old[d] for d in into)), strict=True):
                out[d] = i
        return tuple(out)

    rows = bool(runs) and runs[-1] == ((len(old) - 1,), (len(shape) - 1,))
    return Value(shape, x.dtype, lambda idx: x(source(idx)), (x.rows_of or x) if rows else None)


def reindexed(x: Value, shape: Shape, fn: Callable[[Indices], Indices]) -> Value:
    """The value of `shape` whose element at idx is x's element at fn(idx)."""
    return Value(shape, x.dtype, lambda idx: x(fn(idx)))


def along(x: Value, dim: int, size: Index, fn: Callable[[Index], Index]) -> Value:
    """x with dimension `dim` of another size, read through fn."""
    shape = replaced(x.shape, dim, size)
    return reindexed(x, shape, lambda idx: replaced(idx, dim, fn(idx[dim])))


def replaced(xs: tuple[Index, ...], at: int, x: Index) -> tuple[Index, ...]:
    return (*xs[:at], x, *xs[at + 1:])


def dropped(xs: tuple[Index, ...], at: int) -> tuple[Index, ...]:
    return (*xs[:at], *xs[at + 1:])


def inserted(xs: tuple[Index, ...], at: int, x: Index) -> tuple[Index, ...]:
    return (*xs[:at], x, *xs[at:])


def wrap_dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def view(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Any op that only gives the elements of x, in row-major order, the shape of its result."""
    return reshape(x, b.meta(node)[0])


def identity(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Ops that change at most where a tensor is stored."""
    return x


def permuted(x: Value, dims: Sequence[int]) -> Value:
    """x with dimension dims[k] as its k-th."""
    rank = len(x.shape)
    dims = [d % rank for d in dims]
    where = [dims.index(d) for d in range(rank)]
    return reindexed(x, tuple(x.shape[d] for d in dims), lambda idx: tuple(idx[k] for k in where))


def permute(b: Builder, node: torch.fx.Node, x: Value, dims: list[int]) -> Value:
    return permuted(x, dims)


def transpose(b: Builder, node: torch.fx.Node, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    """Two dimensions exchanged; `aten.t` leaves vectors as they are."""
    rank = len(x.shape)
    if rank < 2:
        return x
    dims = list(range(rank))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permuted(x, dims)


def expand(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    return broadcast(x, b.meta(node)[0])


def broadcast_in_dim(b: Builder, node: torch.fx.Node, x: Value, shape: list[Index], dims: list[int]) -> Value:
    """Dimension k of x becomes dimension dims[k] of the result."""
    full = b.meta(node)[0]
    stretched = [n == 1 for n in x.shape]
    return reindexed(x, full, lambda idx: tuple(
        0 if one else idx[d] for one, d in zip(stretched, dims, strict=True)))


def select(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Index) -> Value:
    dim = wrap_dim(dim, len(x.shape))
    given = node.args[2]
    guarded = known_to_tracing(given)  # its sign, by torch
    at = from_end(index, x.shape[dim], given) if guarded else looked_up(b, index, x.shape[dim], "select")
    return reindexed(x, dropped(x.shape, dim), lambda idx: inserted(idx, dim, at))


def looked_up(b: Builder, i: Index, size: Index, what: str) -> Index:
    """A position that counts from the end when negative, and of which no guard tells: checked at run time."""
    if isinstance(i, int):
        return from_end(i, size, i)
    return i if ix.in_range(i, size) else b.indirect(ex.index_value(i), size, what)


def known(proved: bool, refuted: bool, hint: bool) -> bool:
    """A fact about sizes: as proven, else as it was while tracing (torch guarded it in making the result)."""
    return proved or (hint and not refuted)


def hint_of(given: Any) -> int:
    """The value that a size argument of a node had while tracing."""
    return size_hint(traced(given), fallback=0)


def known_to_tracing(given: Any) -> bool:
    """Whether a size argument of a node had a value while tracing; one read from data has none."""
    return is_traced(traced(given))


def traced(given: Any) -> Any:
    """A size argument of a node as it was traced."""
    return given.meta["val"] if isinstance(given, torch.fx.Node) else given


def from_end(i: Index, size: Index, given: Any) -> Index:
    """A position that counts from the end when negative; `given` is the node's argument for it."""
    if isinstance(i, int):
        return i + size if i < 0 else i
    positive = known(ix.nonnegative(i), ix.nonnegative(-i - 1), hint_of(given) >= 0)
    return i if positive else i + size


def slice_start(node: torch.fx.Node, start: Any, size: Index, dim: int, given: Any) -> Index:
    """First position of a slice, limited to [0, size]."""
    if start is None:
        return 0
    length = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
    if isinstance(start, int) and start >= 0 and ix.nonnegative(size - start):
        return start
    if not known_to_tracing(given) or not known_to_tracing(length):
        at, end = ex.index_value(start), ex.index_value(size)
        at = ex.where(ex.binary("lt", at, 0), ex.binary("add", at, end), at)
        return ix.of(ix.Opaque(ex.binary("maximum", ex.binary("minimum", at, end), 0), size + 1))
    first = from_end(start, size, given)
    if isinstance(first, int) and isinstance(size, int):
        return min(max(first, 0), size)
    n = hint_of(length)
    value = hint_of(given) if not isinstance(start, int) else start
    value = value + n if value < 0 else value
    if not known(ix.nonnegative(first), ix.nonnegative(-first - 1), value >= 0):
        return 0
    return (
        first if known(ix.nonnegative(size - first), ix.nonnegative(first - size - 1), value <= n) else size
    )


def argument(node: torch.fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def slice_(b: Builder, node: torch.fx.Node, x: Value, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> Value:
    dim = wrap_dim(dim, len(x.shape))
    first = slice_start(node, start, x.shape[dim], dim, argument(node, 2, "start"))
    return along(x, dim, b.meta(node)[0][dim], lambda i: i * step + first)


def parts(b: Builder, node: torch.fx.Node, x: Value, sizes: Any = None, dim: int = 0) -> tuple[Value, ...]:
    """split, chunk and their relatives: consecutive pieces along one dimension."""
    dim = wrap_dim(dim, len(x.shape))
    out = []
    start: Index = 0
    for piece in node.meta["val"]:
        size = b.index(piece.shape[dim])
        out.append(along(x, dim, size, lambda i, start=start: i + start))  # type: ignore[misc]
        start = start + size
    return tuple(out)


def unbind(b: Builder, node: torch.fx.Node, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = wrap_dim(dim, len(x.shape))
    return tuple(
        reindexed(x, dropped(x.shape, dim), lambda idx, k=k: inserted(idx, dim, k))  # type: ignore[misc]
        for k in range(len(node.meta["val"]))
    )


def as_strided(b: Builder, node: torch.fx.Node, x: Value, size: list[Index], stride: list[Index],
               storage_offset: Index | None = None) -> Value:
    """A window on the elements of x in the order of its memory."""
    order = memory_order(node, x.shape, size, stride, storage_offset)
    flat = reshape(permuted(x, order), (ix.product(x.shape),))
    return reindexed(flat, tuple(size), lambda idx: (position(idx, stride, storage_offset or 0),))


def position(idx: Sequence[Index], stride: Sequence[Index], first: Index) -> Index:
    """Where in memory the element at idx of a strided window lies, in elements."""
    return sum((i * n for i, n in zip(idx, stride, strict=True)), first)


def memory_order(
    node: torch.fx.Node, shape: Shape, size: Sequence[Index], stride: Sequence[Index], first: Index | None
) -> list[int]:
    """The dims of the node's operand from outermost to innermost in memory, of which it must fill a stretch
    that holds the window. Declined otherwise: what else lies in its memory is not known. Declined as well
    where the window begins at a place (`first`) in the memory of an input: where those begin has no guard."""
    if first is not None and base_of(node.args[0]).op == "placeholder":  # type: ignore[arg-type]
        raise Declined("as_strided of an input from a place in its memory")
    base = node.args[0].meta["val"]  # type: ignore[union-attr]
    order = order_in_memory(base)
    if order is None:
        raise Declined("as_strided of a tensor with gaps or overlaps in memory")
    if not known_equal(base.storage_offset(), 0):
        raise Declined("as_strided of a part of some memory")
    top = position([n - 1 for n in size], stride, first or 0)
    if 0 not in size and not ix.nonnegative(ix.product(shape) - 1 - top):
        raise Declined("as_strided beyond the elements of its operand")
    return order


def diagonal(
    b: Builder, node: torch.fx.Node, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    rest = [d for d in range(rank) if d not in (first, second)]

    def source(idx: Indices) -> Indices:
        out: list[Index] = [0] * rank
        for d, i in zip(rest, idx, strict=False):
            out[d] = i
        out[first] = idx[-1] + max(-offset, 0)
        out[second] = idx[-1] + max(offset, 0)
        return tuple(out)

    return reindexed(x, b.meta(node)[0], source)


def flip(b: Builder, node: torch.fx.Node, x: Value, dims: list[int]) -> Value:
    flipped = {wrap_dim(d, len(x.shape)) for d in dims} if x.shape else set()
    return reindexed(x, x.shape, lambda idx: tuple(
        x.shape[d] - 1 - i if d in flipped else i for d, i in enumerate(idx)))


def roll(b: Builder, node: torch.fx.Node, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    if not dims:
        flat = reshape(x, (ix.product(x.shape),))
        return reshape(rolled(flat, shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = rolled(x, shift, wrap_dim(dim, len(x.shape)))
    return x


def rolled(x: Value, shift: Index, dim: int) -> Value:
    size = x.shape[dim] if x.shape else 1
    if size == 0 or not x.shape:
        return x
    back = ix.mod(size - shift, size) if isinstance(shift, int) and isinstance(size, int) else size - shift
    return along(x, dim, size, lambda i: ix.mod(i + back, size))


def repeat(b: Builder, node: torch.fx.Node, x: Value, repeats: list[Index]) -> Value:
    lead = len(repeats) - len(x.shape)
    full = b.meta(node)[0]
    if 0 in x.shape or 0 in full:
        return constant(0, full, x.dtype)
    return reindexed(
        x, full, lambda idx: tuple(ix.mod(i, n) for i, n in zip(idx[lead:], x.shape, strict=True))
    )


def unfold(b: Builder, node: torch.fx.Node, x: Value, dimension: int, size: Index, step: Index) -> Value:
    """Windows of a dimension: position i * step + k."""
    if not x.shape:
        return reindexed(x, b.meta(node)[0], lambda idx: ())
    dim = dimension % len(x.shape)
    return reindexed(x, b.meta(node)[0], lambda idx: replaced(idx[:-1], dim, idx[dim] * step + idx[-1]))


def movedim(b: Builder, node: torch.fx.Node, x: Value, source: Any, destination: Any) -> Value:
    rank = len(x.shape)
    pairs = (
        [(source, destination)] if isinstance(source, int) else list(zip(source, destination, strict=True))
    )
    moved = {to % rank: of % rank for of, to in pairs}
    rest = iter(d for d in range(rank) if d not in moved.values())
    return permuted(x, [moved[d] if d in moved else next(rest) for d in range(rank)])


def select_scatter(b: Builder, node: torch.fx.Node, x: Value, src: Value, dim: int, index: Index) -> Value:
    dim = wrap_dim(dim, len(x.shape))
    at = looked_up(b, index, x.shape[dim], "select_scatter")
    src = broadcast(convert(src, x.dtype), dropped(x.shape, dim))
    return choose(lambda idx: same(idx[dim], at), reindexed(src, x.shape, lambda idx: dropped(idx, dim)), x)


def same(i: Index, j: Index) -> Expr:
    return ex.binary("eq", ex.index_value(i), ex.index_value(j))


def choose(cond: Callable[[Indices], Expr], inside: Value, outside: Value) -> Value:
    """inside where cond holds (read only there), else outside."""

    def fn(idx: Indices) -> Expr:
        c = cond(idx)
        return ex.masked(c, lambda: assuming(inside(idx), c), outside(idx))

    return Value(outside.shape, outside.dtype, fn)


def slice_scatter(b: Builder, node: torch.fx.Node, x: Value, src: Value, dim: int = 0, start: Any = None,
                  end: Any = None, step: int = 1) -> Value:
    dim = wrap_dim(dim, len(x.shape))
    first = slice_start(node, start, x.shape[dim], dim, argument(node, 3, "start"))
    count = src.shape[dim]
    src = convert(src, x.dtype)
    if not isinstance(step, int):
        raise Declined("slice_scatter with a symbolic step")
    if first == 0 and step == 1 and count == x.shape[dim]:
        return src

    def covered(idx: Indices) -> Expr:
        offset = idx[dim] - first
        inside = ex.binary("land", ex.at_least(idx[dim], first), ex.less(ix.floordiv(offset, step), count))
        return ex.binary("land", inside, same(ix.mod(offset, step), 0))

    inside = reindexed(src, x.shape, lambda idx: replaced(idx, dim, ix.floordiv(idx[dim] - first, step)))
    return choose(covered, inside, x)


def diagonal_scatter(b: Builder, node: torch.fx.Node, x: Value, src: Value, offset: int = 0, dim1: int = 0,
                     dim2: int = 1) -> Value:
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    rest = [d for d in range(rank) if d not in (first, second)]
    inside = reindexed(convert(src, x.dtype), x.shape,
                       lambda idx: (*(idx[d] for d in rest), idx[first] - max(-offset, 0)))
    return choose(lambda idx: same(idx[first] + offset, idx[second]), inside, x)


def view_rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    yield row(
        "view",
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.view_copy.default,
        aten._reshape_copy.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        prims.collapse.default,
        prims.collapse_view.default,
        prims.split_dim.default,
        prims.squeeze.default,
        kind="view",
        rule=view,
    )
    yield row("alias", aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default,
              aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.positive.default,
              aten.alias_copy.default, prims.clone.default, kind="view", rule=identity)
    yield row(
        "permute",
        aten.permute.default,
        aten.permute_copy.default,
        prims.transpose.default,
        kind="view",
        rule=permute,
    )
    yield row("transpose", aten.transpose.int, aten.t.default, kind="view", rule=transpose)
    yield row("expand", aten.expand.default, aten.broadcast_to.default, kind="view", rule=expand)
    yield row("broadcast_in_dim", prims.broadcast_in_dim.default, kind="view", rule=broadcast_in_dim)
    yield row("select", aten.select.int, kind="view", rule=select)
    yield row("slice", aten.slice.Tensor, kind="view", rule=slice_)
    yield row(
        "split",
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unsafe_chunk.default,
        aten.split_with_sizes_copy.default,
        kind="view",
        rule=parts,
    )
    yield row("unbind", aten.unbind.int, kind="view", rule=unbind)
    yield row(
        "as_strided", aten.as_strided.default, aten.as_strided_copy.default, kind="view", rule=as_strided
    )
    yield row("diagonal", aten.diagonal.default, aten.diagonal_copy.default, kind="view", rule=diagonal)
    yield row("unfold", aten.unfold.default, aten.unfold_copy.default, kind="view", rule=unfold)
    yield row("movedim", aten.movedim.int, aten.movedim.intlist, kind="view", rule=movedim)


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield from view_rows()
    yield row("flip", aten.flip.default, kind="index", rule=flip, moves=True)
    yield row("roll", aten.roll.default, kind="index", rule=roll, moves=True)
    yield row("repeat", aten.repeat.default, kind="index", rule=repeat, moves=True)
    yield row("select_scatter", aten.select_scatter.default,
              kind="index", rule=select_scatter, moves=True)
    yield row("slice_scatter", aten.slice_scatter.default,
              kind="index", rule=slice_scatter, moves=True)
    yield row("diagonal_scatter", aten.diagonal_scatter.default,
              kind="index", rule=diagonal_scatter, moves=True)
