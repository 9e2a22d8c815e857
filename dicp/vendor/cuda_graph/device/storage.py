"""Numbers as memory holds them and kernels do not compute with: floats of sixteen and of eight bits.

The eight-bit ones are worked out with integers: as eager rounds them, and on every GPU.
"""

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """A bfloat16 or float16 as float32."""
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """A float32 rounded to the nearest bfloat16 or float16, even ones on ties."""
    return x.to(dtype)


@triton.jit
def round_to_float8(x, mantissa: tl.constexpr, bias: tl.constexpr, limit: tl.constexpr, over: tl.constexpr):
    """The bits of a float32 rounded to the nearest float of that many bits, even ones on ties; `over` from
    the magnitude with the bits `limit` on."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - mantissa
    odd = (size >> drop) & 1
    normal = (size - ((127 - bias) << 23) + ((1 << (drop - 1)) - 1) + odd) >> drop
    # a sum with this number has its last bit where the last one of a subnormal is
    base: tl.constexpr = (127 - bias + drop + 1) << 23
    shifted = size.to(tl.float32, bitcast=True) + tl.full([], base, tl.int32).to(tl.float32, bitcast=True)
    small = shifted.to(tl.int32, bitcast=True) - base
    result = tl.where(size < ((128 - bias) << 23), small, normal)
    result = tl.where(size >= limit, over, result)
    result = tl.where(size > 0x7F800000, 0x7F, result)
    return (result | sign).to(tl.uint8)


@triton.jit
def to_e4m3(x, over: tl.constexpr):
    """float8_e4m3fn, as a byte; `over` above 464, which still rounds to 448."""
    return round_to_float8(x, 3, 7, 0x43E80001, over)


@triton.jit
def to_e5m2(x):
    """float8_e5m2, as a byte."""
    return round_to_float8(x, 2, 15, 0x47800000, 0x7C)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3(x):
    """The float32 of a float8_e4m3fn, given as a byte."""
    byte = x.to(tl.int32)
    size = byte & 0x7F
    value = from_bits(size << 20) * from_bits(tl.full([], 247 << 23, tl.int32))
    bits = tl.where(size == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
    return from_bits(bits | ((byte & 0x80) << 24))


@triton.jit
def from_e5m2(x):
    """The float32 of a float8_e5m2, given as a byte."""
    byte = x.to(tl.int32)
    size = byte & 0x7F
    value = from_bits(size << 21) * from_bits(tl.full([], 239 << 23, tl.int32))
    bits = tl.where(size >= 0x7C, (size << 21) | 0x7F800000, value.to(tl.int32, bitcast=True))
    return from_bits(bits | ((byte & 0x80) << 24))
