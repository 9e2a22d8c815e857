"""Which nodes share memory, as the schemas of their operators say."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal, size_hint


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of the first argument; of a call with several results, whether the
    first does, and of a result that is taken from a call, whether the call's do."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:  # a piece of a split, say
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def base_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory: the start of a chain of views."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def places_in_memory(node: fx.Node) -> bool:
    """Whether the operator counts places from the beginning of the memory of a computed tensor, its first
    operand: a copy that lies elsewhere has to begin its memory."""
    placed = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in placed and base_of(node.args[0]).op == "call_function"


def order_in_memory(val: torch.Tensor) -> list[int] | None:
    """The dims of a fake tensor from outermost to innermost in memory; None where its elements may leave gaps
    or share places."""
    order = sorted(range(val.dim()), key=lambda d: -size_hint(val.stride(d), 0))
    step: Any = 1
    for d in reversed(order):
        if not known_equal(val.shape[d], 1) and not known_equal(val.stride(d), step):
            return None
        step = step * val.shape[d]
    return order


_UNDECLARED = (
    "aten::dequantize",  # of float32
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
)
"""Operators that may return their operand, or a view of it, and do not say so."""


def returns_alias(target: Any) -> bool:
    """Whether results of an operator share memory with what it is given, written or not."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return schema.name in _UNDECLARED or any(r.alias_info is not None for r in schema.returns)


_TORCHS = ("aten", "prims", "dicp", "quantized", "mkldnn")


def is_foreign(node: fx.Node) -> bool:
    """Whether the operator is none of torch's, which need their operands while they run and no longer, and
    the elements of these, not where they lie."""
    return getattr(node.target, "namespace", "") not in _TORCHS


__all__ = ["base_of", "is_foreign", "is_view", "order_in_memory", "places_in_memory", "returns_alias"]
