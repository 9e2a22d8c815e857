"""Dropout that drops nothing, or everything, needs no random numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ir.verify import insert, same_meta
from dicp.ops.aliases import base_of
from dicp.passes.facts import aten, outputs_of, value_of


def rewrite_dropout(gm: GraphModule) -> GraphModule:
    """native_dropout(x, 0, train), native_dropout(x, p, False)  ->  x, all True

    In a graph for inference eager's dropout is a clone, which canonicalize removes. With other probabilities
    the call stays: its random numbers are the vendor's to draw.
    """
    outputs = {base_of(o) for o in outputs_of(gm.graph)}
    for node in list(gm.graph.nodes):
        if node.target is aten.native_dropout.default and (node.args[1] == 0 or node.args[2] is False):
            results = [u for u in node.users if u.target is operator.getitem]
            for result in results:
                _replace(result, node, copy=result in outputs)
            if not any(r.users for r in results):
                for dead in (*results, node):
                    gm.graph.erase_node(dead)
    return gm


def _replace(result: Node, dropout: Node, copy: bool) -> None:
    """The dropped-out tensor is x (a copy, where the graph returns it); the mask is True everywhere."""
    x: Any = dropout.args[0]
    graph = dropout.graph
    with graph.inserting_before(dropout):
        if result.args[1] == 0:
            new = insert(graph, aten.clone.default, (x,), like=dropout) if copy else x
        else:
            new = insert(graph, aten.full_like.default, (x, True), {"dtype": torch.bool}, like=dropout)
    if same_meta(value_of(result), value_of(new)):
        result.replace_all_uses_with(new)
