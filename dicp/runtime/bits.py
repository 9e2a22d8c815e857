"""Tensors whose elements are conjugates or negatives of what lies in memory.

torch marks such a tensor with a bit (`x.conj()`; `x.conj().imag`) and leaves the rest to who reads it. Native
code reads memory: an input that may have a bit is given to it as a tensor that has none.
"""

from __future__ import annotations

import torch


def has_bit(x: torch.Tensor) -> bool:
    return x.is_conj() or x.is_neg()


def plain(x: torch.Tensor) -> torch.Tensor:
    """x itself if it has no bit; else its elements in memory of their own, by the strides of x."""
    conj, neg = x.is_conj(), x.is_neg()
    if not (conj or neg):
        return x
    stored = x.detach()
    stored = stored._neg_view() if neg else stored
    stored = stored.conj() if conj else stored
    if x.numel() == 0:
        return stored
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = stored.as_strided((span,), (1,))  # with all that lies between: elements may share a place
    flat = flat.conj_physical() if conj else flat
    return (-flat if neg else flat).as_strided(x.shape, x.stride(), 0)


__all__ = ["has_bit", "plain"]
