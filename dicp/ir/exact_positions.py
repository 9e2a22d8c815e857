"""Positions that are computed in floats, as torch does for images of another size, and exact.

    int(float(i) * 0.5), 0 <= i < 128   ->   i // 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dicp.ir import index as ix
from dicp.ir.index import Index

if TYPE_CHECKING:
    from dicp.ir.expr import Expr

Fraction = tuple[Index, int]
"""A numerator, and a denominator that is a power of two."""

_DIGITS = {torch.float32: 24, torch.float64: 53}
_STEPS = 8
"""How deep positions are, in operations: of what is shared, as repeated squares, each doubles the visits."""
_LEAST = 1 << 64
"""The largest denominator; sums of smaller parts would have to be asked for their range of exponents."""


def whole_part(x: Expr) -> Index | None:
    """The index that a float expression becomes as an integer. None where it is not known to be one: if some
    step on the way may round, or it may be negative."""
    found = _fraction(x)
    return None if found is None or not ix.nonnegative(found[0]) else ix.floordiv(*found)


def _fraction(x: Expr, steps: int = _STEPS) -> Fraction | None:
    if x.dtype not in _DIGITS or not steps:
        return None
    if x.op == "cast" and x.args[0].op == "index":
        found: Fraction | None = x.args[0].args[0], 1
    elif x.op == "const":
        found = x.args[0].as_integer_ratio() if abs(x.args[0]) < _LEAST else None
    elif x.op in ("add", "sub", "mul"):
        found = _combined(x.op, *(_fraction(a, steps - 1) for a in x.args))
    else:
        found = None
    return found if found is not None and _holds(x.dtype, found) else None


def _combined(op: str, a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return None
    if op == "mul":
        return a[0] * b[0], a[1] * b[1]
    den = max(a[1], b[1])
    left, right = a[0] * (den // a[1]), b[0] * (den // b[1])
    return (left + right if op == "add" else left - right), den


def _holds(dtype: torch.dtype, x: Fraction) -> bool:
    """Whether a float of the dtype is each of its values."""
    ends = [ix.limit(x[0], upper) for upper in (False, True)]
    return x[1] <= _LEAST and all(isinstance(n, int) and abs(n) < 1 << _DIGITS[dtype] for n in ends)


__all__ = ["whole_part"]
