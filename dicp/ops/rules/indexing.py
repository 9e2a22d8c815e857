"""Reading and writing at positions that tensors hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.kernel import identity
from dicp.ir.value import Builder, Indices, ScatterMode, Shape, Value
from dicp.ops import scalar as s
from dicp.ops.rules.arithmetic import scaled
from dicp.ops.rules.pointwise import broadcast, constant, convert, pointwise, retyped, scalar_expr
from dicp.ops.rules.views import memory_order, permuted, position, replaced, reshape, wrap_dim
from dicp.ops.table import Declined, Row, Rule, row


def lookup(b: Builder, position: Expr, size: Index, what: str, wrap: bool = True) -> Index:
    """A run-time position as an index; one that is known to be in range needs no check."""
    if position.op in ("index", "const"):
        known = position.args[0]
        if isinstance(known, int) and isinstance(size, int) and wrap and -size <= known < 0:
            return known + size
        if ix.in_range(known, size):
            return known  # type: ignore[no-any-return]
    return b.indirect(ex.cast(position, torch.int64), size, what, wrap)


def widened(
    b: Builder,
    base: Value,
    mode: ScatterMode,
    extent: Shape,
    fn: Callable[[Indices], tuple[Indices, Expr]],
    unique: bool = False,
) -> Value:
    """Scatter that adds and multiplies low-precision elements in float32."""
    wide = base.dtype if mode in ("set", "max", "min") else ex.compute_dtype(base.dtype)
    return retyped(b.scatter(retyped(base, wide), extent, fn, mode, unique), base.dtype)


def zeros(shape: Shape, dtype: torch.dtype) -> Value:
    return constant(0, shape, dtype)


# --- reading


def read_at(x: Value, shape: Shape, fn: Callable[[Indices], Indices]) -> Value:
    """`reindexed` at positions that are looked up: their checks stay also where x's element does not depend
    on them, a scalar's say, or a constant's."""

    def element(idx: Indices) -> Expr:
        at = fn(idx)
        out = x(at)
        looked_up = [a.payload for i in at for a in ix.atoms(i) if isinstance(a, ix.Opaque)]
        lost = set(looked_up).difference(ex.walk(out)) if looked_up else ()
        for check in (c for c in looked_up if c in lost):
            holds = Expr("ge", (check, ex.const(0, torch.int64)), torch.bool)
            out = Expr("where", (holds, out, ex.const(0, out.dtype)), out.dtype)
        return out

    return Value(shape, x.dtype, element)


def embedding(
    b: Builder, node: torch.fx.Node, weight: Value, indices: Value, *settings: Any, **kwargs: Any
) -> Value:
    return read_at(weight, b.meta(node)[0], lambda idx: (
        lookup(b, indices(idx[:-1]), weight.shape[0], "embedding", wrap=False), idx[-1]))


def index_select(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value) -> Value:
    scalar, x = not x.shape, with_rank(x)
    dim = wrap_dim(dim, len(x.shape))
    index = reshape(index, (ix.product(index.shape),))
    out = read_at(x, replaced(x.shape, dim, index.shape[0]), lambda idx: replaced(
        idx, dim, lookup(b, index((idx[dim],)), x.shape[dim], "index_select", wrap=False)))
    return reshape(out, ()) if scalar else out


def gather(
    b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, *, sparse_grad: bool = False
) -> Value:
    x, index, restore = with_rank(x), with_rank(index), index.shape
    if len(x.shape) != len(index.shape):  # what torch takes of an index without elements
        return constant(0, index.shape, x.dtype)
    dim = wrap_dim(dim, len(x.shape))
    out = read_at(x, index.shape, lambda idx: replaced(
        idx, dim, lookup(b, index(idx), x.shape[dim], "gather", wrap=False)))
    return reshape(out, restore)


def with_rank(x: Value) -> Value:
    """A scalar as a vector of one."""
    return x if x.shape else reshape(x, (1,))


def take(b: Builder, node: torch.fx.Node, x: Value, index: Value) -> Value:
    flat = reshape(x, (ix.product(x.shape),))
    return read_at(flat, index.shape, lambda idx: (lookup(b, index(idx), flat.shape[0], "take"),))


class Advanced:
    """Advanced indexing x[indices], None standing for a whole dimension."""

    def __init__(self, b: Builder, x: Value, indices: list[Value | None]) -> None:
        indices = [*indices, *[None] * (len(x.shape) - len(indices))]
        given = [i for i in indices if i is not None]
        if any(i.dtype in (torch.bool, torch.uint8) for i in given):
            raise Declined("indexing by a mask: the size of the result depends on values")
        self.b, self.x = b, x
        self.dims = [d for d, i in enumerate(indices) if i is not None]
        self.rest = [d for d, i in enumerate(indices) if i is None]
        self.common = broadcast_shape([i.shape for i in given])
        self.indices = {d: broadcast(i, self.common) for d, i in enumerate(indices) if i is not None}
        adjacent = not self.dims or self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        # Indexed dimensions that are not adjacent go to the front of the result.
        self.first = self.dims[0] if adjacent and self.dims else 0

    @property
    def one(self) -> bool:
        """Whether the indices name a single position."""
        return all(n == 1 for n in self.common)

    @property
    def shape(self) -> Shape:
        kept = tuple(self.x.shape[d] for d in self.rest)
        return (*kept[:self.first], *self.common, *kept[self.first:])

    def source(self, idx: Indices) -> Indices:
        """Index of x that an index of the result stands for."""
        end = self.first + len(self.common)
        at, kept = idx[self.first:end], (*idx[:self.first], *idx[end:])
        out: list[Index] = [0] * len(self.x.shape)
        for d, i in zip(self.rest, kept, strict=True):
            out[d] = i
        for d in self.dims:
            out[d] = lookup(self.b, self.indices[d](at), self.x.shape[d], f"index of dimension {d}")
        return tuple(out)


def broadcast_shape(shapes: list[Shape]) -> Shape:
    rank = max((len(shape) for shape in shapes), default=0)
    out: list[Index] = [1] * rank
    for shape in shapes:
        for d, n in enumerate(shape, rank - len(shape)):
            out[d] = n if n != 1 else out[d]
    return tuple(out)


def index(b: Builder, node: torch.fx.Node, x: Value, indices: list[Value | None]) -> Value:
    at = Advanced(b, x, indices)
    return read_at(x, at.shape, at.source)


def masked_index(b: Builder, node: torch.fx.Node, x: Value, mask: Value, indices: list[Value | None],
                 fill: Any) -> Value:
    """x[indices] where mask, else fill; positions are read only where mask holds."""
    at = Advanced(b, x, indices)
    mask = broadcast(mask, at.shape)
    return Value(at.shape, x.dtype, lambda idx: ex.masked(
        mask(idx), lambda: x(at.source(idx)), scalar_expr(fill, x.dtype)))


def bucketize(b: Builder, node: torch.fx.Node, x: Any, boundaries: Value, *, out_int32: bool = False,
              right: bool = False) -> Value:
    shape, out = b.meta(node)
    if not isinstance(x, Value):  # a number has the dtype of the boundaries, if that is of its kind
        whole = not isinstance(x, (float, Expr))
        alike = whole or boundaries.dtype.is_floating_point
        x = constant(x, (), boundaries.dtype if alike else torch.get_default_dtype())
    return search(boundaries, x, (), shape, out, right)


def searchsorted(b: Builder, node: torch.fx.Node, boundaries: Value, x: Any, *, out_int32: bool = False,
                 right: bool = False, side: str | None = None, sorter: Value | None = None) -> Value:
    if sorter is not None or not isinstance(x, Value) or side not in (None, "left", "right"):
        raise Declined("searchsorted with a sorter, a number or an unknown side")
    shape, out = b.meta(node)
    return search(boundaries, x, boundaries.shape[:-1], shape, out, right or side == "right")


def search(boundaries: Value, x: Value, rows: Shape, shape: Shape, out: torch.dtype, right: bool) -> Value:
    """How many boundaries of its row are below (right: not above) each x: a binary search, whose steps halve
    what is left. Both are compared as they are stored: boundaries that were sorted have been."""
    count = boundaries.shape[-1]
    if not isinstance(count, int):
        raise Declined("search among a symbolic number of boundaries")
    wide = torch.promote_types(ex.compute_dtype(boundaries.dtype), ex.compute_dtype(x.dtype))

    def element(idx: Indices) -> Expr:
        value = ex.cast(ex.round_to(x(idx), x.dtype), wide)

        def below(at: Index) -> Expr:
            border = boundaries((*idx[:len(rows)], at))
            border = ex.cast(ex.round_to(border, boundaries.dtype), wide)
            # "not above" is said so that NaN sorts last, as torch sorts it.
            return s.lnot(border > value) if right else s.lnot(border >= value)

        found: Expr = s.const(0, torch.int32 if count < 1 << 31 else torch.int64)
        left = count  # those from `found` on among which the answer lies
        while left:
            step = (left + 1) // 2
            first = ix.of(ix.Opaque(found, count - step + 1)) if left < count else 0
            after = found + step if left < count else s.const(step, found.dtype)
            found = ex.where(below(first + (step - 1)), after, found)
            left -= step
        return ex.cast(found, out)

    return Value(shape, out, element)


# --- writing


def index_put(b: Builder, node: torch.fx.Node, x: Value, indices: list[Value | None], values: Value,
              accumulate: bool = False, *unsafe: Any) -> Value:
    masks = [i for i in indices if i is not None]
    values = convert(values, x.dtype)
    if len(masks) == 1 and indices[0] is masks[0] and masks[0].dtype == torch.bool and all(
            n == 1 for n in values.shape[:max(0, len(values.shape) - len(x.shape) + len(masks[0].shape))]):
        return put_where(x, masks[0], values, accumulate)
    at = Advanced(b, x, indices)
    values = broadcast(values, at.shape)
    mode: ScatterMode = "add" if accumulate else "set"
    return widened(b, x, mode, at.shape, lambda idx: (at.source(idx), values(idx)), unique=at.one)


def as_strided_scatter(b: Builder, node: torch.fx.Node, x: Value, src: Value, size: list[Index],
                       stride: list[Index], storage_offset: Index | None = None) -> Value:
    """x, with src at the positions of a strided window on the elements of x in the order of its memory."""
    order = memory_order(node, x.shape, size, stride, storage_offset)
    line = permuted(x, order)
    src = broadcast(convert(src, x.dtype), tuple(size))
    written = b.scatter(reshape(line, (ix.product(x.shape),)), tuple(size), lambda idx: (
        (position(idx, stride, storage_offset or 0),), src(idx)), "set")
    return permuted(reshape(written, line.shape), [order.index(d) for d in range(len(order))])


def put_where(x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """x[mask] = values, where every masked position gets the same values: a selection."""
    rank = len(mask.shape)
    trail = x.shape[rank:]
    values = reshape(values, values.shape[-len(trail):] if trail and values.shape else ())
    values = broadcast(values, trail)

    def element(idx: Indices) -> Expr:
        new = values(idx[rank:])
        return ex.where(mask(idx[:rank]), x(idx) + new if accumulate else new, x(idx))

    return Value(x.shape, x.dtype, element)


def put(
    b: Builder, node: torch.fx.Node, x: Value, index: Value, source: Value, accumulate: bool = False
) -> Value:
    """Elements written at positions of the flattened tensor."""
    flat = reshape(x, (ix.product(x.shape),))
    source = reshape(source, index.shape)
    out = widened(b, flat, "add" if accumulate else "set", index.shape,
                  lambda idx: ((lookup(b, index(idx), flat.shape[0], "put"),), source(idx)))
    return reshape(out, x.shape)


def masked_index_put(b: Builder, node: torch.fx.Node, x: Value, mask: Value, indices: list[Value | None],
                     values: Value) -> Value:
    """x with values added at the indices where mask; elsewhere zero is added at a position kept in range."""
    at = Advanced(
        b,
        x,
        [
            None
            if i is None
            else pointwise(
                lambda m, e: ex.where(m, e, 0),
                mask,
                i,
                shape=broadcast_shape([mask.shape, i.shape]),
                dtype=torch.int64,
            )
            for i in indices
        ],
    )
    mask, values = broadcast(mask, at.shape), broadcast(values, at.shape)
    return widened(b, x, "add", at.shape, lambda idx: (at.source(idx), ex.where(mask(idx), values(idx), 0)))


def embedding_backward(b: Builder, node: torch.fx.Node, grad: Value, indices: Value, num_weights: Index,
                       padding_idx: int, scale_grad_by_freq: bool) -> Value:
    if scale_grad_by_freq:
        raise Declined("embedding gradient scaled by frequency")
    shape, dtype = b.meta(node)

    def element(idx: Indices) -> tuple[Indices, Expr]:
        at = indices(idx[:-1])
        g = grad(idx)
        g = g if padding_idx < 0 else ex.where(s.eq(at, padding_idx), 0, g)
        return (lookup(b, at, num_weights, "embedding", wrap=False), idx[-1]), g

    return widened(b, zeros(shape, dtype), "add", grad.shape, element)


def along_dim(
    b: Builder, x: Value, dim: int, index: Value, src: Value, mode: ScatterMode, what: str
) -> Value:
    """scatter: element src[idx] goes to idx with its dim-th position replaced by index[idx]."""
    restore = x.shape
    x, index = with_rank(x), with_rank(index)
    src = with_rank(src)
    dim = wrap_dim(dim, len(x.shape))
    out = widened(b, x, mode, index.shape, lambda idx: (
        replaced(idx, dim, lookup(b, index(idx), x.shape[dim], what, wrap=False)), src(idx)),
        unique=index.shape[dim] == 1)
    return reshape(out, restore)


LEGACY_MODES: dict[str | None, ScatterMode] = {None: "set", "add": "add", "multiply": "mul"}


def scatter(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, src: Any, *,
            reduce: str | None = None) -> Value:
    src = convert(src, x.dtype) if isinstance(src, Value) else constant(src, index.shape, x.dtype)
    return along_dim(b, x, dim, index, src, LEGACY_MODES[reduce], "scatter")


def scatter_add(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, src: Value) -> Value:
    return along_dim(b, x, dim, index, src, "add", "scatter_add")


MODES: dict[str, ScatterMode] = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def scatter_reduce(
    b: Builder,
    node: torch.fx.Node,
    x: Value,
    dim: int,
    index: Value,
    src: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    def put(base: Value, what: Value, mode: ScatterMode) -> Value:
        return along_dim(b, base, dim, index, what, mode, "scatter_reduce")

    return combine(put, x, src, index.shape, reduce, include_self)


def index_reduce(
    b: Builder,
    node: torch.fx.Node,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    def put(base: Value, what: Value, mode: ScatterMode) -> Value:
        return along_index(b, base, dim, index, what, mode, "index_reduce")

    return combine(put, x, source, source.shape, reduce, include_self)


def combine(
    put: Callable[[Value, Value, ScatterMode], Value],
    x: Value,
    src: Value,
    extent: Shape,
    reduce: str,
    include_self: bool,
) -> Value:
    """A scatter with reduction. Without include_self, positions that get an element forget their own."""
    mode = MODES[reduce]
    if not include_self:
        kind = {"mean": "sum"}.get(reduce, reduce).removeprefix("a")
        hit = put(constant(False, x.shape, torch.bool), constant(True, extent, torch.bool), "set")
        neutral = constant(identity(kind, x.dtype), (), x.dtype)
        start = pointwise(
            lambda h, old, new: ex.where(h, new, old), hit, x, neutral, shape=x.shape, dtype=x.dtype
        )
    else:
        start = x
    total = put(start, src, mode)
    if reduce != "mean":
        return total
    ones = constant(1, extent, torch.int64)
    counts = put(constant(1 if include_self else 0, x.shape, torch.int64), ones, "add")
    floats = x.dtype.is_floating_point

    def average(t: Expr, n: Expr) -> Expr:
        n = ex.cast(s.maximum(n, 1), t.dtype)
        return t / n if floats else s.div_floor(t, n)

    return pointwise(average, total, counts, shape=x.shape, dtype=x.dtype)


def along_index(
    b: Builder, x: Value, dim: int, index: Value, src: Value, mode: ScatterMode, what: str
) -> Value:
    """Slices of src along dim go to the positions a vector names."""
    restore = x.shape
    x, src, index = with_rank(x), with_rank(src), with_rank(index)
    dim = wrap_dim(dim, len(x.shape))
    out = widened(
        b,
        x,
        mode,
        src.shape,
        lambda idx: (
            replaced(idx, dim, lookup(b, index((idx[dim],)), x.shape[dim], what, wrap=what == "index_fill")),
            src(idx),
        ),
        unique=index.shape[0] == 1,
    )
    return reshape(out, restore)


def index_add(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, source: Value, *,
              alpha: Any = 1) -> Value:
    source = pointwise(lambda e: scaled(e, alpha), source, shape=source.shape, dtype=x.dtype)
    return along_index(b, x, dim, index, source, "add", "index_add")


def index_copy(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, source: Value) -> Value:
    source = reshape(source, x.shape if not x.shape else source.shape)
    return along_index(b, x, dim, index, source, "set", "index_copy")


def index_fill(b: Builder, node: torch.fx.Node, x: Value, dim: int, index: Value, value: Any) -> Value:
    index = with_rank(index)
    shape = replaced(x.shape, wrap_dim(dim, len(x.shape)), index.shape[0]) if x.shape else index.shape
    src = (
        broadcast(convert(value, x.dtype), shape)
        if isinstance(value, Value)
        else constant(value, shape, x.dtype)
    )
    return along_index(b, x, dim, index, src, "set", "index_fill")


def rows() -> Iterator[Row]:
    aten = torch.ops.aten

    def rule(name: str, *overloads: Any, rule: Rule, moves: bool = False) -> Row:
        return row(name, *overloads, kind="index", rule=rule, moves=moves)

    yield rule("embedding", aten.embedding.default, rule=embedding, moves=True)
    yield rule("as_strided_scatter", aten.as_strided_scatter.default, rule=as_strided_scatter, moves=True)
    yield rule("embedding_backward", aten.embedding_dense_backward.default, rule=embedding_backward)
    yield rule("index_select", aten.index_select.default, rule=index_select, moves=True)
    yield rule("gather", aten.gather.default, rule=gather)
    yield rule("take", aten.take.default, rule=take)
    yield rule("index", aten.index.Tensor, aten._unsafe_index.Tensor, rule=index, moves=True)
    yield rule("masked_index", aten._unsafe_masked_index.default, rule=masked_index)
    yield rule("bucketize", aten.bucketize.Tensor, aten.bucketize.Scalar, rule=bucketize)
    yield rule("searchsorted", aten.searchsorted.Tensor, rule=searchsorted)
    yield rule("index_put", aten.index_put.default, aten._unsafe_index_put.default, rule=index_put)
    yield rule("masked_index_put", aten._unsafe_masked_index_put_accumulate.default, rule=masked_index_put)
    yield rule("put", aten.put.default, rule=put)
    yield rule(
        "scatter",
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        rule=scatter,
    )
    yield rule("scatter_add", aten.scatter_add.default, rule=scatter_add)
    yield rule("scatter_reduce", aten.scatter_reduce.two, rule=scatter_reduce)
    yield rule("index_add", aten.index_add.default, rule=index_add)
    yield rule("index_copy", aten.index_copy.default, rule=index_copy)
    yield rule("index_fill", aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, rule=index_fill)
    yield rule("index_reduce", aten.index_reduce.default, rule=index_reduce)
