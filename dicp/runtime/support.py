"""What the Python function of a program calls, beside torch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch


def slots(n: int) -> tuple[Any, int]:
    array = (ctypes.c_int64 * n)()
    return array, ctypes.addressof(array)


def per_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with what it returned for the last sizes kept, as those of successive calls repeat."""
    return functools.lru_cache(maxsize=64)(function)


def within(
    lender: torch.Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of any dtype on the memory of another; offset and strides in its own elements."""
    window = torch.empty(0, dtype=dtype, device=lender.device)
    return window.set_(lender.untyped_storage(), offset, shape, strides)


def parts(t: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of what lies in memory, by views: AOTAutograd repeats those on an input,
    marks included, and would lose the mark of a tensor that only shares the memory."""
    return torch.view_as_real(t.conj() if t.is_conj() else t)


def apart(t: torch.Tensor) -> torch.Tensor:
    """t, not as a view of a tensor that only the library knows which made it: attention and products of three
    dims may answer so."""
    return t.detach() if t._is_view() else t


def placed(function: Callable[..., Any], t: torch.Tensor, *args: Any) -> Any:
    """What a function that counts places in the memory of t gives, of a copy that begins its memory: t is a
    window on memory shared with others."""
    own = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return function(own.copy_(t), *args)


def slice_bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """(first position, length) of a slice of n elements."""
    places = range(*slice(start, end, step).indices(n))
    return places.start, len(places)


def expect(t: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """t with the strides that the program was planned for."""
    if t.stride() == strides or t.dim() != len(shape):  # torch's fake unique_consecutive errs for a dim < 0
        return t
    if any(have != want and n > 1 for have, want, n in zip(t.stride(), strides, t.shape, strict=True)):
        for d, (want, n) in enumerate(zip(strides, t.shape, strict=True)):
            if want == 0 and n > 1:  # all its elements are one: those of a view of something expanded
                return expect(t.narrow(d, 0, 1), (*shape[:d], 1, *shape[d + 1 :]), strides).expand(t.shape)
        fresh = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
        return fresh.copy_(t)
    return t


def promised(
    t: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    broken: Callable[[str], Exception],
) -> torch.Tensor:
    """What a library gave, with the strides that the program was planned for. Raises what `broken` makes of
    the reason where it is no tensor of that size and dtype."""
    if isinstance(t, torch.Tensor) and t.dtype == dtype and t.shape == shape:
        return expect(t, shape, strides)
    is_now = f"{t.dtype} {list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
    raise broken(f"keeps {is_now}, where {dtype} {list(shape)} is due")


_PATTERN = 0x5A


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """Those of the elements, in no order."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    whole = last + 1 == t.numel()
    return (t.as_strided((t.numel(),), (1,)) if whole else t.contiguous()).view(torch.uint8)


def fill(t: torch.Tensor) -> None:
    """With what `written` knows again; only where the elements lie side by side."""
    _bytes(t).fill_(_PATTERN)


def written(t: torch.Tensor, broken: Callable[[str], Exception]) -> None:
    """Raises what `broken` makes of the reason where nothing has been written since `fill`."""
    found = _bytes(t)
    if found.numel() >= 8 and bool((found == _PATTERN).all()):
        raise broken("has `out` and wrote nothing")


__all__ = [
    "apart",
    "expect",
    "fill",
    "parts",
    "per_size",
    "placed",
    "promised",
    "slice_bounds",
    "slots",
    "within",
    "written",
]
