"""Pooling over windows. Backwards gather: each input position looks at the windows that may contain it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.kernel import identity
from dicp.ir.value import Builder, Indices, Shape, Value
from dicp.ops import scalar as s
from dicp.ops.rules.indexing import lookup, widened, zeros
from dicp.ops.rules.joining import within
from dicp.ops.rules.views import replaced, reshape
from dicp.ops.table import Declined, Row, Rule, row

# Windows up to this many elements are written out; larger ones become loops.
UNROLL = 32
GATHERED = 4
"""Windows of three dims that contain one position, up to which a gradient looks at them all: adding each
gradient where it belongs takes a fiftieth of the time of looking at 8 (scripts/operators.py)."""


def each(values: Any, n: int, default: list[int] | None = None) -> list[int]:
    """A setting of n dimensions, given once or for each."""
    values = [values] if isinstance(values, int) else list(values)
    if not values and default is not None:
        return default
    if not all(isinstance(v, int) for v in values):
        raise Declined("a window of symbolic size")
    return values * n if len(values) == 1 else values


class Windows:
    """Windows that slide over the last n dimensions of an operand of some shape."""

    def __init__(
        self, shape: Shape, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
    ) -> None:
        self.n, self.sizes = n, shape[len(shape) - n:]
        self.kernel = each(kernel, n)
        self.stride = each(stride, n, self.kernel)
        self.padding, self.dilation = each(padding, n), each(dilation, n)

    def split(self, idx: Indices) -> tuple[Indices, Indices]:
        """Leading and windowed part of an index."""
        return idx[:len(idx) - self.n], idx[len(idx) - self.n:]

    def start(self, o: Indices) -> Indices:
        """First position of window o, before the operand where there is padding."""
        return tuple(i * st - p for i, st, p in zip(o, self.stride, self.padding, strict=True))

    def position(self, o: Indices, k: Indices) -> Indices:
        return tuple(i + j * d for i, j, d in zip(self.start(o), k, self.dilation, strict=True))

    def element(self, x: Value, idx: Indices, k: Indices, other: Any) -> Expr:
        """Element k of the window, `other` where the window overhangs."""
        lead, o = self.split(idx)
        at = self.position(o, k)
        return ex.masked(all_within(at, self.sizes), lambda: x((*lead, *at)), other)

    def candidates(self, h: Indices, j: Indices, outputs: Shape) -> tuple[Expr, Indices]:
        """The j-th of the windows that may contain position h, and whether it exists."""
        o = tuple(ix.floordiv(i + p, st) - back
                  for i, p, st, back in zip(h, self.padding, self.stride, j, strict=True))
        return all_within(o, outputs), o

    @property
    def overlap(self) -> Shape:
        """How many windows can contain one position."""
        return tuple(-(-((k - 1) * d + 1) // st)
                     for k, d, st in zip(self.kernel, self.dilation, self.stride, strict=True))


def all_within(at: Indices, sizes: Shape) -> Expr:
    inside: Expr = ex.const(True, torch.bool)
    for i, n in zip(at, sizes, strict=True):
        inside = s.land(inside, within(i, 0, n))
    return inside


def total(
    b: Builder, shape: Shape, extent: Shape, dtype: torch.dtype, fn: Callable[[Indices, Indices], Expr]
) -> Value:
    """Sum of fn over a window, computed in dtype's compute dtype."""
    wide = ex.compute_dtype(dtype)
    if isinstance(ix.product(extent), int) and ix.product(extent) <= UNROLL:  # type: ignore[operator]
        def element(idx: Indices) -> Expr:
            out: Expr | None = None
            for k in points(extent):
                out = fn(idx, k) if out is None else out + fn(idx, k)
            return s.const(0, wide) if out is None else out

        return Value(shape, dtype, element)
    out = b.reduce("sum", shape, extent, wide, fn)
    return Value(shape, dtype, out.fn)


def points(extent: Shape) -> Iterator[Indices]:
    return itertools.product(*(range(n) for n in extent))  # type: ignore[arg-type]


