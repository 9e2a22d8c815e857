"""Reductions along the second dim of a tile."""

import triton
import triton.language as tl

from dicp.vendor.cuda_graph.device.arithmetic import maximum, minimum


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
