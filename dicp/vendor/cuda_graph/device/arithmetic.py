"""Arithmetic on numbers: what Triton has no infix operator for, or does otherwise than eager.

Division and square root are correctly rounded, as in eager.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def div(x, y):
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def reciprocal(x):
    one = tl.full([], 1, x.dtype)
    return tl.div_rn(one, x) if x.dtype == tl.float32 else (one / x).to(x.dtype)


@triton.jit
def neg(x):
    """-x; Triton's own minus is 0 - x, which loses the sign of zero."""
    return x * -1 if x.dtype.is_floating() else -x


@triton.jit
def absolute(x):
    return tl.abs(x)


@triton.jit
def sign(x):
    zero = tl.full([], 0, x.dtype)
    up = tl.where(x > zero, tl.full([], 1, x.dtype), zero)
    return up - tl.where(x < zero, tl.full([], 1, x.dtype), zero)


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def fma(x, y, z):
    return tl.fma(x, y, z)


@triton.jit
def maximum(x, y):
    """The larger one; NaN wins."""
    if x.dtype.is_floating():
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x > y, x, y)


@triton.jit
def minimum(x, y):
    """The smaller one; NaN wins."""
    if x.dtype.is_floating():
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x < y, x, y)


@triton.jit
def fmax(x, y):
    """The larger one; a number wins over NaN."""
    return tl.where((x > y) | (y != y), x, y)


@triton.jit
def fmin(x, y):
    """The smaller one; a number wins over NaN."""
    return tl.where((x < y) | (y != y), x, y)


# -- quotients and rounding ----------------------------------------------------------------------------------


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def round_even(x):
    return libdevice.rint(x)


@triton.jit
def floor(x):
    return tl.floor(x)


@triton.jit
def ceil(x):
    return tl.ceil(x)


@triton.jit
def div_trunc(x, y):
    """The quotient rounded towards zero."""
    if x.dtype.is_floating():
        return trunc(div(x, y))
    else:
        return x // y


@triton.jit
def div_floor(x, y):
    """The quotient rounded down, by way of the exact remainder as torch does it."""
    if x.dtype.is_floating():
        rest = libdevice.fmod(x, y)
        zero = tl.full([], 0, x.dtype)
        quotient = div(x - rest, y)
        quotient = tl.where((rest != zero) & ((rest < zero) != (y < zero)), quotient - 1, quotient)
        down = tl.floor(quotient)
        down = tl.where(quotient - down > 0.5, down + 1, down)
        signed_zero = libdevice.copysign(zero, div(x, y))
        down = tl.where(quotient == zero, signed_zero, down)
        return tl.where(y == zero, div(x, y), down)
    else:
        quotient = x // y
        rest = x - quotient * y
        zero = tl.full([], 0, x.dtype)
        off = (rest != zero) & ((rest < zero) != (y < zero))
        return tl.where(off, quotient - tl.full([], 1, x.dtype), quotient)


@triton.jit
def remainder(x, y):
    """What is left of x after div_floor; it has y's sign."""
    if x.dtype.is_floating():
        rest = libdevice.fmod(x, y)
    else:
        rest = x % y
    zero = tl.full([], 0, x.dtype)
    return tl.where((rest != zero) & ((rest < zero) != (y < zero)), rest + y, rest)


@triton.jit
def fmod(x, y):
    if x.dtype.is_floating():
        return libdevice.fmod(x, y)
    else:
        return x % y


@triton.jit
def floor_index(x, n):
    """x // n rounded down, for an index that may be negative."""
    quotient = x // n
    return tl.where(x - quotient * n < 0, quotient - 1, quotient)


@triton.jit
def mod_index(x, n):
    """x - n * floor_index(x, n)."""
    rest = x % n
    return tl.where(rest < 0, rest + n, rest)


# -- integers ------------------------------------------------------------------------------------------------


@triton.jit
def gcd(x, y):
    a = tl.abs(x) + y * tl.full([], 0, x.dtype)
    b = tl.abs(y) + x * tl.full([], 0, x.dtype)
    zero = tl.full([], 0, x.dtype)
    for _ in range(93):  # Euclid's algorithm takes at most 92 steps on 64-bit integers
        done = b == zero
        rest = a % tl.where(done, tl.full([], 1, x.dtype), b)
        a, b = tl.where(done, a, b), tl.where(done, zero, rest)
    return a


@triton.jit
def lcm(x, y):
    g = gcd(x, y)
    one = tl.full([], 1, x.dtype)
    quotient = x // tl.where(g == 0, one, g)
    if x.dtype.primitive_bitwidth < 32:  # the product is one of ints, as in C
        return tl.abs(quotient.to(tl.int32) * y.to(tl.int32)).to(x.dtype)
    else:
        return tl.abs(quotient * y)


@triton.jit
def shl(x, y):
    """x << y; 0 where y is negative or not less than the width."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    zero = tl.full([], 0, x.dtype)
    return tl.where(inside, x << tl.where(inside, y, zero), zero)


@triton.jit
def shr(x, y):
    """x >> y, arithmetic; where y is negative or not less than the width the sign, which is 0 without one."""
    top = tl.full([], x.dtype.primitive_bitwidth - 1, x.dtype)
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    shifted = x >> tl.where(inside, y, top)
    if x.dtype.is_int_unsigned():
        return tl.where(inside, shifted, tl.full([], 0, x.dtype))
    else:
        return shifted


@triton.jit
def power(x, y):
    """x to the y; integers wrap, and a negative exponent gives what is left of 1 / x**-y after truncation."""
    if x.dtype.is_floating():
        return libdevice.pow(x, y)
    else:
        one = tl.full([], 1, x.dtype)
        zero = tl.full([], 0, x.dtype)
        result = x * zero + y * zero + one
        base = x + y * zero
        left = y + x * zero
        for _ in range(x.dtype.primitive_bitwidth):
            result = tl.where((left & one) != zero, result * base, result)
            base = base * base
            left = left >> one
        odd = (y & one) != zero
        inverse = tl.where(x == one, one, tl.where(x + one == zero, tl.where(odd, zero - one, one), zero))
        return tl.where(y < zero, inverse, result)


@triton.jit
def unknown(n):
    """An int32, of which the compiler does not know how large it is: a loop up to it is not unrolled as a
    whole."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.full([], n, tl.int32)], tl.int32, True, 1)


# -- the form of a number ------------------------------------------------------------------------------------


@triton.jit
def truth(x):
    """A condition, as it is."""
    return x


@triton.jit
def isnan(x):
    return x != x


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def signbit(x):
    return libdevice.signbit(x) != 0


@triton.jit
def copysign(x, y):
    return libdevice.copysign(x, y)


@triton.jit
def nextafter(x, y):
    return libdevice.nextafter(x, y)


# -- products ------------------------------------------------------------------------------------------------


@triton.jit
def dot(x, y, acc, precision: tl.constexpr):
    """acc + x @ y in float32; precision: what becomes of float32 operands, "ieee" or "tf32"."""
    return tl.dot(x, y, acc, input_precision=precision)
