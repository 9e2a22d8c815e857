"""Views as index transforms: no element is computed or moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.value import Builder, Indices, Shape, Value
from dicp.ops.rules.pointwise import constant
from dicp.ops.table import Row, row


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


def _matching_ends(old: Shape, new: Shape, a: list[int], b: list[int], i: int, j: int) -> tuple[int, int] | None:
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

    return Value(shape, x.dtype, lambda idx: x(source(idx)))


def view(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Any op that only gives the elements of x, in row-major order, the shape of its result."""
    return reshape(x, b.meta(node)[0])


def permuted(x: Value, dims: tuple[int, ...]) -> Value:
    """x with dimension dims[k] as its k-th."""
    rank = len(x.shape)
    dims = tuple(d % rank for d in dims)
    where = [dims.index(d) for d in range(rank)]
    return Value(tuple(x.shape[d] for d in dims), x.dtype, lambda idx: x(tuple(idx[k] for k in where)))


def permute(b: Builder, node: torch.fx.Node, x: Value, dims: list[int]) -> Value:
    return permuted(x, tuple(dims))


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("view", aten.view.default, aten._unsafe_view.default, aten.reshape.default, kind="view", rule=view)
    yield row("permute", aten.permute.default, kind="view", rule=permute)
