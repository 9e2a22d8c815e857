"""Where tensors lie in memory: dense strides, windows on a buffer."""

from __future__ import annotations

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
