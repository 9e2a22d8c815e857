"""Values that are rounded to their low precision wherever they are read: elsewhere they are float32 inside of
kernels, and rounded where they are written.

Whoever reads z where the result jumps (z.floor(), z > 0, z.long()) sees it rounded, as eager does. So do all
others then: z - z.floor() would be below 0 else, and of a z that is not above 1 the arc cosine NaN. A
backward that makes z again sees what its forward saw.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.ops.table import is_stepped
from dicp.passes.facts import ROUNDED, aten, base_of, is_tensor, value_of
from dicp.passes.norms import NORMS

_KEEP_DIGITS = frozenset(
    getattr(aten, name)
    for name in """abs neg relu where maximum minimum clamp clamp_min clamp_max amax amin
    cat flip gather index index_select""".split()
)
"""Whose results are elements of their operands, or those with another sign: rounded, if these are."""


def round_stepped(graph: GraphModule) -> None:
    """Mark what is read by what jumps."""
    _mark(graph.graph, {n.name for n in _stepped(graph.graph)})


def round_alike(forward: GraphModule, backward: GraphModule) -> None:
    """The same in both graphs, with norms' inputs, and where the backward makes again what the forward made
    all that it is made of there: of what was kept, the forward has more digits."""
    seeds = (*_normalised(forward.graph), *_stepped(forward.graph), *_stepped(backward.graph))
    names = {n.name for n in seeds}
    stack = [n for n in backward.graph.nodes if n.name in names]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand.name not in names:
                names.add(operand.name)
                stack.append(operand)
    _mark(forward.graph, names)
    _mark(backward.graph, names)


def _mark(graph: Graph, names: set[str]) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and node.name in names and _is_low(node):
            node.meta[ROUNDED] = True


def _normalised(graph: Graph) -> Iterator[Node]:
    """Inputs of norms: of equal elements the difference to their mean is then exactly 0. Any other is
    multiplied by the reciprocal of a deviation that is eps alone."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in NORMS:
            yield base_of(node.args[0])


def _stepped(graph: Graph) -> Iterator[Node]:
    """What is read by what jumps, and what of that are elements of something: that too."""
    stack = [a for n in graph.nodes if n.op == "call_function" for a in _read_at_steps(n)]
    seen: set[Node] = set()
    while stack:
        node = base_of(stack.pop())
        if node in seen or not _is_low(node):
            continue
        seen.add(node)
        yield node
        if getattr(node.target, "overloadpacket", None) in _KEEP_DIGITS:
            stack += node.all_input_nodes


def _read_at_steps(node: Node) -> list[Node]:
    """Operands whose smallest change may change the result by much."""
    if node.target is aten.grid_sampler_2d_backward.default:  # of another pixel than the forward sampled
        return node.all_input_nodes[2:3]
    dtype = value_of(node).dtype if is_tensor(node) else None
    whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return node.all_input_nodes if whole or is_stepped(node.target) else []


def _is_low(node: Node) -> bool:
    return is_tensor(node) and value_of(node).dtype in LOW_PRECISION


__all__ = ["round_alike", "round_stepped"]
