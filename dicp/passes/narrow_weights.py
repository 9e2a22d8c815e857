"""Weights stored in eight bits, as models write them: what a product's operand is made of before it is cast.

Scales are of columns (`stored`), or of groups along the depth (`stored_by_groups`): mostly of four bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dicp.compat import known_equal
from dicp.ops.library import NARROW_WEIGHTS
from dicp.passes.facts import aten, is_plain_cast, is_tensor, rank, same_shape, value_of

_EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that have all numbers of each of those."""


@dataclass(frozen=True)
class Stored:
    """A product's operand [K, N]: w times scale. w: of NARROW_WEIGHTS, [N, K] where it is by_rows, else
    [K, N].

    scale: of [N] or [N, 1] or [1, N] or one element, a number, or None.
    """

    w: Node
    by_rows: bool
    scale: Node | float | None = None


def stored(operand: Any) -> Stored | None:
    """[K, N] = permute(mul(cast(w), unsqueeze(scale))), in whatever order that is written."""
    node, by_rows, scale = operand, False, None
    while isinstance(node, Node) and rank(node) == 2:
        if value_of(node).dtype in NARROW_WEIGHTS:
            return Stored(node, by_rows, scale)
        if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:  # type: ignore[arg-type]
            by_rows, node = not by_rows, node.args[0]
        elif is_plain_cast(node) and value_of(node).dtype in _EXACT:
            node = node.args[0]
        elif node.target is aten.mul.Tensor and scale is None:
            a, b = node.args
            scale, other = (b, a) if is_scale(b, node, by_rows) else (a, b)
            if not is_scale(scale, node, by_rows) or not same_shape(other, node):
                return None  # or the scale repeats it
            node = other
        else:
            return None
    return None


def is_scale(s: Any, scaled: Node, by_rows: bool) -> bool:
    """Whether s multiplies each column of y, of which there are as many as `scaled` has rows or columns."""
    if isinstance(s, (int, float)) and not isinstance(s, bool):
        return True
    if not is_tensor(s) or not value_of(s).is_floating_point():
        return False
    shape, columns = value_of(s).shape, value_of(scaled).shape[-2 if by_rows else -1]
    if len(shape) == 0:
        return True
    expected = [columns, 1] if by_rows else [columns]
    while len(shape) > len(expected) and known_equal(shape[0], 1):
        shape = shape[1:]
    return len(shape) == len(expected) and all(known_equal(m, n) for m, n in zip(shape, expected))


@dataclass(frozen=True)
class Groups:
    """A product's operand [K, N]: w less zero, times scale. w: [N, G, K / G] of int8 or uint8; scale and
    zero: [N, G, 1]."""

    w: Node
    scale: Node
    zero: Node | None


def stored_by_groups(operand: Any) -> Groups | None:
    """[K, N] = permute(view(mul(sub(cast(w), cast(zero)), scale)))"""
    if operand.target is not aten.permute.default or list(operand.args[1]) != [1, 0]:
        return None
    rows = operand.args[0]
    scaled = rows.args[0] if rows.target is aten.view.default else None
    if not isinstance(scaled, Node) or rank(scaled) != 3 or scaled.target is not aten.mul.Tensor:
        return None
    sizes = tuple(value_of(scaled).shape)
    if not all(isinstance(n, int) for n in sizes) or not _has(rows, (sizes[0], sizes[1] * sizes[2])):
        return None
    of_groups = (*sizes[:2], 1)
    a, b = scaled.args
    scale, shifted = (a, b) if _has(a, of_groups) else (b, a)
    if not _has(scale, of_groups) or not _has(shifted, sizes) or not value_of(scale).is_floating_point():
        return None
    zero = None
    if shifted.target is aten.sub.Tensor and shifted.kwargs.get("alpha", 1) == 1:
        shifted, zero = shifted.args
        if not _has(shifted, sizes) or not _has(zero, of_groups):
            return None
        zero = zero.args[0] if is_plain_cast(zero) and value_of(zero.args[0]).dtype in _INTEGERS else zero
    if not is_plain_cast(shifted) or value_of(shifted.args[0]).dtype not in _INTEGERS:
        return None
    return Groups(shifted.args[0], scale, zero)


_INTEGERS = (torch.int8, torch.uint8)


def _has(x: Any, sizes: tuple[int, ...]) -> bool:
    return is_tensor(x) and tuple(value_of(x).shape) == sizes
