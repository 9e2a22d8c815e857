"""The one rewrite of norms that saves a reduction; what else there is to gain, fusion gains."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from dicp.ir.verify import insert, same_meta
from dicp.ops.rules.reductions import reduced_dims
from dicp.passes.facts import aten, value_of
from dicp.passes.rules import finish


def rewrite_norm(gm: GraphModule) -> GraphModule:
    """mean(x, d), var(x, d)  ->  var_mean(x, d)[1], [0]

    A variance computes the mean of the same elements on its way. Norms written by hand have both; their
    elementwise part, and a layer norm already in one call, are left to fusion, which needs no pattern.
    """
    means: dict[Any, Node] = {}
    if not any(node.target is aten.var.correction for node in gm.graph.nodes):
        return gm
    for node in gm.graph.nodes:
        if node.target is aten.mean.dim and not node.kwargs:
            means[_reduction(node, node.args[2] if len(node.args) > 2 else False)] = node
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.target is not aten.var.correction:
            continue
        mean = means.get(_reduction(node, node.kwargs.get("keepdim", False)))
        if mean is not None:
            _share(gm, mean, node, first=min(mean, node, key=order.__getitem__))
    return finish(gm)


def _reduction(node: Node, keepdim: object) -> Any:
    """Equal for reductions of the same elements to the same shape."""
    x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    return x, reduced_dims(dims, value_of(x).dim()), bool(keepdim)


def _share(gm: GraphModule, mean: Node, var: Node, first: Node) -> None:
    with gm.graph.inserting_before(first):
        both = insert(gm.graph, aten.var_mean.correction, var.args, var.kwargs, like=var)
        results = [insert(gm.graph, operator.getitem, (both, i), like=n) for i, n in enumerate((var, mean))]
    for old, new in zip((var, mean), results):
        if same_meta(value_of(old), value_of(new)):
            old.replace_all_uses_with(new)
