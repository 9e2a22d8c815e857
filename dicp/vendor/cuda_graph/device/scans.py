"""Inclusive scans along the second dim of a tile, and how one goes on from the tile before."""

import triton
import triton.language as tl

from dicp.vendor.cuda_graph.device.arithmetic import maximum, minimum, neg
from dicp.vendor.cuda_graph.device.functions import log_add_exp
from dicp.vendor.cuda_graph.device.reductions import add, multiply


@triton.jit
def larger_last(x, i, y, j):
    """The larger with its position; the later of equals; NaN wins."""
    second = (y >= x) | (y != y)
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def smaller_last(x, i, y, j):
    """The smaller with its position; the later of equals; NaN wins."""
    second = (y <= x) | (y != y)
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def scan_sum(x):
    return tl.associative_scan(x, 1, add)


@triton.jit
def scan_prod(x):
    return tl.associative_scan(x, 1, multiply)


@triton.jit
def scan_max(x):
    return tl.associative_scan(x, 1, maximum)


@triton.jit
def scan_min(x):
    return tl.associative_scan(x, 1, minimum)


@triton.jit
def scan_logsumexp(x):
    return tl.associative_scan(x, 1, log_add_exp)


@triton.jit
def scan_argmax(x, position):
    return tl.associative_scan((x, position), 1, larger_last)


@triton.jit
def scan_argmin(x, position):
    return tl.associative_scan((x, position), 1, smaller_last)


@triton.jit
def continue_sum(before, x):
    return before + x


@triton.jit
def continue_prod(before, x):
    return before * x


@triton.jit
def continue_max(before, x):
    return maximum(before, x)


@triton.jit
def continue_min(before, x):
    return minimum(before, x)


@triton.jit
def continue_logsumexp(before, x):
    return log_add_exp(before, x)


@triton.jit
def continue_argmax(before, i, x, j):
    return larger_last(before, i, x, j)


@triton.jit
def continue_argmin(before, i, x, j):
    return smaller_last(before, i, x, j)


@triton.jit
def row_last(x, column, last):
    """The element of each row in column `last`, the sign of a zero too."""
    nothing = tl.full([], 0, x.dtype)
    if x.dtype.is_floating():
        nothing = neg(nothing)
    return tl.reduce(tl.where(column == last, x, nothing), 1, add, keep_dims=True)