def best(b: Builder, x: Value, shape: Shape, extent: Shape, element: Callable[[Indices, Indices], Expr],
         position: Callable[[Indices, Indices], Expr], first: Callable[[Indices], Expr],
         ) -> tuple[Value, Value]:
    """Largest element of each window, and where: the first of equals, `first` if none is above the lowest."""
    if ix.product(extent) > UNROLL:  # type: ignore[operator]
        values = b.reduce("max", shape, extent, x.dtype, element)
        where = b.reduce("argmax", shape, extent, torch.int64, element)
        return values, Value(shape, torch.int64, lambda idx: position(
            idx, ix.delinearize(ix.of(ix.Opaque(where(idx), ix.product(extent))), extent)))

    def largest(idx: Indices) -> Expr:
        out: Expr = s.const(identity("max", x.dtype), ex.compute_dtype(x.dtype))
        for k in points(extent):
            out = s.maximum(out, element(idx, k))
        return out

    def place(idx: Indices) -> Expr:
        top: Expr = s.const(identity("max", x.dtype), ex.compute_dtype(x.dtype))
        out = first(idx)
        for k in points(extent):
            e = ex.round_to(element(idx, k), x.dtype)
            better = s.lor(e > top, s.isnan(e)) if e.dtype.is_floating_point else e > top
            out, top = ex.where(better, position(idx, k), out), s.maximum(top, e)
        return out

    return Value(shape, x.dtype, largest), Value(shape, torch.int64, place)


def max_pool(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0,
             dilation: Any = 1, ceil_mode: bool = False) -> tuple[Value, ...]:
        w = Windows(x.shape, n, kernel_size, stride, padding, dilation)
        shape = tuple(b.index(m) for m in node.meta["val"][0].shape)

        def first(idx: Indices) -> Expr:
            at: Expr = s.const(0, torch.int64)
            for start, d, size in zip(w.start(w.split(idx)[1]), w.dilation, w.sizes, strict=True):
                missing = s.maximum(ex.index_value(-start), 0)
                inside = ex.index_value(start) + s.div_floor(missing + (d - 1), d) * d
                at = at * ex.index_value(size) + (ex.index_value(start) if ix.nonnegative(start) else inside)
            return at

        return best(
            b,
            x,
            shape,
            tuple(w.kernel),
            lambda idx, k: w.element(x, idx, k, identity("max", x.dtype)),
            lambda idx, k: ex.index_value(ix.linearize(w.position(w.split(idx)[1], k), w.sizes)),
            first,
        )

    return rule


def max_pool_backward(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, grad: Value, x: Value, kernel_size: Any, stride: Any,
             padding: Any, dilation: Any, ceil_mode: bool, indices: Value) -> Value:
        w = Windows(x.shape, n, kernel_size, stride, padding, dilation)
        many = ix.product(w.overlap) > GATHERED  # type: ignore[operator]
        if any(d != 1 for d in w.dilation) or n == 3 and many:
            return by_position(b, grad, indices, x.shape, n)
        outputs = w.split(grad.shape)[1]

        def element(idx: Indices, j: Indices) -> Expr:
            lead, h = w.split(idx)
            exists, o = w.candidates(h, j, outputs)
            here = ex.index_value(ix.linearize(h, w.sizes))
            return ex.masked(exists, lambda: ex.where(
                s.eq(indices((*lead, *o)), here), grad((*lead, *o)), 0), 0)

        return total(b, x.shape, w.overlap, grad.dtype, element)

    return rule


def by_position(b: Builder, grad: Value, indices: Value, shape: Shape, n: int) -> Value:
    """Each gradient added at the position of its plane that `indices` names."""
    lead = shape[:len(shape) - n]
    size = ix.product(shape[len(shape) - n:])
    out = widened(b, zeros((*lead, size), grad.dtype), "add", grad.shape, lambda idx: (
        (*idx[:len(idx) - n], lookup(b, indices(idx), size, "max_pool")), grad(idx)))
    return reshape(out, shape)


