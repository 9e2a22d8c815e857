"""What a forward and its backward have to see alike to the last bit, so that both see it rounded: elsewhere
values of low precision are float32 inside of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.passes.facts import ROUNDED, aten, base_of, is_tensor, value_of
from dicp.passes.norms import NORMS

_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "le", "ge", "lt", "gt"))


def round_alike(forward: GraphModule, backward: GraphModule) -> None:
    """Mark in both graphs what has to be alike, where the backward makes again what the forward made, and all
    that it is made of there: of what was kept, the forward has more digits."""
    names = {n.name for n in (*_normalised(forward), *_compared(backward))}
    stack = [n for n in backward.graph.nodes if n.name in names]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand.name not in names:
                names.add(operand.name)
                stack.append(operand)
    for graph in (forward.graph, backward.graph):
        for node in graph.nodes:
            if node.op == "call_function" and node.name in names and _is_low(node):
                node.meta[ROUNDED] = True


def _normalised(forward: GraphModule) -> Iterator[Node]:
    """Inputs of norms: of equal elements the difference to their mean is then exactly 0. Any other is
    multiplied by the reciprocal of a deviation that is eps alone."""
    for node in forward.graph.nodes:
        if node.op == "call_function" and node.target in NORMS:
            yield base_of(node.args[0])


def _compared(backward: GraphModule) -> Iterator[Node]:
    """What is compared: with the largest of it, say, which the forward kept. There would be none that is
    equal, and the gradient 0 / 0, or one that is limited to it, whose gradient would be 0."""
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.target in _COMPARISONS:
            yield from (base_of(a) for a in node.args)


def _is_low(node: Node) -> bool:
    return is_tensor(node) and value_of(node).dtype in LOW_PRECISION


__all__ = ["round_alike"]
