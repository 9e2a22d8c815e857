"""In what order the dims of a traced tensor lie in memory."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false


def order_of(val: torch.Tensor) -> tuple[int, ...]:
    """The memory order of a tensor's dims, outermost first; dims of size 1, which lie anywhere, come before
    the dim that follows them, the first of all outermost."""
    strides = val.stride()
    single = [d for d, n in enumerate(val.shape) if guard_or_false(n == 1)]
    order = [d for d in range(val.dim()) if d not in single]
    for end in range(len(order)):  # insertion sort: comparisons of symbolic strides are not a key
        k = end
        while k > 0 and guard_or_false(strides[order[k - 1]] < strides[order[k]]):
            order[k - 1], order[k] = order[k], order[k - 1]
            k -= 1
    for d in reversed(single):
        if d == 0:
            order.insert(0, d)
        elif d + 1 in order:
            order.insert(order.index(d + 1), d)
        else:  # the last dim, behind the one before it
            order.insert(order.index(d - 1) + 1 if d - 1 in order else len(order), d)
    return tuple(order)


def no_overlap(val: torch.Tensor) -> bool:
    """Whether no two elements share memory (and none is skipped in a way we would not allocate)."""
    return not any(
        guard_or_false(s == 0) and not guard_or_false(n == 1)
        for n, s in zip(val.shape, val.stride(), strict=True)
    )
