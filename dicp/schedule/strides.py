"""Where tensors lie in memory: orders of dims, dense strides, windows on a buffer."""

from __future__ import annotations

import torch

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.value import Indices, Shape


def dense_strides(shape: Shape, order: tuple[int, ...]) -> Shape:
    """Strides of a dense tensor whose dims lie in memory in `order`, outermost first."""
    strides: list[Index] = [1] * len(shape)
    step: Index = 1
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d]
    return tuple(strides)


def order_of(val: torch.Tensor) -> tuple[int, ...]:
    """The memory order of a tensor's dims, outermost first; dims of size 1, which lie anywhere, come before
    the dim that follows them, the first of all outermost."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

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
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return not any(
        guard_or_false(s == 0) and not guard_or_false(n == 1)
        for n, s in zip(val.shape, val.stride(), strict=True)
    )


def no_negative(strides: Shape) -> bool:
    """Whether a tensor can have these strides: torch has none that run backwards."""
    return all(ix.nonnegative(s) for s in strides)


def loop_vars(idx: Indices) -> tuple[Var, ...]:
    return tuple(i.terms[0][0][0] for i in idx if isinstance(i, ix.Poly))  # type: ignore[misc]


def affine_window(flat: Index, idx: Indices, shape: Shape) -> tuple[Shape, Index] | None:
    """(strides, offset) when a flat position is affine in the index variables."""
    strides: list[Index] = []
    for i in idx:
        if isinstance(i, int):
            strides.append(0)
            continue
        split = ix.coefficient(flat, i.terms[0][0][0])  # type: ignore[arg-type]
        if split is None:
            return None
        strides.append(split[0])
        flat = split[1]
    if any(isinstance(a, ix.Opaque) for a in ix.atoms(flat)):
        return None
    step: Index = 1
    # A dim of size 1 gets a stride that reaches past the dims behind it: by it libraries see that a batch of
    # one image is channels-last.
    for k in range(len(shape) - 1, -1, -1):
        if shape[k] == 1:
            strides[k] = step
        else:
            reach = strides[k] * shape[k]
            step = max(step, reach) if isinstance(step, int) and isinstance(reach, int) else reach
    return tuple(strides), flat


def strides_agree(a: Shape, b: Shape, shape: Shape) -> bool:
    return all(x == y or n == 1 for x, y, n in zip(a, b, shape, strict=True))
