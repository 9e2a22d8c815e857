"""Softmax and the normalisations: reductions, then elementwise work. Statistics are float32 or wider."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Value
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import constant, pointwise, retyped
from dicp.ops.rules.reductions import degrees, moments, reduce_over
from dicp.ops.rules.views import reindexed, reshape
from dicp.ops.table import Row, row


def shifted(b: Builder, x: Value, dim: int, wide: torch.dtype) -> Value:
    """x minus its largest element along a dimension: its exponential cannot overflow."""
    top = reduce_over(b, "max", x, dim, True, wide, lambda e: ex.cast(e, wide))
    return pointwise(lambda e, m: ex.cast(e, wide) - m, x, top, shape=x.shape, dtype=wide)


def softmax(b: Builder, node: torch.fx.Node, x: Value, dim: int, half_to_float: bool) -> Value:
    shape, out = b.meta(node)
    if 0 in shape:
        return constant(0, shape, out)
    low = shifted(b, x, dim, ex.compute_dtype(out))
    total = reduce_over(b, "sum", low, dim, True, low.dtype, s.exp)
    return pointwise(lambda e, t: s.exp(e) / t, low, total, shape=shape, dtype=out)


def log_softmax(b: Builder, node: torch.fx.Node, x: Value, dim: int, half_to_float: bool) -> Value:
    shape, out = b.meta(node)
    if 0 in shape:
        return constant(0, shape, out)
    low = shifted(b, x, dim, ex.compute_dtype(out))
    total = reduce_over(b, "sum", low, dim, True, low.dtype, s.exp)
    return pointwise(lambda e, t: e - s.log(t), low, total, shape=shape, dtype=out)


def softmax_backward(
    b: Builder, node: torch.fx.Node, grad: Value, y: Value, dim: int, input_dtype: Any
) -> Value:
    """y * (grad - sum(grad * y))."""
    shape, out = b.meta(node)
    wide = ex.compute_dtype(grad.dtype)
    weighted = pointwise(lambda g, e: g * e, grad, y, shape=shape, dtype=wide)
    total = reduce_over(b, "sum", weighted, dim, True, wide)
    return pointwise(lambda w, e, t: w - e * t, weighted, y, total, shape=shape, dtype=out)


def log_softmax_backward(
    b: Builder, node: torch.fx.Node, grad: Value, y: Value, dim: int, input_dtype: Any
) -> Value:
    """grad - exp(y) * sum(grad)."""
    shape, out = b.meta(node)
    wide = ex.compute_dtype(grad.dtype)
    total = reduce_over(b, "sum", grad, dim, True, wide)
    return pointwise(lambda g, e, t: g - s.exp(e) * t, grad, y, total, shape=shape, dtype=out)


def affine(
    x: Value, mean: Value, rstd: Value, weight: Value | None, bias: Value | None, dtype: torch.dtype
) -> Value:
    """(x - mean) * rstd * weight + bias, operands broadcast to x."""
    given = [w for w in (weight, bias) if w is not None]

    def element(e: Expr, m: Expr, r: Expr, *rest: Expr) -> Expr:
        y = (e - m) * r
        if weight is not None:
            y = y * rest[0]
        return y if bias is None else y + rest[-1]

    return pointwise(element, x, mean, rstd, *given, shape=x.shape, dtype=dtype)


def inverse_deviation(m2: Value, count: Index, eps: float) -> Value:
    n = degrees(count, 0, m2.dtype)
    return pointwise(lambda e: s.rsqrt(e / n + eps), m2, shape=m2.shape, dtype=m2.dtype)


def results(b: Builder, node: torch.fx.Node, *values: Value) -> tuple[Value, ...]:
    """Values with the shapes and dtypes that the op's fake implementation gives them."""
    out = []
    for x, val in zip(values, node.meta["val"], strict=True):
        shape = tuple(b.index(n) for n in val.shape)
        empty = shape == (0,) and x.shape != (0,)
        out.append(constant(0, shape, val.dtype) if empty else retyped(reshape(x, shape), val.dtype))
    return tuple(out)


def layer_norm(b: Builder, node: torch.fx.Node, x: Value, normalized_shape: list[Index], weight: Value | None,
               bias: Value | None, eps: float) -> tuple[Value, ...]:
    rank = len(x.shape)
    dims = list(range(rank - len(normalized_shape), rank))
    mean, m2, axes = moments(b, x, dims)
    rstd = axes.restore(inverse_deviation(m2, axes.count, eps))
    mean = axes.restore(mean)
    return results(b, node, affine(x, mean, rstd, weight, bias, x.dtype), mean, rstd)


