"""Results that are views of inputs which the graph writes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ir.meta_keys import VIEWS_OF_INPUTS
from dicp.ir.verify import insert
from dicp.ops.aliases import is_view
from dicp.passes.facts import value_of, writes_input
from dicp.passes.rules import finish


def view_written_inputs(gm: GraphModule, positions: Collection[int]) -> None:
    """copy_(x, y); return view(y)  ->  copy_(x, y); return view(x), for results at these positions.

    Functionalisation has the caller's view of a written input be a view of what is written over it. Where
    that lies in memory says nothing of where the view lies in the input.
    """
    graph = gm.graph
    output = graph.output_node()
    writes = [n.args[:2] for n in graph.nodes if writes_input(n)]
    written: dict[Any, Any] = {new: old for old, new in writes if _same_form(old, new)}
    results = list(output.args[0])  # type: ignore[arg-type]
    done = set()
    for k in positions:
        result = results[k] if k < len(results) else None
        if isinstance(result, Node) and (chain := _views(result, written)):
            new = written[chain[-1].args[0]]
            with graph.inserting_before(output):
                for view in reversed(chain):
                    new = insert(graph, view.target, (new, *view.args[1:]), view.kwargs, like=view)
            results[k] = new
            done.add(k)
    if done:
        output.args = (tuple(results),)
        gm.meta[VIEWS_OF_INPUTS] = frozenset(done)
        finish(gm).recompile()


def _same_form(x: Any, y: Any) -> bool:
    a, b = value_of(x), value_of(y)
    return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _views(node: Node, bases: Collection[Any]) -> list[Node]:
    """The views from a node down to one of the bases, that one left out; none where they lead elsewhere."""
    chain = []
    while node not in bases:
        if not is_view(node) or not isinstance(node.args[0], Node):
            return []
        chain.append(node)
        node = node.args[0]
    return chain


__all__ = ["view_written_inputs"]
