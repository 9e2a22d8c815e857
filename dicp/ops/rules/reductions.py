"""Reductions over some or all dimensions of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Indices, ReduceKind, Shape, Value
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import constant, convert, pointwise, retyped
from dicp.ops.table import Declined, Row, Rule, row


def reduced_dims(dim: Any, rank: int) -> tuple[int, ...]:
    """Dimensions a `dim` argument names, in order: all of them for None and []."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(sorted({d % rank for d in dims})) if rank else ()


class Axes:
    """The dimensions of an operand, sorted into kept and reduced ones."""

    def __init__(self, x: Value, dim: Any) -> None:
        rank = len(x.shape)
        self.full = x.shape
        self.reduced = reduced_dims(dim, rank)
        self.kept = tuple(d for d in range(rank) if d not in self.reduced)
        self.shape: Shape = tuple(x.shape[d] for d in self.kept)
        self.extent: Shape = tuple(x.shape[d] for d in self.reduced)

    @property
    def count(self) -> Index:
        """How many elements become one."""
        return ix.product(self.extent)

    def join(self, idx: Indices, r: Indices) -> Indices:
        """The operand's index from one over the kept and one over the reduced dimensions."""
        out: list[Index] = [0] * len(self.full)
        for d, i in zip((*self.kept, *self.reduced), (*idx, *r), strict=True):
            out[d] = i
        return tuple(out)

    def restore(self, x: Value, keepdim: bool = True) -> Value:
        """Put the reduced dimensions back with size one, if wanted."""
        if not keepdim or not self.reduced:
            return x
        shape = tuple(1 if d in self.reduced else n for d, n in enumerate(self.full))
        return Value(shape, x.dtype, lambda idx: x(tuple(idx[d] for d in self.kept)))


def reduce_over(b: Builder, kind: ReduceKind, x: Value, dim: Any, keepdim: bool, dtype: torch.dtype,
                fn: Callable[[Expr], Expr] = lambda e: e) -> Value:
    """Reduce fn of x's elements over the dimensions of a `dim` argument."""
    axes = Axes(x, dim)
    if not axes.reduced and kind not in ("argmax", "argmin"):
        if kind in ("any", "all"):
            return Value(x.shape, dtype, lambda idx: ex.cast(ex.cast(fn(x(idx)), torch.bool), dtype))
        return Value(x.shape, dtype, lambda idx: ex.cast(fn(x(idx)), dtype))
    if not axes.reduced:
        return constant(0, x.shape, dtype)
    out = b.reduce(kind, axes.shape, axes.extent, dtype, lambda idx, r: fn(x(axes.join(idx, r))))
    return axes.restore(out, keepdim)


def accumulating(kind: ReduceKind) -> Rule:
    """The rule of sum and prod: elements cast to the result's dtype first."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False, *,
             dtype: torch.dtype | None = None) -> Value:
        out = b.meta(node)[1]
        return reduce_over(b, kind, x, dim, keepdim, out, lambda e: ex.cast(e, out))

    return rule


def selecting(kind: ReduceKind) -> Rule:
    """The rule of amax, amin and max, min of everything."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        return reduce_over(b, kind, x, dim, keepdim, x.dtype)

    return rule


def truth(kind: ReduceKind) -> Rule:
    """The rule of any and all."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        out = b.meta(node)[1]
        return retyped(
            reduce_over(
                b, kind, x, dim, keepdim, torch.bool, lambda e: ex.cast(ex.round_to(e, x.dtype), torch.bool)
            ),
            out,
        )

    return rule


def position(kind: ReduceKind) -> Rule:
    """The rule of argmax and argmin. Elements are compared as stored: rounding can make two of them equal."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        out = reduce_over(b, kind, x, dim, keepdim, torch.int64, lambda e: ex.round_to(e, x.dtype))
        if dim is None and keepdim:
            return Value((1,) * len(x.shape), out.dtype, lambda idx: out(tuple(0 for _ in out.shape)))
        return out

    return rule


def with_position(best: ReduceKind, arg: ReduceKind) -> Rule:
    """The rule of max and min along a dimension: the value and its index."""

    def rule(
        b: Builder, node: torch.fx.Node, x: Value, dim: int, keepdim: bool = False
    ) -> tuple[Value, Value]:
        values = reduce_over(b, best, x, dim, keepdim, x.dtype)
        return values, reduce_over(b, arg, x, dim, keepdim, torch.int64, lambda e: ex.round_to(e, x.dtype))

    return rule


def mean(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False, *,
         dtype: torch.dtype | None = None) -> Value:
    shape, out = b.meta(node)
    wide = ex.compute_dtype(out)
    count = ex.cast(ex.index_value(Axes(x, dim).count), wide)
    total = reduce_over(b, "sum", x, dim, keepdim, wide, lambda e: ex.cast(e, wide))
    return pointwise(lambda e: e / count, total, shape=shape, dtype=out)


