"""Every private torch import of dicp, behind names that stay the same for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._guards import detect_fake_mode as _detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true as _statically_known_true

__all__ = ["FakeTensor", "FakeTensorMode", "fake_mode_of", "known_equal", "quiet_shapes", "size_hint"]


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """The fake tensor mode that made the fake tensors among `values` (a nested list), or the one active."""
    return _detect_fake_mode(values)


def known_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether the sizes are equal for every value of the symbols, found out without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if not isinstance(a, int) and not isinstance(b, int) and a.node.expr == b.node.expr:
        return True  # the common case, and 30 times cheaper than asking
    return bool(_statically_known_true(a == b))


def size_hint(size: int | torch.SymInt, fallback: int = 128) -> int:
    """The size seen while tracing, for cost estimates only: taking it adds no guard."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() and node.hint is not None else fallback


@contextmanager
def quiet_shapes(mode: FakeTensorMode) -> Iterator[None]:
    """Run fake operators so that they leave neither guards nor pending symbols behind."""
    with ExitStack() as stack:
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def promoted_dtypes(kind: str, *operands: object) -> tuple[torch.dtype, torch.dtype]:
    """The dtype torch computes an elementwise op in, and that of its result, for tensors and Python numbers."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KINDS
    from torch._prims_common import elementwise_dtypes

    return elementwise_dtypes(*operands, type_promotion_kind=KINDS[kind])  # type: ignore[arg-type]
