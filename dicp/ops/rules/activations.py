"""Elementwise rows: activation functions and their backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir.expr import Expr
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import scalar_expr
from dicp.ops.table import Row, elementwise

INV_SQRT2 = math.sqrt(0.5)
GELU_TANH_SCALE = math.sqrt(2 / math.pi)
GELU_TANH_CUBIC = 0.044715


def gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        return 0.5 * x * (1 + s.tanh(GELU_TANH_SCALE * (x + GELU_TANH_CUBIC * x * x * x)))
    return 0.5 * x * (1 + s.erf(x * INV_SQRT2))


def gelu_backward(grad: Expr, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        t = s.tanh(GELU_TANH_SCALE * (x + GELU_TANH_CUBIC * x * x * x))
        inner = GELU_TANH_SCALE * (1 + 3 * GELU_TANH_CUBIC * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    density = s.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (0.5 * (1 + s.erf(x * INV_SQRT2)) + x * density)


def silu_backward(grad: Expr, x: Expr) -> Expr:
    sig = s.sigmoid(x)
    return grad * sig * (1 + x * (1 - sig))


def leaky_relu_backward(grad: Expr, x: Expr, negative_slope: float, self_is_result: bool = False) -> Expr:
    return s.where(x > 0, grad, grad * negative_slope)


def elu(x: Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    return s.where(x > 0, x * scale, s.expm1(x * input_scale) * (alpha * scale))


def elu_backward(
    grad: Expr, y: Expr, alpha: float, scale: float, input_scale: float, is_result: bool
) -> Expr:
    """Gradient of elu from its input, or (is_result) from its output; NaN where that is."""
    slope = alpha * scale
    below = (grad * input_scale * (y + slope) if is_result else
             grad * (input_scale * slope) * s.exp(y * input_scale))
    return s.where(y > 0, grad * scale, below)


def celu(x: Expr, alpha: float = 1.0) -> Expr:
    return elu(x, alpha, 1.0, 1.0 / alpha)


def softplus(x: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    scaled = x * beta
    return s.where(scaled > threshold, x, s.log1p(s.exp(scaled)) / beta)


def softplus_backward(grad: Expr, x: Expr, beta: float, threshold: float) -> Expr:
    z = s.exp(x * beta)
    return s.where(x * beta > threshold, grad, grad * z / (z + 1))


def mish_backward(grad: Expr, x: Expr) -> Expr:
    sig, t = s.sigmoid(x), s.tanh(s.log1p(s.exp(x)))
    return grad * (t + x * sig * (1 - t * t))


def hard_clip(x: Expr) -> Expr:
    """x + 3 limited to [0, 6]: the ramp of hardsigmoid and hardswish."""
    return s.minimum(s.maximum(x + 3, 0), 6)


def hardswish_backward(grad: Expr, x: Expr) -> Expr:
    """NaN where x is."""
    return s.where(x <= -3, 0.0, s.where(x >= 3, grad, grad * (x / 3 + 0.5)))


def softshrink(x: Expr, lambd: float = 0.5) -> Expr:
    """x moved towards zero by lambd; NaN stays."""
    return s.where(x > lambd, x - lambd, s.where(x < -lambd, x + lambd, x * 0))


def hardtanh(x: Expr, min_val: Any = -1, max_val: Any = 1) -> Expr:
    return s.minimum(s.maximum(x, scalar_expr(min_val, x.dtype)), scalar_expr(max_val, x.dtype))


def inside(x: Expr, low: float, high: float) -> Expr:
    """low < x < high; false for NaN."""
    return s.land(x > low, x < high)


def threshold(x: Expr, threshold: Any, value: Any) -> Expr:
    return s.where(x <= scalar_expr(threshold, x.dtype), scalar_expr(value, x.dtype), x)


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield elementwise("relu", aten.relu.default, body=lambda x: s.maximum(x, 0))
    yield elementwise("threshold", aten.threshold.default, body=threshold, stepped=True)
    yield elementwise("threshold_backward", aten.threshold_backward.default,
                      body=lambda grad, x, threshold: s.where(x <= threshold, 0, grad))
    yield elementwise("sigmoid", aten.sigmoid.default, body=s.sigmoid, promote="INT_TO_FLOAT")
    yield elementwise(
        "sigmoid_backward", aten.sigmoid_backward.default, body=lambda grad, y: grad * (1 - y) * y
    )
    yield elementwise("tanh_backward", aten.tanh_backward.default, body=lambda grad, y: grad * (1 - y * y))
    yield elementwise("gelu", aten.gelu.default, body=gelu)
    yield elementwise("gelu_backward", aten.gelu_backward.default, body=gelu_backward)
    yield elementwise("silu", aten.silu.default, body=lambda x: x * s.sigmoid(x))
    yield elementwise("silu_backward", aten.silu_backward.default, body=silu_backward)
    yield elementwise("mish", aten.mish.default, body=lambda x: x * s.tanh(s.log1p(s.exp(x))))
    yield elementwise("mish_backward", aten.mish_backward.default, body=mish_backward)
    yield elementwise("leaky_relu", aten.leaky_relu.default,
                      body=lambda x, negative_slope=0.01: s.where(x > 0, x, x * negative_slope))
    yield elementwise("leaky_relu_backward", aten.leaky_relu_backward.default, body=leaky_relu_backward)
    yield elementwise("elu", aten.elu.default, body=elu)
    yield elementwise("elu_backward", aten.elu_backward.default, body=elu_backward)
    yield elementwise("celu", aten.celu.default, body=celu)
    yield elementwise("softplus", aten.softplus.default, body=softplus)
    yield elementwise("softplus_backward", aten.softplus_backward.default, body=softplus_backward)
    yield elementwise("hardtanh", aten.hardtanh.default, body=hardtanh)
    yield elementwise(
        "hardtanh_backward",
        aten.hardtanh_backward.default,
        body=lambda grad, x, min_val, max_val: s.where(inside(x, min_val, max_val), grad, 0),
    )
    yield elementwise("hardsigmoid", aten.hardsigmoid.default, body=lambda x: hard_clip(x) / 6)
    yield elementwise("hardsigmoid_backward", aten.hardsigmoid_backward.default,
                      body=lambda grad, x: s.where(inside(x, -3, 3), grad / 6, 0))
    yield elementwise("hardswish", aten.hardswish.default, body=lambda x: x * hard_clip(x) / 6)
    yield elementwise("hardswish_backward", aten.hardswish_backward.default, body=hardswish_backward)
    yield elementwise("softshrink", aten.softshrink.default, body=softshrink)
    yield elementwise("hardshrink", aten.hardshrink.default, stepped=True,
                      body=lambda x, lambd=0.5: s.where(s.land(x >= -lambd, x <= lambd), 0, x))
    yield elementwise("shrink_backward", aten.softshrink_backward.default, aten.hardshrink_backward.default,
                      body=lambda grad, x, lambd: s.where(s.lor(x < -lambd, x > lambd), grad, 0))
    yield elementwise("native_dropout_backward", aten.native_dropout_backward.default, promote="INT_TO_FLOAT",
                      body=lambda grad, mask, scale: grad * (s.cast(mask, grad.dtype) * scale))
