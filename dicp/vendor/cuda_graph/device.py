"""Device functions that emitted kernels call as `d.<name>`: one per primitive of ir/expr.py that Triton has
no infix
operator for, and the reductions and scans along the second dim of a tile.

Functions from libdevice are those that eager's own kernels use. Division and square root are correctly
rounded, as
in eager.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

# -- arithmetic ----------------------------------------------------------------------------------------------


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
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def minimum(x, y):
    """The smaller one; NaN wins."""
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def fmax(x, y):
    """The larger one; a number wins over NaN."""
    return tl.where((x > y) | (y != y), x, y)


@triton.jit
def fmin(x, y):
    """The smaller one; a number wins over NaN."""
    return tl.where((x < y) | (y != y), x, y)


@triton.jit
def div_trunc(x, y):
    """The quotient rounded towards zero."""
    if x.dtype.is_floating():
        return trunc(div(x, y))
    else:
        return x // y


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
def fmod(x, y):
    if x.dtype.is_floating():
        return libdevice.fmod(x, y)
    else:
        return x % y


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
    """x >> y, arithmetic; the sign where y is negative or not less than the width."""
    top = tl.full([], x.dtype.primitive_bitwidth - 1, x.dtype)
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return x >> tl.where(inside, y, top)


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
def floor(x):
    return tl.floor(x)


@triton.jit
def ceil(x):
    return tl.ceil(x)


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


@triton.jit
def sigmoid(x):
    one = tl.full([], 1, x.dtype)
    return div(one, one + libdevice.exp(-x))


@triton.jit
def log_add_exp(x, y):
    top = maximum(x, y)
    away = tl.abs(x - y)
    same = (x == y) & (tl.abs(x) == float("inf"))
    return tl.where(same, x, top + libdevice.log1p(libdevice.exp(-away)))


@triton.jit
def digamma(x):
    """The derivative of lgamma: reflection for x < 0, recurrence up to 10, then the asymptotic series."""
    pi = 3.14159265358979323846
    zero = tl.full([], 0, x.dtype)
    below = x < 0
    pole = below & (x == libdevice.trunc(x))
    fraction = x - libdevice.trunc(x)
    reflected = tl.where(below, -pi / libdevice.tan(pi * tl.where(below, fraction, 0.5)), zero)
    z = tl.where(below, 1.0 - x, x).to(x.dtype)
    shifted = tl.where(z > 0, zero, zero)
    for _ in range(10):
        small = z < 10
        shifted = tl.where(small, shifted - 1.0 / tl.where(small, z, 1.0), shifted)
        z = tl.where(small, z + 1.0, z)
    w = 1.0 / (z * z)
    series = w * (
        8.33333333333333333333e-2
        - w
        * (
            8.33333333333333333333e-3
            - w
            * (
                3.96825396825396825397e-3
                - w
                * (
                    4.16666666666666666667e-3
                    - w
                    * (
                        7.57575757575757575758e-3
                        - w * (2.10927960927960927961e-2 - w * 8.33333333333333333333e-2)
                    )
                )
            )
        )
    )
    value = libdevice.log(z) - 0.5 / z - series + shifted + reflected
    value = tl.where(x == 0, libdevice.copysign(zero + float("inf"), x * -1), value)
    return tl.where(pole, float("nan"), value).to(x.dtype)


# -- functions of libdevice, by its own names or torch's -----------------------------------------------------


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def round_even(x):
    return libdevice.rint(x)


@triton.jit
def signbit(x):
    return libdevice.signbit(x) != 0


@triton.jit
def rsqrt(x):
    return libdevice.rsqrt(x)


@triton.jit
def copysign(x, y):
    return libdevice.copysign(x, y)


@triton.jit
def nextafter(x, y):
    return libdevice.nextafter(x, y)


@triton.jit
def hypot(x, y):
    return libdevice.hypot(x, y)


@triton.jit
def atan2(x, y):
    return libdevice.atan2(x, y)


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log2(x):
    return libdevice.log2(x)


@triton.jit
def log10(x):
    return libdevice.log10(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def erfinv(x):
    return libdevice.erfinv(x)


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x)


# -- memory --------------------------------------------------------------------------------------------------


@triton.jit
def widen(x):
    """A bfloat16 or float16 as float32."""
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """A float32 rounded to the nearest bfloat16 or float16, even ones on ties."""
    return x.to(dtype)


@triton.jit
def _to_float8(x, mantissa: tl.constexpr, bias: tl.constexpr, limit: tl.constexpr, over: tl.constexpr):
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
    return _to_float8(x, 3, 7, 0x43E80001, over)


@triton.jit
def to_e5m2(x):
    """float8_e5m2, as a byte."""
    return _to_float8(x, 2, 15, 0x47800000, 0x7C)


@triton.jit
def _float32(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3(x):
    """The float32 of a float8_e4m3fn, given as a byte."""
    byte = x.to(tl.int32)
    size = byte & 0x7F
    value = _float32(size << 20) * _float32(tl.full([], 247 << 23, tl.int32))
    bits = tl.where(size == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
    return _float32(bits | ((byte & 0x80) << 24))


@triton.jit
def from_e5m2(x):
    """The float32 of a float8_e5m2, given as a byte."""
    byte = x.to(tl.int32)
    size = byte & 0x7F
    value = _float32(size << 21) * _float32(tl.full([], 239 << 23, tl.int32))
    bits = tl.where(size >= 0x7C, (size << 21) | 0x7F800000, value.to(tl.int32, bitcast=True))
    return _float32(bits | ((byte & 0x80) << 24))


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


# -- products ------------------------------------------------------------------------------------------------


@triton.jit
def dot(x, y, acc, precision: tl.constexpr):
    """acc + x @ y in float32; precision: what becomes of float32 operands, "ieee" or "tf32"."""
    return tl.dot(x, y, acc, input_precision=precision)


# -- along the second dim of a tile --------------------------------------------------------------------------


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _larger_first(x, i, y, j):
    """The larger with its position; the smaller position of equals; NaN wins."""
    tie = (x == y) | ((x != x) & (y != y))
    second = (y > x) | ((y != y) & (x == x)) | (tie & (j < i))
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def _smaller_first(x, i, y, j):
    """The smaller with its position; the smaller position of equals; NaN wins."""
    tie = (x == y) | ((x != x) & (y != y))
    second = (y < x) | ((y != y) & (x == x)) | (tie & (j < i))
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def _larger_last(x, i, y, j):
    """The larger with its position; the later of equals; NaN wins."""
    second = (y >= x) | (y != y)
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def _smaller_last(x, i, y, j):
    """The smaller with its position; the later of equals; NaN wins."""
    second = (y <= x) | (y != y)
    return tl.where(second, y, x), tl.where(second, j, i)


@triton.jit
def _join_moments(mean, m2, n, other_mean, other_m2, other_n):
    """Mean, sum of squared deviations and count of two sets of numbers together (Chan et al., 1979)."""
    total = n + other_n
    share = tl.where(total > 0, other_n / tl.where(total > 0, total, 1), 0)
    away = other_mean - mean
    return mean + away * share, m2 + other_m2 + away * away * n * share, total


@triton.jit
def row_sum(x):
    return tl.reduce(x, 1, _add, keep_dims=True)


@triton.jit
def row_prod(x):
    return tl.reduce(x, 1, _multiply, keep_dims=True)


@triton.jit
def row_max(x):
    return tl.reduce(x, 1, maximum, keep_dims=True)


@triton.jit
def row_min(x):
    return tl.reduce(x, 1, minimum, keep_dims=True)


@triton.jit
def row_argmax(x, position):
    return tl.reduce((x, position), 1, _larger_first, keep_dims=True)[1]


@triton.jit
def row_argmin(x, position):
    return tl.reduce((x, position), 1, _smaller_first, keep_dims=True)[1]


@triton.jit
def row_moments(mean, m2, n):
    """(mean, m2) of partial (mean, m2, count)."""
    mean, m2, n = tl.reduce((mean, m2, n), 1, _join_moments, keep_dims=True)
    return mean, m2


@triton.jit
def scan_sum(x):
    return tl.associative_scan(x, 1, _add)


@triton.jit
def scan_prod(x):
    return tl.associative_scan(x, 1, _multiply)


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
    return tl.associative_scan((x, position), 1, _larger_last)


@triton.jit
def scan_argmin(x, position):
    return tl.associative_scan((x, position), 1, _smaller_last)


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
    return _larger_last(before, i, x, j)


@triton.jit
def continue_argmin(before, i, x, j):
    return _smaller_last(before, i, x, j)


@triton.jit
def row_last(x, column, last):
    """The element of each row in column `last`."""
    return tl.reduce(tl.where(column == last, x, tl.full([], 0, x.dtype)), 1, _add, keep_dims=True)