def group_norm(
    b: Builder,
    node: torch.fx.Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: Index,
    c: Index,
    hxw: Index,
    group: int,
    eps: float,
) -> tuple[Value, ...]:
    split = reshape(x, (n, group, ix.floordiv(c, group), hxw))
    mean, m2, axes = moments(b, split, [2, 3])
    rstd = b.realize(inverse_deviation(m2, axes.count, eps))  # once a group, not at each of its elements
    scale = [None if w is None else per_channel(reshape(w, (group, ix.floordiv(c, group))), 4, (1, 2))
             for w in (weight, bias)]
    y = affine(split, axes.restore(mean), axes.restore(rstd), scale[0], scale[1], x.dtype)
    return results(b, node, y, mean, rstd)


def per_channel(w: Value, rank: int, dims: tuple[int, ...] = (1,)) -> Value:
    """w laid along some dimensions of a tensor of `rank`, size one elsewhere."""
    shape: list[Index] = [1] * rank
    for d, n in zip(dims, w.shape, strict=True):
        shape[d] = n
    return reindexed(w, tuple(shape), lambda idx: tuple(idx[d] for d in dims))


def batch_statistics(b: Builder, x: Value, eps: float) -> tuple[Value, Value, Value, Index]:
    """Mean, biased variance, reciprocal deviation of each channel, and how many elements a channel has."""
    mean, m2, axes = moments(b, x, [d for d in range(len(x.shape)) if d != 1])
    n = degrees(axes.count, 0, m2.dtype)
    var = pointwise(lambda e: e / n, m2, shape=m2.shape, dtype=m2.dtype)
    return mean, var, inverse_deviation(m2, axes.count, eps), axes.count


def batch_norm(b: Builder, node: torch.fx.Node, x: Value, weight: Value | None, bias: Value | None,
               running_mean: Value | None, running_var: Value | None, training: bool, momentum: float,
               eps: float) -> tuple[Value, ...]:
    """Output, saved mean and reciprocal deviation, then the running statistics where the op returns them."""
    wide = ex.compute_dtype(x.dtype)
    rank = len(x.shape)
    updated: list[Value] = []
    if training:
        mean, var, rstd, count = batch_statistics(b, x, eps)
        n, less = degrees(count, 0, wide), degrees(count, 1, wide)
        for old, new, fix in ((running_mean, mean, None), (running_var, var, (n, less))):
            if old is not None:
                updated.append(moving_average(old, new, momentum, fix))
        saved = [mean, rstd]
    else:
        assert running_mean is not None and running_var is not None
        mean = retyped(running_mean, wide)
        rstd = pointwise(
            lambda e: s.rsqrt(ex.cast(e, wide) + eps), running_var, shape=running_var.shape, dtype=wide
        )
        saved = [constant(0, (0,), x.dtype)] * 2
        updated = [running_mean, running_var]
    w, c = (None if v is None else per_channel(v, rank) for v in (weight, bias))
    y = affine(x, per_channel(mean, rank), per_channel(rstd, rank), w, c, x.dtype)
    wanted = len(node.meta["val"])
    extra = [constant(0, (0,), torch.uint8)] if wanted == 4 else updated
    return results(b, node, *[y, *saved, *extra][:wanted])


def moving_average(old: Value, new: Value, momentum: float, fix: tuple[Expr, Expr] | None) -> Value:
    """momentum * new + (1 - momentum) * old; `fix` (n, n - 1) makes a variance unbiased."""
    def element(o: Expr, e: Expr) -> Expr:
        e = e if fix is None else e * (fix[0] / fix[1])
        return e * momentum + o * (1 - momentum)

    return pointwise(element, old, new, shape=old.shape, dtype=old.dtype)


def batch_norm_inference(b: Builder, node: torch.fx.Node, x: Value, weight: Value | None, bias: Value | None,
                         running_mean: Value, running_var: Value, momentum: float,
                         eps: float) -> tuple[Value, ...]:
    return batch_norm(b, node, x, weight, bias, running_mean, running_var, False, momentum, eps)


def batch_norm_no_stats(b: Builder, node: torch.fx.Node, x: Value, weight: Value | None, bias: Value | None,
                        training: bool, momentum: float, eps: float) -> tuple[Value, ...]:
    return batch_norm(b, node, x, weight, bias, None, None, True, momentum, eps)


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("softmax", aten._softmax.default, kind="composite", rule=softmax)
    yield row("log_softmax", aten._log_softmax.default, kind="composite", rule=log_softmax)
    yield row(
        "softmax_backward", aten._softmax_backward_data.default, kind="composite", rule=softmax_backward
    )
    yield row("log_softmax_backward", aten._log_softmax_backward_data.default, kind="composite",
              rule=log_softmax_backward)
    yield row("layer_norm", aten.native_layer_norm.default, kind="composite", rule=layer_norm)
    yield row("group_norm", aten.native_group_norm.default, kind="composite", rule=group_norm)
    yield row(
        "batch_norm", aten._native_batch_norm_legit_functional.default, kind="composite", rule=batch_norm
    )
    yield row("batch_norm_no_stats", aten._native_batch_norm_legit.no_stats, kind="composite",
              rule=batch_norm_no_stats)
    yield row("batch_norm_inference", aten._native_batch_norm_legit_no_training.default, kind="composite",
              rule=batch_norm_inference)
