"""Operators over lists of tensors (`torch._foreach_*`, which optimizers call): one call for each element.

So each is lowered as the operator is that it repeats, and what follows on one element fuses with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

# Their elements' operators have the same names in torch, and take the same arguments.
_ALIKE = """abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 mm mul neg pow reciprocal round rsqrt sigmoid sign sin
    sinh sqrt sub tan tanh trunc""".split()


def _norm(x: Any, order: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(x, order, dtype=dtype)


def _maximum(x: Any, other: Any) -> Any:
    return torch.maximum(x, other) if isinstance(other, torch.Tensor) else torch.clamp_min(x, other)


def _minimum(x: Any, other: Any) -> Any:
    return torch.minimum(x, other) if isinstance(other, torch.Tensor) else torch.clamp_max(x, other)


_OTHERS: dict[str, Callable[..., Any]] = {
    "addcdiv": lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
    "copy": torch.ops.aten.copy.default,
    "max": torch.max,
    "maximum": _maximum,
    "minimum": _minimum,
    "norm": _norm,
    "zero": torch.zeros_like,
}


def decompositions() -> dict[OpOverload, Callable[..., list[Any]]]:
    """Of the functional overloads; not of factors in a tensor (`scalars`), whose values the call reads."""
    out: dict[OpOverload, Callable[..., list[Any]]] = {}
    for name, fn in {**{name: getattr(torch, name) for name in _ALIKE}, **_OTHERS}.items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)  # not each is in every torch
        for op in (getattr(packet, o) for o in (packet.overloads() if packet is not None else ())):
            arguments = op._schema.arguments
            in_tensor = any(a.name == "scalars" and str(a.type) == "Tensor" for a in arguments)
            if not op._schema.is_mutable and not in_tensor:
                lists = tuple(str(a.type).startswith("List[") for a in arguments)
                out[op] = _for_each(fn, lists)
    return out


def _for_each(fn: Callable[..., Any], lists: tuple[bool, ...]) -> Callable[..., list[Any]]:
    """lists: of each argument by position, whether it has an entry for each element."""

    def decomposed(*args: Any, **kwargs: Any) -> list[Any]:
        count = next(len(a) for a, many in zip(args, lists) if many)
        element = ([a[k] if many else a for a, many in zip(args, lists)] for k in range(count))
        return [fn(*of_one, **kwargs) for of_one in element]

    return decomposed


__all__ = ["decompositions"]
