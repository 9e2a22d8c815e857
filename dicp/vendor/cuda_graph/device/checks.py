"""Checks at run time: what fails raises a flag, which the host reads, and the kernel goes on with a harmless
value.
"""

import triton
import triton.language as tl


@triton.jit
def check(position, size, wrap: tl.constexpr, flag, live):
    """A run-time index, from the end when negative and `wrap`. Out of range: raises `flag`, becomes 0."""
    if wrap:
        position = tl.where(position < 0, position + size, position)
    bad = (position < 0) | (position >= size)
    tl.store(flag + (position * 0).to(tl.int32), 1, mask=bad & live)
    return tl.where(bad, 0, position)


@triton.jit
def nonzero(x, flag, live):
    """An integer divisor. Zero: raises `flag`, becomes 1."""
    bad = x == 0
    tl.store(flag + (x * 0).to(tl.int32), 1, mask=bad & live)
    return tl.where(bad, tl.full([], 1, x.dtype), x)
