"""Reductions along the second dim of a tile."""

import triton
import triton.language as tl

from dicp.vendor.cuda_graph.device.arithmetic import maximum, minimum
from dicp.vendor.cuda_graph.device.functions import exp
from dicp.vendor.cuda_graph.device.idioms import exp_below


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def row_sum(x):
    return tl.reduce(x, 1, add, keep_dims=True)


@triton.jit
def row_prod(x):
    return tl.reduce(x, 1, multiply, keep_dims=True)


@triton.jit
def row_max(x):
    return tl.reduce(x, 1, maximum, keep_dims=True)


@triton.jit
def row_min(x):
    return tl.reduce(x, 1, minimum, keep_dims=True)


@triton.jit
def row_argmax(x, position):
    """The first position of the largest; NaN wins."""
    return first_where((x == row_max(x)) | (x != x), position)


@triton.jit
def row_argmin(x, position):
    """The first position of the smallest; NaN wins."""
    return first_where((x == row_min(x)) | (x != x), position)


@triton.jit
def first_where(hit, position):
    """The smallest position of those hit; position: [1, R] or [X, R]."""
    beyond: tl.constexpr = (1 << (position.dtype.primitive_bitwidth - 1)) - 1
    return tl.min(tl.where(hit, position, beyond), 1, keep_dims=True)


@triton.jit
def row_moments(mean, m2, n):
    """Mean and sum of squared deviations of all, of those and counts of parts: [X, R], [X, R] and [1, R]."""
    total = row_sum(n)
    centre = row_sum(mean * (n / tl.where(total > 0, total, 1)))
    away = mean - centre
    return centre, row_sum(m2 + n * away * away)


# -- the maximum of a row and its sum of exp(x - maximum), in one pass ---------------------------------------


@triton.jit
def exponent_base(top):
    """What exponents are taken above: a maximum, 0 where nothing is above -inf yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def groups_max(x):
    """Over eight neighbours each: [X, R] to [X, R / 8]. A thread has them all."""
    return tl.reduce(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 2, maximum)


@triton.jit
def exp_of(x, top, SHORT: tl.constexpr):
    """exp(x - top), x not above top."""
    return exp_below(x, top) if SHORT else exp(x - top)


@triton.jit
def groups_sum_exp(x, base, SHORT: tl.constexpr):
    """Sums of exp(x - base) over eight neighbours each."""
    groups = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])
    return tl.reduce(exp_of(groups, base[:, :, None], SHORT), 2, add)


@triton.jit
def grow_softmax(top, total, x, SHORT: tl.constexpr):
    """The maxima of groups of places and their sums of exp(x - maximum), with a tile more."""
    new = maximum(top, groups_max(x))
    base = exponent_base(new)
    return new, total * exp_of(top, base, SHORT) + groups_sum_exp(x, base, SHORT)


@triton.jit
def row_softmax(top, total, SHORT: tl.constexpr):
    """The sum of exp(x - maximum) over rows, of those of their groups; as eager's, NaN where all are -inf."""
    most = row_max(top)
    found = row_sum(total * exp_of(top, exponent_base(most), SHORT))
    return tl.where(most == float("-inf"), float("nan"), found)
