"""Calls that raise while they run, as compiled ones must: an index out of range, an integer divisor of 0.
Code that has no check for them reads or writes where it must not, and says nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .cases import Case

# Operators that eager checks the indices of, in the database's names.
INDEXED = frozenset(
    """__getitem__ gather index_add index_copy index_fill index_put index_reduce.amax
    index_select nn.functional.cross_entropy nn.functional.embedding nn.functional.nll_loss put scatter
    scatter_add scatter_reduce.sum take take_along_dim""".split()
)
DIVIDING = frozenset("div.floor_rounding div.trunc_rounding floor_divide fmod remainder".split())
FAR = 1_000_000


def refused(op: str, dtype: torch.dtype, cases: Sequence[Case]) -> Iterator[Case]:
    """Of an operator's cases, those that show what it must refuse: one for each way."""
    if op in INDEXED and dtype == torch.float32:
        found = next(((c, k) for c in cases if (k := _index(c)) is not None), None)
        if found is not None:
            case, k = found
            for name, value in (("high", FAR), ("low", -FAR)):
                moved = case.tensors[k].clone()
                moved.view(-1)[-1] = value
                yield _with(case, k, moved, f"refused_{name}")
    if op in DIVIDING and dtype == torch.int64:
        by_tensor = next((c for c in cases if len(c.tensors) > 1 and c.tensors[1].numel() > 1), None)
        if by_tensor is not None:
            divisor = by_tensor.tensors[1].clone()
            divisor.view(-1)[-1] = 0
            yield _with(by_tensor, 1, divisor, "refused_zero")


def _index(case: Case) -> int | None:
    """Which of the tensors are indices, and can be changed."""
    tensors = enumerate(case.tensors)
    return next((k for k, t in tensors if t.dtype == torch.int64 and t.numel() and t.is_contiguous()), None)


def _with(case: Case, k: int, tensor: torch.Tensor, name: str) -> Case:
    tensors = (*case.tensors[:k], tensor, *case.tensors[k + 1 :])
    return dataclasses.replace(case, id=f"{case.id}:{name}", tensors=tensors, refused=True)
