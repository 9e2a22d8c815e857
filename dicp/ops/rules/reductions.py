"""Reductions over some or all dimensions of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Indices, ReduceKind, Shape, Value
from dicp.ops.rules.pointwise import retyped
from dicp.ops.table import Row, row


def reduced_dims(dim: Any, rank: int) -> tuple[int, ...]:
    """Dimensions a `dim` argument names, in order: all of them for None and []."""
    if dim is None or dim == []:
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(sorted({d % rank if rank else 0 for d in dims})) if rank else ()


def split_index(kept: tuple[int, ...], dims: tuple[int, ...], rank: int) -> Callable[[Indices, Indices], Indices]:
    """Joins an index over the kept and one over the reduced dimensions into an index of the operand."""

    def join(idx: Indices, r: Indices) -> Indices:
        out: list[Index] = [0] * rank
        for d, i in zip(kept, idx, strict=True):
            out[d] = i
        for d, i in zip(dims, r, strict=True):
            out[d] = i
        return tuple(out)

    return join


def reduce_over(b: Builder, kind: ReduceKind, x: Value, dim: Any, keepdim: bool, dtype: torch.dtype,
                fn: Callable[[Expr], Expr]) -> Value:
    """Reduce fn of x's elements over the dimensions of a `dim` argument."""
    rank = len(x.shape)
    dims = reduced_dims(dim, rank)
    kept = tuple(d for d in range(rank) if d not in dims)
    join = split_index(kept, dims, rank)
    if not dims:
        return Value(x.shape, dtype, lambda idx: ex.cast(fn(x(idx)), dtype))
    out = b.reduce(kind, tuple(x.shape[d] for d in kept), tuple(x.shape[d] for d in dims), dtype,
                   lambda idx, r: fn(x(join(idx, r))))
    return restore_dims(out, x.shape, dims) if keepdim else out


def restore_dims(x: Value, full: Shape, dims: tuple[int, ...]) -> Value:
    """Put the reduced dimensions back with size one."""
    kept = tuple(d for d in range(len(full)) if d not in dims)
    shape = tuple(1 if d in dims else n for d, n in enumerate(full))
    return Value(shape, x.dtype, lambda idx: x(tuple(idx[d] for d in kept)))


def sum_(b: Builder, node: torch.fx.Node, x: Value, dim: Any = None, keepdim: bool = False, *,
         dtype: torch.dtype | None = None) -> Value:
    out = b.meta(node)[1]
    return reduce_over(b, "sum", x, dim, keepdim, out, lambda e: ex.cast(e, out))


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("sum", aten.sum.default, aten.sum.dim_IntList, kind="reduction", rule=sum_)
