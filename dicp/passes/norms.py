"""Norms that compute statistics: which node is what, and a norm made again from its statistics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from dicp.ir.verify import insert, same_stride
from dicp.passes.facts import aten, prims, value_of

_BATCH_NORMS = (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
NORMS = (*_BATCH_NORMS, aten.native_layer_norm.default, aten.native_group_norm.default)


def is_norm(node: Node) -> bool:
    """Whether the node is the normalised tensor of a norm."""
    norm = node.args[0] if node.target is operator.getitem else None
    if not isinstance(norm, Node) or norm.target not in NORMS or node.args[1] != 0:
        return False
    return norm.target is not aten.native_group_norm.default or isinstance(norm.args[4], int)


def is_statistic(node: Node) -> bool:
    """Whether the node is a norm's mean or reciprocal deviation."""
    norm = node.args[0] if node.target is operator.getitem else None
    return isinstance(norm, Node) and norm.target in NORMS and node.args[1] in (1, 2)


def _statistics(norm: Node) -> list[Node]:
    """The mean and the reciprocal deviation; none where they are rounded to a low precision, so that the norm
    has to be taken again."""
    found = {u.args[1]: u for u in norm.users if u.target is operator.getitem}
    both = [found[k] for k in (1, 2) if k in found]
    exact = all(value_of(n).dtype in (torch.float32, torch.float64) for n in both)
    return both if len(both) == 2 and exact else []


def _affine(norm: Node) -> tuple[Any, Any]:
    """Weight and bias."""
    first = 2 if norm.target is aten.native_layer_norm.default else 1
    return norm.args[first], norm.args[first + 1]


def normalise(call: Node, here: dict[Node, Node], graph: Graph) -> Node:
    """(x - mean) * rstd * weight + bias, as the norm itself computes it; or the norm, taken again."""
    norm: Any = call.args[0]
    x = norm.args[0]
    statistics = _statistics(norm)

    def emit(target: Any, *args: Any) -> Node:
        return insert(graph, target, args, like=call)

    if not statistics:
        args = [here.get(a, a) if isinstance(a, Node) else a for a in norm.args]
        if norm.target in _BATCH_NORMS:
            again = emit(_BATCH_NORMS[1], *args[:3], True, *args[-2:])
        else:
            again = emit(norm.target, *args)
        return emit(operator.getitem, again, 0)
    result, like_input = value_of(call), value_of(x)
    same = like_input.dtype == result.dtype and same_stride(like_input, result)
    known = result if same and result.dtype in (torch.float32, torch.float64) else None

    def element(target: Any, *args: Any) -> Node:
        return insert(graph, target, args, like=call, value=known)

    mean, rstd = (_along(here[s], True, norm, emit) for s in statistics)
    y = element(aten.mul.Tensor, element(aten.sub.Tensor, here[x], mean), rstd)
    weight, bias = _affine(norm)
    if weight is not None:
        y = element(aten.mul.Tensor, y, _along(here[weight], False, norm, emit))
    if bias is not None:
        y = element(aten.add.Tensor, y, _along(here[bias], False, norm, emit))
    if value_of(y).dtype == result.dtype:
        return y
    return emit(prims.convert_element_type.default, y, result.dtype)


def _along(n: Node, statistic: bool, norm: Node, emit: Callable[..., Node]) -> Node:
    """A norm's small operand as it broadcasts to the norm's input."""
    if norm.target is aten.native_layer_norm.default:
        return n
    if statistic and norm.target is aten.native_group_norm.default:
        channels, groups = norm.args[4], norm.args[6]
        column = emit(aten.unsqueeze.default, n, -1)
        each = emit(aten.expand.default, column, [-1, -1, channels // groups])  # type: ignore[operator]
        n = emit(aten.view.default, emit(aten.clone.default, each), [-1, channels])
    shape, after_channels = list(value_of(n).shape), value_of(norm.args[0]).dim() - 2
    if after_channels > 0 and all(isinstance(k, int) for k in shape):
        return emit(aten.view.default, n, [*shape, *[1] * after_channels])
    for _ in range(after_channels):
        n = emit(aten.unsqueeze.default, n, -1)
    return n


def norm_operands(node: Node) -> list[Node]:
    """What the normalised tensor is made again from."""
    norm: Any = node.args[0]
    statistics = _statistics(norm)
    if statistics:
        given = [norm.args[0], *statistics, *_affine(norm)]
    else:
        given = list(norm.args[:3] if norm.target in _BATCH_NORMS else norm.args)
    return [n for n in given if isinstance(n, Node)]
