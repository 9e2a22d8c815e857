"""Tensors whose elements are conjugates or negatives of what lies in memory, or zeros that lie nowhere.

torch marks such a tensor (`x.conj()`; `x.conj().imag`; a gradient known to be zero) and leaves the rest to
who reads it. Native code reads memory: an input that may be marked is given to it as one that is not.
"""

from __future__ import annotations

import torch


def is_marked(x: torch.Tensor) -> bool:
    return x.is_conj() or x.is_neg() or x._is_zerotensor()


def plain(x: torch.Tensor) -> torch.Tensor:
    """x itself if it is not marked; else its elements in memory of their own, by the strides of x."""
    if not is_marked(x):
        return x
    if x._is_zerotensor():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
    conj, neg = x.is_conj(), x.is_neg()
    stored = x.detach()
    stored = stored._neg_view() if neg else stored
    stored = stored.conj() if conj else stored
    if x.numel() == 0:
        return stored
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = stored.as_strided((span,), (1,))  # with all that lies between: elements may share a place
    flat = flat.conj_physical() if conj else flat
    return (-flat if neg else flat).as_strided(x.shape, x.stride(), 0)


__all__ = ["is_marked", "plain"]
