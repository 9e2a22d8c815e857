"""Reductions along the second dim of a tile, and how two of their values join."""

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
def join_moments(mean, m2, n, other_mean, other_m2, other_n):
    """Mean, sum of squared deviations and count of two sets of numbers together (Chan et al., 1979)."""
    total = n + other_n
    share = tl.where(total > 0, other_n / tl.where(total > 0, total, 1), 0)
    away = other_mean - mean
    return mean + away * share, m2 + other_m2 + away * away * n * share, total


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
    """(mean, m2) of partial (mean, m2, count)."""
    mean, m2, n = tl.reduce((mean, m2, n), 1, join_moments, keep_dims=True)
    return mean, m2
