"""Elementwise rows: functions of analysis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.ir.expr import Expr
from dicp.ir.value import Builder, Value
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import apply_body, bind
from dicp.ops.table import Declined, Row, elementwise, row

TO_FLOAT = """sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh
    cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma""".split()

EDGED = "asin acos acosh atanh erfinv".split()
"""Which are NaN beyond a number that rounding may give."""


def on_floats(fn: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """fn, which leaves integers as they are."""
    return lambda x: fn(x) if x.dtype.is_floating_point else x


def round_(x: Expr, decimals: int = 0) -> Expr:
    """x rounded half to even, at a decimal place."""
    if not x.dtype.is_floating_point:
        return x
    if decimals == 0:
        return s.round_even(x)
    ten = 10.0 ** abs(decimals)
    return s.round_even(x * ten) / ten if decimals > 0 else s.round_even(x / ten) * ten


def xlogy(x: Expr, y: Expr) -> Expr:
    """x * log(y), zero where x is zero, NaN where y is."""
    return s.where(s.isnan(y), y, s.where(s.eq(x, 0), 0, x * s.log(y)))


def xlog1py(x: Expr, y: Expr) -> Expr:
    """x * log1p(y), zero where x is zero, NaN where y is."""
    near = s.where(s.sabs(y) < 1e-30, y, s.log1p(y))  # vector libraries flush the subnormal ones
    return s.where(s.isnan(y), y, s.where(s.eq(x, 0), 0, x * near))


def logaddexp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)) without overflow."""
    same_inf = s.land(s.eq(x, y), s.isinf(x))
    return s.where(same_inf, x, s.maximum(x, y) + s.log1p(s.exp(-s.sabs(x - y))))


def logaddexp2(x: Expr, y: Expr) -> Expr:
    same_inf = s.land(s.eq(x, y), s.isinf(x))
    return s.where(same_inf, x, s.maximum(x, y) + s.log1p(s.exp2(-s.sabs(x - y))) * (1 / math.log(2)))


def logit(x: Expr, eps: float | None = None) -> Expr:
    if eps is not None:
        x = s.minimum(s.maximum(x, eps), 1 - eps)
    return s.log(x / (1 - x))


def logit_backward(grad: Expr, x: Expr, eps: float | None = None) -> Expr:
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    beyond = s.lor(x < low, x > high)
    return s.where(beyond, s.like(math.nan if eps is None else 0.0, x), grad / (x * (1 - x)))


def entr(x: Expr) -> Expr:
    """-x * log(x); zero at zero, -inf below."""
    return s.where(
        s.isnan(x), x, s.where(x > 0, -x * s.log(x), s.where(s.eq(x, 0), 0.0, s.like(-math.inf, x)))
    )


def sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x), one at zero."""
    return s.where(s.eq(x, 0), 1.0, s.sin(x * math.pi) / (x * math.pi))


def nextafter(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    """Steps of a low-precision dtype are not those of the float32 it is computed in."""
    shape, dtype = b.meta(node)
    if dtype.itemsize < 4:
        raise Declined(f"nextafter on {dtype}")
    return apply_body(s.nextafter, "DEFAULT", bind(node.target, args, kwargs), shape, dtype)


def rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    for name in TO_FLOAT:
        also = [getattr(prims, name).default] if hasattr(prims, name) else []
        yield elementwise(name, getattr(aten, name).default, *also, body=getattr(s, name),
                          promote="INT_TO_FLOAT", stepped=name in EDGED)
    for name in ("floor", "ceil", "trunc"):
        yield elementwise(name, getattr(aten, name).default, getattr(prims, name).default, stepped=True,
                          body=on_floats(getattr(s, name)))
    yield elementwise("round", aten.round.default, aten.round.decimals, body=round_, stepped=True)
    yield elementwise("frac", aten.frac.default, body=lambda x: x - s.trunc(x), stepped=True)
    yield elementwise("atan2", aten.atan2.default, body=s.atan2, promote="INT_TO_FLOAT")
    yield elementwise("hypot", aten.hypot.default, body=s.hypot)
    yield elementwise(
        "copysign", aten.copysign.Tensor, aten.copysign.Scalar, body=s.copysign, promote="INT_TO_FLOAT"
    )
    yield row("nextafter", aten.nextafter.default, kind="elementwise", rule=nextafter)
    yield elementwise("heaviside", aten.heaviside.default, stepped=True,
                      body=lambda x, values: s.where(s.eq(x, 0), values, s.cast(x > 0, values.dtype)))
    yield elementwise("xlogy", aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, body=xlogy,
                      promote="INT_TO_FLOAT")
    special = aten.special_xlog1py
    yield elementwise(
        "special_xlog1py",
        special.default,
        special.self_scalar,
        special.other_scalar,
        body=xlog1py,
        promote="INT_TO_FLOAT",
    )
    yield elementwise("logaddexp", aten.logaddexp.default, body=logaddexp)
    yield elementwise("logaddexp2", aten.logaddexp2.default, body=logaddexp2)
    yield elementwise(
        "logit", aten.logit.default, aten.special_logit.default, body=logit, promote="INT_TO_FLOAT",
        stepped=True,
    )
    yield elementwise("logit_backward", aten.logit_backward.default, body=logit_backward)
    yield elementwise("special_entr", aten.special_entr.default, body=entr, promote="INT_TO_FLOAT")
    yield elementwise("sinc", aten.sinc.default, body=sinc, promote="INT_TO_FLOAT")
    yield elementwise(
        "deg2rad", aten.deg2rad.default, body=lambda x: x * (math.pi / 180), promote="INT_TO_FLOAT"
    )
    yield elementwise(
        "rad2deg", aten.rad2deg.default, body=lambda x: x * (180 / math.pi), promote="INT_TO_FLOAT"
    )
    yield elementwise("special_ndtr", aten.special_ndtr.default, promote="INT_TO_FLOAT",
                      body=lambda x: 0.5 * s.erfc(-x * math.sqrt(0.5)))
