"""Special functions to all digits. Where ATen's own fp64 code has fewer, it cannot be the reference for fp64.
By mpmath, which sympy, a dependency of torch, brings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _polygamma(n: int, x: float) -> float:
    import mpmath

    return float(mpmath.polygamma(n, x))


# by operator: (x, further arguments of the call) -> value
FUNCTIONS: dict[str, Callable[..., float]] = {
    "digamma": lambda x: _polygamma(0, x),
    "special.polygamma.special_polygamma_n_0": lambda x, n: _polygamma(n, x),
    **{f"polygamma.polygamma_n_{k}": lambda x, n: _polygamma(n, x) for k in range(5)},
}


def refined(name: str, result: Any, x: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """An fp64 result of `name(x, *args)`, one of FUNCTIONS, with all its digits: what is infinite or NaN
    stays."""
    if not isinstance(result, torch.Tensor) or result.dtype != torch.float64:
        return result
    function = FUNCTIONS[name]
    values = [
        function(a, *args) if math.isfinite(a) and math.isfinite(r) else r
        for a, r in zip(x.flatten().tolist(), result.flatten().tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(result.shape)
