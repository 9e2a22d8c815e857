"""Bodies of `torch.compiler.nested_compile_region` become part of the graph that calls them: fusion and the
memory plan see one graph, and kernels of equal blocks are compiled once anyway."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import higher_order_name
from dicp.ir.verify import same_meta


def inline_regions(gm: GraphModule) -> GraphModule:
    """invoke_subgraph(body, name, x, ..)  ->  the body's calls

    Not where an operand lies, or is sized, as the body was not traced for.
    """
    left: set[Node] = set()
    while calls := [n for n in gm.graph.nodes if _is_region(n) and n not in left]:
        for call in calls:
            if not _inline(gm, call):
                left.add(call)
    return gm


def _is_region(node: Node) -> bool:
    return node.op == "call_function" and higher_order_name(node.target) == "invoke_subgraph"


def _inline(gm: GraphModule, call: Node) -> bool:
    region, _, *operands = call.args
    assert isinstance(region, Node), region
    body = getattr(gm, str(region.target))
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    made: dict[Node, Any] = dict(zip(inputs, operands, strict=True))
    if not all(_is_as_traced(n, operand) for n, operand in made.items()):
        return False
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                made[node] = gm.graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                made[node].target = _moved(gm, body, str(node.target))
    results = [made[r] if isinstance(r, Node) else r for r in body.graph.output_node().args[0]]
    for user in list(call.users):
        assert user.target is operator.getitem, user
        result = results[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(result)
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    if not region.users:
        gm.graph.erase_node(region)
    return True


def _is_as_traced(traced: Node, operand: Any) -> bool:
    mine = traced.meta.get("val")
    given = operand.meta.get("val") if isinstance(operand, Node) else operand
    if isinstance(mine, torch.Tensor):
        return same_meta(mine, given)
    return type(mine) is type(given) and str(mine) == str(given)


def _moved(gm: GraphModule, body: GraphModule, target: str) -> str:
    """The name under which gm holds what the body names `target`."""
    held = operator.attrgetter(target)(body)
    number = 0
    while hasattr(gm, name := f"{target.replace('.', '_')}_inlined{number}"):
        if getattr(gm, name) is held:
            return name
        number += 1
    setattr(gm, name, held)
    return name


__all__ = ["inline_regions"]
