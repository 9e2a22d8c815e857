"""What kernels call for combinations of operations (dicp.vendor.cuda_graph.idioms), in float32."""

import triton
import triton.language as tl

from dicp.vendor.cuda_graph.device.arithmetic import div
from dicp.vendor.cuda_graph.device.functions import exp2_fast, reciprocal_fast


@triton.jit
def exp_below(x, top):
    """exp(x - top), x not above top; off by (2 + |x - top|) / 2**23 of it at the most, of which rounding the
    difference may be a third."""
    return exp2_fast((x - top) * 1.4426950408889634)


@triton.jit
def share(part, total):
    """part / total, rounded as division is but for subnormal results; total: 1 or more, part: 1 or less."""
    scale = div(tl.full([], 1.0, tl.float32), total)
    quotient = part * scale
    return tl.fma(tl.fma(-quotient, total, part), scale, quotient)


@triton.jit
def one_plus_erf(x):
    """1 + erf(x) within 4e-7 of itself down to x = -1, within 4e-6 down to -6.

    It is erfc(-x). With t = 1 / (1 + 0.475 |x|), erfc(|x|) exp(x**2) / t is a polynomial of t: the one of
    degree 8 whose largest relative error, 4.4e-8, is least (found by reweighted least squares)."""
    t = reciprocal_fast(tl.fma(tl.abs(x), 0.475, tl.full([], 1.0, tl.float32)))
    p = tl.fma(t, -0.0477541908621788, tl.full([], 0.26531633734703064, tl.float32))
    p = tl.fma(p, t, tl.full([], -0.5411274433135986, tl.float32))
    p = tl.fma(p, t, tl.full([], 0.42149531841278076, tl.float32))
    p = tl.fma(p, t, tl.full([], -0.09736751765012741, tl.float32))
    p = tl.fma(p, t, tl.full([], 0.23517613112926483, tl.float32))
    p = tl.fma(p, t, tl.full([], 0.22727292776107788, tl.float32))
    p = tl.fma(p, t, tl.full([], 0.2690432369709015, tl.float32))
    p = tl.fma(p, t, tl.full([], 0.26794523000717163, tl.float32))
    away = p * t * exp2_fast(x * x * -1.4426950408889634)
    return tl.where(x < 0, away, 2 - away)


@triton.jit
def one_plus_tanh(x):
    """1 + tanh(x), which is 2 / (1 + exp(-2 x))."""
    return 2 * reciprocal_fast(1 + exp2_fast(x * -2.8853900817779268))
