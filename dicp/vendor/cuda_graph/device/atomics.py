"""Scatters of the largest and the smallest, of floats: Triton's atomics compare the bits as integers, and so
lose NaN, which here wins as in eager: as the NaN that no number's bits are ahead of.

Numbers without a sign bit are in order as signed integers; those with one in the opposite order as unsigned.
"""

import triton
import triton.language as tl


@triton.jit
def spreads(where, value, live):
    """Whether the result is NaN: because of the value, or of what is in memory, which stays so once it is."""
    old = tl.load(where, mask=live, other=0)
    return (value != value) | (old != old)


@triton.jit
def atomic_max(where, value, live, signed: tl.constexpr, unsigned: tl.constexpr):
    """Into floats of `where`; signed, unsigned: the integers of their width."""
    top: tl.constexpr = (1 << (signed.primitive_bitwidth - 1)) - 1
    bits = tl.where(spreads(where, value, live), tl.full([], top, signed), value.to(signed, bitcast=True))
    words = where.to(tl.pointer_type(signed), bitcast=True)
    others = where.to(tl.pointer_type(unsigned), bitcast=True)
    tl.atomic_max(words, bits, mask=live & (bits >= 0), sem="relaxed")
    tl.atomic_min(others, bits.to(unsigned, bitcast=True), mask=live & (bits < 0), sem="relaxed")


@triton.jit
def atomic_min(where, value, live, signed: tl.constexpr, unsigned: tl.constexpr):
    """Into floats of `where`; signed, unsigned: the integers of their width."""
    bits = tl.where(spreads(where, value, live), tl.full([], -1, signed), value.to(signed, bitcast=True))
    words = where.to(tl.pointer_type(signed), bitcast=True)
    others = where.to(tl.pointer_type(unsigned), bitcast=True)
    tl.atomic_min(words, bits, mask=live & (bits >= 0), sem="relaxed")
    tl.atomic_max(others, bits.to(unsigned, bitcast=True), mask=live & (bits < 0), sem="relaxed")
