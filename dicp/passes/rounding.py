"""Values that are rounded to their low precision for all who read them: elsewhere they are float32 inside of
kernels, and rounded where they are written.

Whoever reads z where the result jumps (z.floor(), z > 0, z.long()), or picks elements of it (z.amax()), sees
it rounded, as eager does. So do all others then, and what z is made of is rounded too, back to what libraries
made: z - z.floor() would be below 0 else, and z no element of itself. (What memory holds is rounded for all
anyway: schedule/lower.py.) A backward that makes z again sees what its forward saw.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.ir.meta_keys import ROUNDED
from dicp.ops.aliases import base_of
from dicp.ops.table import has_rule, is_stepped, table
from dicp.passes.facts import aten, is_tensor, value_of
from dicp.passes.norms import NORMS

_PICK = frozenset(
    getattr(aten, name) for name in "amax amin max min aminmax scatter_reduce index_reduce".split()
)


def round_stepped(graph: GraphModule) -> None:
    """Mark what is read by what jumps."""
    _mark(graph.graph, {n.name for n in _with_origins(_stepped(graph.graph))})


def round_alike(forward: GraphModule, backward: GraphModule) -> None:
    """The same in both graphs, with norms' inputs, and where the backward makes again what the forward made
    all that it is made of there: of what was kept, the forward has more digits."""
    names = {n.name for n in (*_with_origins(_stepped(forward.graph)), *_normalised(forward.graph))}
    again = [n for n in backward.graph.nodes if n.name in names]
    names |= {n.name for n in _with_origins([*_stepped(backward.graph), *again])}
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
    """What is read by what jumps."""
    for node in graph.nodes:
        if node.op == "call_function":
            yield from _read_at_steps(node)


def _read_at_steps(node: Node) -> list[Node]:
    """Operands whose smallest change may change the result by much."""
    if node.target is aten.grid_sampler_2d_backward.default:  # of another pixel than the forward sampled
        return node.all_input_nodes[2:3]
    row = table().get(node.target)
    if row is not None and row.kind == "random":
        return []
    picks = getattr(node.target, "overloadpacket", None) in _PICK or is_stepped(node.target)
    return node.all_input_nodes if picks or _gives_whole_numbers(node) else []


def _gives_whole_numbers(node: Node) -> bool:
    """Or truths, or positions beside what was picked there."""
    value = value_of(node)
    results = value if isinstance(value, (tuple, list)) else (value,)
    dtypes = [v.dtype for v in results if isinstance(v, torch.Tensor)]
    return any(not (d.is_floating_point or d.is_complex) for d in dtypes)


def _with_origins(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and what they are made of by kernels."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            made = node.target is operator.getitem or has_rule(node.target)
            stack += node.all_input_nodes if made else []
    return found


def _is_low(node: Node) -> bool:
    return is_tensor(node) and value_of(node).dtype in LOW_PRECISION


__all__ = ["round_alike", "round_stepped"]