def max_unpool(n: int) -> Rule:
    """Each value at the position of its plane that `indices` names. torch's decomposition would take a
    position beyond the plane for one of the next."""
    def rule(b: Builder, node: torch.fx.Node, x: Value, indices: Value, *settings: Any) -> Value:
        shape, _ = b.meta(node)
        lead, size = shape[:len(shape) - n], ix.product(shape[len(shape) - n:])
        out = widened(b, zeros((*lead, size), x.dtype), "set", x.shape, lambda idx: (
            (*idx[:len(idx) - n], lookup(b, indices(idx), size, "max_unpool", False)), x(idx)))
        return reshape(out, shape)

    return rule


def adaptive_max_pool_backward(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, grad: Value, x: Value, indices: Value) -> Value:
        return by_position(b, grad, indices, x.shape, n)

    return rule


def divisor(w: Windows, o: Indices, dtype: torch.dtype, include_pad: bool, override: int | None) -> Expr:
    """How many elements a window counts: those in the operand, with its padding if included."""
    if override is not None:
        return s.const(override, dtype)
    out: Expr = s.const(1, torch.int64)
    for start, k, size, pad in zip(w.start(o), w.kernel, w.sizes, w.padding, strict=True):
        low, high = (start, size + pad) if include_pad else (None, size)
        first = ex.index_value(start) if low is not None or ix.nonnegative(start) else s.maximum(
            ex.index_value(start), 0)
        end = ex.index_value(start + k)
        if not fits(start + k, high):
            end = s.minimum(end, ex.index_value(high))
        out = out * (end - first)
    return ex.cast(out, dtype)


def fits(end: Index, size: Index) -> bool:
    """Whether a window's end is known to lie within `size`, wherever the window is."""
    return ix.in_range(end - 1, size) or (isinstance(end, int) and isinstance(size, int) and end <= size)


def need_float(x: Value) -> None:
    if not x.dtype.is_floating_point:
        raise Declined(f"average pooling of {x.dtype}")


def avg_pool(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0,
             ceil_mode: bool = False, count_include_pad: bool = True,
             divisor_override: int | None = None) -> Value:
        need_float(x)
        w = Windows(x.shape, n, kernel_size, stride, padding)
        shape, dtype = b.meta(node)
        wide = ex.compute_dtype(dtype)
        sums = total(b, shape, tuple(w.kernel), wide, lambda idx, k: w.element(x, idx, k, 0))
        return Value(shape, dtype, lambda idx: sums(idx) / divisor(
            w, w.split(idx)[1], wide, count_include_pad, divisor_override))

    return rule