def moments(b: Builder, x: Value, dim: Any) -> tuple[Value, Value, Axes]:
    """Mean and sum of squared deviations over some dimensions, without them; in float32 or float64."""
    axes = Axes(x, dim)
    wide = ex.compute_dtype(x.dtype)
    if not axes.reduced:
        return retyped(x, wide), pointwise(lambda e: e - e, x, shape=x.shape, dtype=wide), axes
    average, m2 = b.welford(axes.shape, axes.extent, lambda idx, r: x(axes.join(idx, r)))
    return average, m2, axes


def degrees(count: Index, correction: Any, dtype: torch.dtype) -> Expr:
    """max(0, count - correction), the divisor of a variance."""
    correction = 1 if correction is None else correction
    if isinstance(count, int):
        return s.const(max(0.0, count - correction), dtype)
    return s.maximum(ex.cast(ex.index_value(count), dtype) - float(correction), 0.0)


def spread(root: bool, with_mean: bool) -> Rule:
    """The rule of var, std, var_mean and std_mean."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, *, correction: Any = None,
             keepdim: bool = False) -> Value | tuple[Value, Value]:
        average, m2, axes = moments(b, x, dim)
        divisor = degrees(axes.count, correction, m2.dtype)
        fn: Callable[[Expr], Expr] = (lambda e: s.sqrt(e / divisor)) if root else (lambda e: e / divisor)
        out = axes.restore(pointwise(fn, m2, shape=m2.shape, dtype=x.dtype), keepdim)
        return (out, axes.restore(retyped(average, x.dtype), keepdim)) if with_mean else out

    return rule


def vector_norm(
    b: Builder,
    node: torch.fx.Node,
    x: Value,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """(sum |x|^p)^(1/p), with its limits at p = 0 and at the infinities."""
    if not isinstance(ord, (int, float)):
        raise Declined("a power made of sizes")
    shape, out = b.meta(node)
    x = x if dtype is None else convert(x, dtype)
    wide = ex.compute_dtype(out)
    if ord != 0 and Axes(x, dim).count == 1:
        ord = 1  # whatever the power, the magnitude itself: it neither rounds nor overflows
    if ord in (math.inf, -math.inf):
        kind: ReduceKind = "max" if ord > 0 else "min"
        return reduce_over(b, kind, x, dim, keepdim, out, lambda e: s.sabs(ex.cast(e, wide)))
    inner: dict[Any, Callable[[Expr], Expr]] = {
        0: lambda e: ex.cast(s.ne(e, 0), wide), 1: s.sabs, 2: lambda e: e * e}
    general: Callable[[Expr], Expr] = lambda e: s.pow_(s.sabs(e), float(ord))  # noqa: E731
    fn = inner.get(ord, general)
    total = reduce_over(b, "sum", x, dim, keepdim, wide, lambda e: fn(ex.cast(e, wide)))
    if ord in (0, 1):
        return retyped(total, out)
    outer: Callable[[Expr], Expr] = s.sqrt if ord == 2 else lambda e: s.pow_(e, 1.0 / ord)
    return pointwise(outer, total, shape=shape, dtype=out)


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("sum", aten.sum.default, aten.sum.dim_IntList, kind="reduction", rule=accumulating("sum"))
    yield row("prod", aten.prod.default, aten.prod.dim_int, kind="reduction", rule=accumulating("prod"))
    yield row("mean", aten.mean.default, aten.mean.dim, kind="reduction", rule=mean)
    yield row("amax", aten.amax.default, aten.max.default, kind="reduction", rule=selecting("max"))
    yield row("amin", aten.amin.default, aten.min.default, kind="reduction", rule=selecting("min"))
    yield row("max", aten.max.dim, kind="reduction", rule=with_position("max", "argmax"))
    yield row("min", aten.min.dim, kind="reduction", rule=with_position("min", "argmin"))
    yield row("argmax", aten.argmax.default, kind="reduction", rule=position("argmax"))
    yield row("argmin", aten.argmin.default, kind="reduction", rule=position("argmin"))
    yield row("any", aten.any.default, aten.any.dim, aten.any.dims, kind="reduction", rule=truth("any"))
    yield row("all", aten.all.default, aten.all.dim, aten.all.dims, kind="reduction", rule=truth("all"))
    yield row("var", aten.var.correction, kind="reduction", rule=spread(root=False, with_mean=False))
    yield row("std", aten.std.correction, kind="reduction", rule=spread(root=True, with_mean=False))
    yield row("var_mean", aten.var_mean.correction, kind="reduction", rule=spread(root=False, with_mean=True))
    yield row("std_mean", aten.std_mean.correction, kind="reduction", rule=spread(root=True, with_mean=True))
    yield row("vector_norm", aten.linalg_vector_norm.default, kind="reduction", rule=vector_norm)
