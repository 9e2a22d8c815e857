"""Fake results of calls in less time than torch's dispatch of fake tensors takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _in_kernel

from dicp.compat import shares_memory

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def quick_fake(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The fake result of a view or product of fake tensors of known sizes, by its C++ Meta kernel and nothing
    around it: a tenth of the time that torch's dispatch of fake tensors takes. None for other calls."""
    if not isinstance(op, torch._ops.OpOverload) or not (op.is_view or op in _PRODUCTS) or kwargs:
        return None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    numbers = [n for a in args for n in (a if isinstance(a, (list, tuple)) else (a,))]
    if (
        not tensors
        or not all(type(t) is FakeTensor and _is_plain(t) for t in tensors)
        or len({(t.fake_mode, t.fake_device) for t in tensors}) != 1  # type: ignore[attr-defined]
        or any(isinstance(n, torch.SymInt) for n in numbers)
    ):
        return None
    mode, device = tensors[0].fake_mode, tensors[0].fake_device  # type: ignore[attr-defined]
    with _in_kernel(mode):
        found = op(*args)
    return FakeTensor(mode, found, device) if type(found) is torch.Tensor else None


class FakeCalls:
    """Fake results of calls that do not mutate. Calls that read alike, as those of a network's blocks, are
    computed once, and then answered with new tensors like that one's."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What op(*args, **kwargs) returns, and raises."""
        quick = quick_fake(op, args, kwargs)
        if quick is not None:
            return quick
        tensors: list[torch.Tensor] = []
        try:
            key = (op, _reading((args, sorted(kwargs.items())), tensors))
            known = self._known.get(key)
        except TypeError:
            return op(*args, **kwargs)
        if known is not None:
            return [_like(t) for t in known] if isinstance(known, tuple) else _like(known)
        found = op(*args, **kwargs)
        results = tuple(found) if isinstance(found, (list, tuple)) else found
        fresh = results if isinstance(results, tuple) else (results,)
        if all(_is_fresh(t, tensors) for t in fresh):
            self._known[key] = results
        return found


def _reading(x: Any, tensors: list[torch.Tensor]) -> Any:
    """What a call has in common with others like it. Raises TypeError for sizes that are not known."""
    if isinstance(x, torch.Tensor):
        if not _is_plain_fake(x):
            raise TypeError(f"{type(x)} of symbolic sizes, or no ordinary one")
        tensors.append(x)
        return x.dtype, x.device, x.shape, x.stride()
    if isinstance(x, (list, tuple)):
        return tuple(_reading(item, tensors) for item in x)
    hash(x)
    return type(x), x


def _is_fresh(t: Any, operands: Sequence[torch.Tensor]) -> bool:
    """Whether a result has memory of its own, all of it."""
    own = _is_plain_fake(t) and t.storage_offset() == 0
    return own and not any(shares_memory(t, operand) for operand in operands)


def _is_plain_fake(t: Any) -> bool:
    return type(t) is FakeTensor and _is_plain(t)


def _like(t: FakeTensor) -> FakeTensor:
    mode: FakeTensorMode = t.fake_mode
    with _in_kernel(mode):
        memory = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return FakeTensor(mode, memory, t.fake_device)


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a fake tensor is an ordinary one of known sizes, of which no autograd graph is made."""
    return not (t._has_symbolic_sizes_strides or t.requires_grad or t.is_conj() or t.is_neg()) and (
        t.layout is torch.strided
    )


__all__ = ["FakeCalls", "quick_fake"]
