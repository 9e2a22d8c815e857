"""Tensors made from sizes and numbers, and the triangular masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.value import Builder, Value
from dicp.ops.rules.pointwise import bind, constant, scalar_expr
from dicp.ops.table import Row, Rule, row


def filled(value: Any) -> Rule:
    """The rule of an op whose result has one value everywhere."""

    def rule(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
        return constant(value, *b.meta(node))

    return rule


def full(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    operands = dict(bind(node.target, args, kwargs).settings)
    return constant(operands["s"] if "s" in operands else operands["fill_value"], *b.meta(node))


def arange(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    """start + i * step, of integers both without their fractions. Whole numbers stay an index, so that
    indexing by the result is understood."""
    start, step = 0, 1
    if len(args) > 1:
        start, step = args[0], args[2] if len(args) > 2 else kwargs.get("step", 1)
    shape, dtype = b.meta(node)
    if not dtype.is_floating_point:
        start, step = (int(x) if isinstance(x, float) else x for x in (start, step))
    return ramp(start, step, shape, dtype)


def ramp(start: Any, step: Any, shape: tuple[Index, ...], dtype: torch.dtype) -> Value:
    whole = not any(isinstance(x, (float, Expr)) for x in (start, step))

    def element(idx: tuple[Index, ...]) -> Expr:
        if whole:
            return ex.cast(ex.index_value(idx[0] * step + start), dtype)
        i = ex.cast(ex.index_value(idx[0]), torch.float64)
        return ex.cast(scalar_expr(start, torch.float64) + i * scalar_expr(step, torch.float64), dtype)

    return Value(shape, dtype, element)


def iota(b: Builder, node: torch.fx.Node, length: Index, *, start: Any, step: Any, **kwargs: Any) -> Value:
    return ramp(start, step, *b.meta(node))


def linspace(b: Builder, node: torch.fx.Node, start: Any, end: Any, steps: Index, **kwargs: Any) -> Value:
    """Counted from the nearer end, so that both ends are exact."""
    shape, dtype = b.meta(node)
    kind = ex.compute_dtype(dtype) if dtype.is_floating_point else torch.float64
    if not dtype.is_floating_point:  # the ends are what the dtype holds of them
        start, end = (int(v) if isinstance(v, float) else v for v in (start, end))
    first, last = scalar_expr(start, kind), scalar_expr(end, kind)
    if steps == 1:
        return constant(start, shape, dtype)
    span = ex.cast(ex.index_value(steps - 1), kind)
    step = (last - first) / span

    def element(idx: tuple[Index, ...]) -> Expr:
        up = first + step * ex.cast(ex.index_value(idx[0]), kind)
        down = last - step * ex.cast(ex.index_value(steps - 1 - idx[0]), kind)
        return ex.cast(ex.where(ex.less(idx[0], steps // 2), up, down), dtype)

    return Value(shape, dtype, element)


def eye(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    shape, dtype = b.meta(node)
    return Value(shape, dtype, lambda idx: ex.cast(
        ex.binary("eq", ex.index_value(idx[0]), ex.index_value(idx[1])), dtype))


def triangle(lower: bool) -> Rule:
    """The rule of tril (lower) and triu: elements beyond the diagonal become zero."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, diagonal: Index = 0) -> Value:
        def element(idx: tuple[Index, ...]) -> Expr:
            across = ex.index_value(idx[-1]), ex.index_value(idx[-2] + diagonal)
            return ex.where(ex.binary("le" if lower else "ge", *across), x(idx), 0)

        return Value(x.shape, x.dtype, element)

    return rule


def rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    yield row(
        "full",
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.scalar_tensor.default,
        kind="factory",
        rule=full,
        moves=True,
    )
    yield row(
        "ones",
        aten.ones.default,
        aten.ones_like.default,
        aten.new_ones.default,
        kind="factory",
        rule=filled(1),
        moves=True,
    )
    # Eager leaves empty tensors undefined: zero is as good as anything, and reproducible.
    yield row("zeros", aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
              aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
              aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default,
              prims.empty_strided.default,
              kind="factory", rule=filled(0), moves=True)
    yield row(
        "arange", aten.arange.default, aten.arange.start, aten.arange.start_step, kind="factory", rule=arange
    )
    yield row("iota", prims.iota.default, kind="factory", rule=iota)
    yield row("linspace", aten.linspace.default, kind="factory", rule=linspace)
    yield row("eye", aten.eye.default, aten.eye.m, kind="factory", rule=eye)
    yield row("tril", aten.tril.default, kind="index", rule=triangle(lower=True))
    yield row("triu", aten.triu.default, kind="index", rule=triangle(lower=False))
