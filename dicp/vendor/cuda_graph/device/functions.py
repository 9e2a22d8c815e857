"""Functions of one or two numbers: those of libdevice, which eager's own kernels use, by its names or
torch's, and what is made of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from dicp.vendor.cuda_graph.device.arithmetic import div, maximum


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def exp2_fast(x):
    """2**x of a float32 within 2 units of the last place; 0 where that is no normal number."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def reciprocal_fast(x):
    """1 / x of a float32 within a unit of the last place; 0 where that is no normal number."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


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
def rsqrt(x):
    return libdevice.rsqrt(x)


@triton.jit
def hypot(x, y):
    return libdevice.hypot(x, y)


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
def atan2(x, y):
    return libdevice.atan2(x, y)


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