def avg_pool_backward(n: int) -> Rule:
    def rule(
        b: Builder,
        node: torch.fx.Node,
        grad: Value,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        need_float(x)
        w = Windows(x.shape, n, kernel_size, stride, padding)
        outputs = w.split(grad.shape)[1]
        wide = ex.compute_dtype(grad.dtype)

        def element(idx: Indices, j: Indices) -> Expr:
            lead, h = w.split(idx)
            exists, o = w.candidates(h, j, outputs)
            reach = tuple(i - start for i, start in zip(h, w.start(o), strict=True))
            inside = s.land(exists, all_within(reach, tuple(w.kernel)))
            return ex.masked(inside, lambda: grad((*lead, *o)) / divisor(
                w, o, wide, count_include_pad, divisor_override), 0)

        return total(b, x.shape, w.overlap, grad.dtype, element)

    return rule


class Adaptive:
    """Windows [floor(i*size/out), ceil((i+1)*size/out)): a dimension of `size` shared among `out` results."""

    def __init__(self, size: Index, out: Index) -> None:
        self.size, self.out = size, out
        quotient = 1 if size == out else ix.floordiv(size, out) if out == 1 or (
            isinstance(size, int) and isinstance(out, int) and out and size % out == 0) else None
        self.uniform: Index | None = quotient

    @property
    def longest(self) -> Index:
        """Size of the largest window, or more."""
        if self.uniform is not None:
            return self.uniform
        if not isinstance(self.size, int) or not isinstance(self.out, int):
            return ix.floordiv(self.size + self.out - 1, self.out) + 1
        return max(-(-(i + 1) * self.size // self.out) - i * self.size // self.out for i in range(self.out))

    @property
    def overlap(self) -> int:
        """How many windows can contain one position."""
        if self.uniform is not None:
            return 1
        if not isinstance(self.size, int) or not isinstance(self.out, int):
            raise Declined("gradient of adaptive pooling of a symbolic size")
        return max(-(-(h + 1) * self.out // self.size) - h * self.out // self.size for h in range(self.size))

    def start(self, i: Index) -> Index:
        return i * self.uniform if self.uniform is not None else ix.floordiv(i * self.size, self.out)

    def end(self, i: Index) -> Index:
        if self.uniform is not None:
            return self.start(i) + self.uniform
        return ix.floordiv((i + 1) * self.size + self.out - 1, self.out)

    def owner(self, h: Index) -> Index:
        """First window that contains position h."""
        return (
            ix.floordiv(h, self.uniform) if self.uniform is not None else ix.floordiv(h * self.out, self.size)
        )

    def holds(self, i: Index, h: Index) -> Expr:
        """Whether window i exists and contains position h."""
        if self.uniform is not None:
            return ex.const(True, torch.bool)
        return s.land(ex.less(i, self.out), within(h, self.start(i), self.end(i)))

    def containing(
        self, b: Builder, k: int, dtype: torch.dtype
    ) -> Callable[[Index], tuple[Expr, Index, Expr]]:
        """Of a position, the k-th of the windows that contain it: whether there is one, which it is, and the
        share that an element has of it. Where windows differ, kept for all positions; -1 stands for none."""
        def window(h: Index) -> Index:
            return self.owner(h) + k

        if self.uniform is not None:
            return lambda h: (self.holds(window(h), h), window(h), 1 / self.count(window(h), dtype))
        own = b.kept(Value((self.size,), torch.int32, lambda at: ex.cast(
            ex.where(self.holds(window(at[0]), at[0]), ex.index_value(window(at[0])), -1), torch.int32)))
        share = b.kept(Value((self.size,), dtype, lambda at: 1 / self.count(window(at[0]), dtype)))
        return lambda h: (own((h,)) >= 0, ix.of(ix.Opaque(own((h,)), self.out)), share((h,)))

    def count(self, i: Index, dtype: torch.dtype) -> Expr:
        return ex.cast(ex.index_value(self.end(i) - self.start(i)), dtype)


def adaptive(shape: Shape, outputs: Shape, n: int) -> list[Adaptive]:
    return [
        Adaptive(size, out)
        for size, out in zip(shape[len(shape) - n :], outputs[len(outputs) - n :], strict=True)
    ]


def elements(ws: list[Adaptive], o: Indices, dtype: torch.dtype) -> Expr:
    """How many elements window o has."""
    out: Expr = s.const(1, dtype)
    for w, i in zip(ws, o, strict=True):
        out = out * w.count(i, dtype)
    return out


def adaptive_element(ws: list[Adaptive], x: Value, idx: Indices, k: Indices, other: Any) -> Expr:
    lead, o = idx[:len(idx) - len(ws)], idx[len(idx) - len(ws):]
    at = tuple(w.start(i) + j for w, i, j in zip(ws, o, k, strict=True))
    inside: Expr = ex.const(True, torch.bool)
    for w, i, p in zip(ws, o, at, strict=True):
        inside = s.land(inside, w.holds(i, p))
    return ex.masked(inside, lambda: x((*lead, *at)), other)


def adaptive_avg_pool(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, x: Value, output_size: Any) -> Value:
        need_float(x)
        shape, dtype = b.meta(node)
        ws = adaptive(x.shape, shape, n)
        wide = ex.compute_dtype(dtype)
        sums = total(b, shape, tuple(w.longest for w in ws), wide,
                     lambda idx, k: adaptive_element(ws, x, idx, k, 0))
        return Value(shape, dtype, lambda idx: sums(idx) / elements(ws, idx[len(idx) - n:], wide))

    return rule


def adaptive_avg_pool_backward(n: int) -> Rule:
    """One dim after another: each window's gradient is shared out along rows, then whole rows are."""
    def rule(b: Builder, node: torch.fx.Node, grad: Value, x: Value) -> Value:
        need_float(x)
        wide = ex.compute_dtype(grad.dtype)
        for w, dim in reversed(list(zip(adaptive(x.shape, grad.shape, n), range(-n, 0), strict=True))):
            dim %= len(x.shape)
            grad = shared_out(b, w, grad, dim, wide)
            if dim > len(x.shape) - n and w.uniform is None:
                grad = b.kept(grad)
        return Value(x.shape, x.dtype, grad.fn)

    return rule


def shared_out(b: Builder, w: Adaptive, grad: Value, dim: int, dtype: torch.dtype) -> Value:
    """Each position of a dim has its share of the windows that contain it."""
    containing = [w.containing(b, k, dtype) for k in range(w.overlap)]

    def element(idx: Indices, k: Indices) -> Expr:
        exists, window, part = containing[k[0]](idx[dim])  # type: ignore[index]
        return ex.masked(exists, lambda: grad(replaced(idx, dim, window)) * part, 0)

    return total(b, replaced(grad.shape, dim, w.size), (w.overlap,), dtype, element)


def adaptive_max_pool(n: int) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, x: Value, output_size: Any) -> tuple[Value, ...]:
        shape = tuple(b.index(m) for m in node.meta["val"][0].shape)
        ws = adaptive(x.shape, shape, n)
        sizes = x.shape[len(x.shape) - n:]
        extent = tuple(w.longest for w in ws)
        if not isinstance(ix.product(extent), int):
            raise Declined("adaptive max pooling of a symbolic size")

        def position(idx: Indices, k: Indices) -> Expr:
            at = tuple(w.start(i) + j for w, i, j in zip(ws, idx[len(idx) - n:], k, strict=True))
            return ex.index_value(ix.linearize(at, sizes))

        return best(
            b,
            x,
            shape,
            extent,
            lambda idx, k: adaptive_element(ws, x, idx, k, identity("max", x.dtype)),
            position,
            lambda idx: position(idx, (0,) * n),
        )

    return rule


def rows() -> Iterator[Row]:
    aten = torch.ops.aten

    def rule(name: str, overload: Any, rule: Rule) -> Row:
        return row(name, overload, kind="reduction", rule=rule)

    for n in (2, 3):
        def op(name: str, n: int = n) -> Any:
            return getattr(aten, name.replace("#", f"{n}d")).default

        yield rule(f"max_pool{n}d", op("max_pool#_with_indices"), max_pool(n))
        yield rule(f"max_pool{n}d_backward", op("max_pool#_with_indices_backward"), max_pool_backward(n))
        yield rule(f"max_unpool{n}d", op("max_unpool#"), max_unpool(n))
        yield rule(f"avg_pool{n}d", op("avg_pool#"), avg_pool(n))
        yield rule(f"avg_pool{n}d_backward", op("avg_pool#_backward"), avg_pool_backward(n))
        yield rule(f"adaptive_avg_pool{n}d", op("_adaptive_avg_pool#"), adaptive_avg_pool(n))
        yield rule(f"adaptive_avg_pool{n}d_backward", op("_adaptive_avg_pool#_backward"),
                   adaptive_avg_pool_backward(n))
        yield rule(f"adaptive_max_pool{n}d", op("adaptive_max_pool#"), adaptive_max_pool(n))
        yield rule(f"adaptive_max_pool{n}d_backward", op("adaptive_max_pool#_backward"),
                   adaptive_max_pool_backward(n))
