"""The vocabulary in which scalar bodies of the op table are written: one function per primitive of ir.expr.
"""

from __future__ import annotations

from collections.abc import Callable

from dicp.ir.expr import Expr, Operand, binary, cast, const, round_to, unary, where

__all__ = ["cast", "const", "round_to", "where"]


def _unary(op: str) -> Callable[[Expr], Expr]:
    return lambda x: unary(op, x)


def _binary(op: str) -> Callable[[Operand, Operand], Expr]:
    return lambda x, y: binary(op, x, y)


neg, sabs, sign, sqrt, rsqrt, reciprocal = map(_unary, "neg abs sign sqrt rsqrt reciprocal".split())
exp, exp2, expm1, log, log2, log10, log1p = map(_unary, "exp exp2 expm1 log log2 log10 log1p".split())
sin, cos, tan, asin, acos, atan = map(_unary, "sin cos tan asin acos atan".split())
sinh, cosh, tanh, asinh, acosh, atanh = map(_unary, "sinh cosh tanh asinh acosh atanh".split())
erf, erfc, erfinv, lgamma, digamma, sigmoid = map(_unary, "erf erfc erfinv lgamma digamma sigmoid".split())
floor, ceil, trunc, round_even = map(_unary, "floor ceil trunc round_even".split())
isnan, isinf, signbit, lnot, bnot = map(_unary, "isnan isinf signbit lnot bnot".split())
div_trunc, div_floor, remainder, fmod, pow_, atan2 = map(
    _binary, "div_trunc div_floor remainder fmod pow atan2".split())
hypot, copysign, nextafter, minimum, maximum, fmin, fmax = map(
    _binary, "hypot copysign nextafter minimum maximum fmin fmax".split())
eq, ne, land, lor, lxor = map(_binary, "eq ne land lor lxor".split())
band, bor, bxor, shl, shr, gcd, lcm = map(_binary, "band bor bxor shl shr gcd lcm".split())


def like(value: float, x: Expr) -> Expr:
    """A constant of x's dtype."""
    return const(value, x.dtype)
