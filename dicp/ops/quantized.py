"""Quantizing and dequantizing as torch.ao spells it in graphs (`quantized_decomposed`), taken apart so that
it fuses with what is before and behind it; and products of int8. The numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from dicp import compat

WHOLE = """quantize_per_tensor.default dequantize_per_tensor.default quantize_per_channel.default
    dequantize_per_channel.default quantize_per_token.default dequantize_per_token.default""".split()
"""Those whose definition in torch consists of tensor operations. That of groups of channels asks on the host
whether there is a NaN, and stays a call."""


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Of the ops that a process has: torch.ao defines them when it is loaded."""
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in WHOLE:
        op = _op(name)
        if op is not None and (inside := compat.composite(op)) is not None:
            found[op] = inside
    for name, by_tensors in (
        ("quantize_per_tensor.tensor", quantize_by_tensors),
        ("dequantize_per_tensor.tensor", dequantize_by_tensors),
    ):
        if (op := _op(name)) is not None:
            found[op] = by_tensors
    return found


def _op(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.quantized_decomposed, packet, None), overload, None)


def quantize_by_tensors(x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype) -> Any:
    """round(x / scale) + zero_point between low and high; scale and zero_point of one element, which torch's
    own definition has the host read. What it refuses is left to it."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not _fits(dtype, low, high):
        return NotImplemented
    if scale.numel() != 1 or zero_point.numel() != 1:
        return NotImplemented
    by = (1.0 / scale.double()).float().reshape(())
    return (torch.round(x.float() * by) + zero_point.float().reshape(())).clamp(low, high).to(dtype)


def dequantize_by_tensors(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype, *, out_dtype: Any = None
) -> Any:
    """(x - zero_point) * scale in float32; other results are left to torch's own definition."""
    if x.dtype != dtype or not _fits(dtype, low, high) or out_dtype not in (None, torch.float32):
        return NotImplemented
    if scale.numel() != 1 or zero_point.numel() != 1:
        return NotImplemented
    return (x.float() - zero_point.float().reshape(())) * scale.float().reshape(())


def _fits(dtype: torch.dtype, low: int, high: int) -> bool:
    if dtype not in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32):
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


EXACT_DEPTH = 1024
"""Products of two numbers of int8, 2^14 at the most, of which float32 holds every sum."""


def int_mm(a: Any, b: Any) -> Any:
    """[M, K] @ [K, N] of int8 as int32: products in float32, which are exact, of parts of the depth. Where
    the processor has no instruction for int8, ATen multiplies element by element."""
    if not isinstance(a.shape[1], int) or a.shape[1] == 0:
        return NotImplemented
    total: Any = None
    for k in range(0, a.shape[1], EXACT_DEPTH):
        left, right = a[:, k : k + EXACT_DEPTH], b[k : k + EXACT_DEPTH]
        part = (left.float() @ right.float()).int()
        total = part if total is None else total + part
    return total
