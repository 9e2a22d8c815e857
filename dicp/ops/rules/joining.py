"""Tensors laid side by side, and tensors with a border around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Indices, Value
from dicp.ops import scalar as s
from dicp.ops.rules.indexing import widened, zeros
from dicp.ops.rules.pointwise import convert, scalar_expr
from dicp.ops.rules.views import inserted, reindexed, replaced, reshape, wrap_dim
from dicp.ops.table import Row, Rule, row

Part = tuple[Index, Expr]
"""Where a piece, or several that are the same constant, starts; what it is."""

CHAIN = 16
"""Pieces up to this many are asked for one after the other; of more, halves are, so that expressions are not
as deep as there are pieces: the steps of an unrolled loop may be thousands."""


MANY = 128
"""Pieces up to this many are one kernel; compilers take minutes over expressions of thousands."""


def cat(b: Builder, node: torch.fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    """Pieces side by side. Empty vectors are ignored whatever the rank, as torch does."""
    shape, dtype = b.meta(node)
    dim = wrap_dim(dim, len(shape))
    pieces = [convert(t, dtype) for t in tensors if t.shape != (0,) and t.shape[dim] != 0]
    if not pieces:
        return zeros(shape, dtype)
    bounds: list[Index] = [0]
    for p in pieces:
        bounds.append(bounds[-1] + p.shape[dim])
    if len(pieces) <= MANY or _different(pieces) <= MANY:
        return _side_by_side(pieces, bounds, shape, dtype, dim)
    made = zeros(shape, dtype)
    for first in range(0, len(pieces), MANY):
        last = min(first + MANY, len(pieces))
        made = _written(b, made, pieces[first:last], bounds[first : last + 1], dim)
    return made


def _different(pieces: list[Value]) -> int:
    """How many there are, neighbours that are the same constant counted once."""
    at_zero = [p((0,) * len(p.shape)) for p in pieces]
    same = sum(e.op == "const" and e == f for e, f in zip(at_zero, at_zero[1:], strict=False))
    return len(pieces) - same


def _written(b: Builder, base: Value, pieces: list[Value], bounds: list[Index], dim: int) -> Value:
    """The base with some pieces in their place: a kernel of their own."""
    extent = replaced(base.shape, dim, bounds[-1] - bounds[0])
    near = [at - bounds[0] for at in bounds]
    group = _side_by_side(pieces, near, extent, base.dtype, dim)
    return b.scatter(
        base, extent, lambda idx: (replaced(idx, dim, idx[dim] + bounds[0]), group(idx)), "set", unique=True
    )


def _side_by_side(
    pieces: list[Value], bounds: list[Index], shape: Indices, dtype: torch.dtype, dim: int
) -> Value:
    """Pieces between these bounds as one expression."""

    def element(idx: Indices) -> Expr:
        parts: list[Part] = []
        for start, piece in zip(bounds, pieces, strict=False):
            e = piece(replaced(idx, dim, idx[dim] - start))
            if not (parts and e.op == "const" and e == parts[-1][1]):
                parts.append((start, e))
        return _choice(idx[dim], parts, 0, len(parts) - 1)

    return Value(shape, dtype, element)


def _choice(at: Index, parts: list[Part], first: int, last: int) -> Expr:
    """What there is at a position from the first part to the end of the last."""
    if last - first >= CHAIN:
        middle = (first + last + 1) // 2
        behind = ex.masked(ex.at_least(at, parts[middle][0]), lambda: _choice(at, parts, middle, last), 0)
        return ex.masked(
            ex.less(at, parts[middle][0]), lambda: _choice(at, parts, first, middle - 1), behind
        )
    start, e = parts[last]
    found = e if last == 0 else ex.masked(ex.at_least(at, start), lambda: e, 0)
    for (start, e), (end, _) in zip(parts[first:last][::-1], parts[first + 1 : last + 1][::-1], strict=True):
        found = ex.masked(within(at, start, end), lambda e=e: e, found)  # type: ignore[misc]
    return found


def within(i: Index, start: Index, end: Index) -> Expr:
    """start <= i < end."""
    return s.land(ex.at_least(i, start), ex.less(i, end))


def stack(b: Builder, node: torch.fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    dim = dim % (len(tensors[0].shape) + 1)
    return cat(b, node, [reshape(t, inserted(t.shape, dim, 1)) for t in tensors], dim)


def pads_of(pad: list[Index], rank: int) -> list[tuple[Index, Index]]:
    """(before, after) of each dimension; the argument starts at the last one."""
    pairs = [(pad[k], pad[k + 1]) for k in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def constant_pad(b: Builder, node: torch.fx.Node, x: Value, pad: list[Index], value: Any = 0) -> Value:
    pads = pads_of(pad, len(x.shape))

    def element(idx: Indices) -> Expr:
        source = tuple(i - before for i, (before, _) in zip(idx, pads, strict=True))
        inside: Expr = ex.const(True, torch.bool)
        for i, n in zip(source, x.shape, strict=True):
            inside = s.land(inside, within(i, 0, n))
        return ex.masked(inside, lambda: x(source), scalar_expr(value, x.dtype))

    return Value(b.meta(node)[0], x.dtype, element)


Border = Callable[[Expr, Expr], Expr]


def reflected(i: Expr, last: Expr) -> Expr:
    """Position mirrored at 0 and at `last`."""
    return last - s.sabs(last - s.sabs(i))


def replicated(i: Expr, last: Expr) -> Expr:
    return s.minimum(s.maximum(i, 0), last)


def border_source(
    idx: Indices, sizes: tuple[Index, ...], pads: list[tuple[Index, Index]], border: Border
) -> Indices:
    """The position of the operand that each padded position shows."""
    out: list[Index] = []
    for i, n, (before, after) in zip(idx, sizes, pads, strict=True):
        if before == 0 and after == 0:
            out.append(i)
            continue
        at = border(ex.index_value(i - before), ex.index_value(n - 1))
        out.append(ix.of(ix.Opaque(at, n)))
    return tuple(out)


def bordered(border: Border) -> Rule:
    """The rule of a pad that shows elements of its operand."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, padding: list[Index]) -> Value:
        pads = pads_of(padding, len(x.shape))
        return reindexed(x, b.meta(node)[0], lambda idx: border_source(idx, x.shape, pads, border))

    return rule


def bordered_backward(border: Border) -> Rule:
    """The rule of its gradient: every padded position adds to the one it shows."""

    def rule(b: Builder, node: torch.fx.Node, grad: Value, x: Value, padding: list[Index]) -> Value:
        pads = pads_of(padding, len(x.shape))
        return widened(b, zeros(x.shape, grad.dtype), "add", grad.shape,
                       lambda idx: (border_source(idx, x.shape, pads, border), grad(idx)))

    return rule


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("cat", aten.cat.default, kind="index", rule=cat, moves=True)
    yield row("stack", aten.stack.default, kind="index", rule=stack, moves=True)
    yield row("constant_pad", aten.constant_pad_nd.default, kind="index", rule=constant_pad, moves=True)
    for name, border in (("reflection", reflected), ("replication", replicated)):
        forward = [getattr(aten, f"{name}_pad{n}d").default for n in (1, 2, 3)]
        backward = [getattr(aten, f"{name}_pad{n}d_backward").default for n in (1, 2, 3)]
        yield row(f"{name}_pad", *forward, kind="index", rule=bordered(border))
        yield row(f"{name}_pad_backward", *backward, kind="index", rule=bordered_backward(border))
