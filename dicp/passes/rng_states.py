"""Random operators that a checkpointed part of a model computes again in its backward.

AOTAutograd wraps them, so that both draw the same numbers: the forward's call gives the generator's state
before it, besides its result, and the backward's is made under that state. Here the wrappers become what they
do, and those of calls that draw nothing go: attention without dropout counts as random to torch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp import compat
from dicp.ir.verify import insert
from dicp.ops.library import register
from dicp.passes.facts import aten, is_tensor, value_of


def open_rng_states(gm: GraphModule) -> None:
    """state, y = run_and_save_rng_state(op, x)   ->  state = dicp.rng_state(device); y = op(x)
    y = run_with_rng_state(state, op, x)          ->  old = dicp.swap_rng_state(state, device); y = op(x);
                                                      dicp.swap_rng_state(old, device)
    y = graphsafe_run_with_rng_state(op, x, ...)  ->  y = op(x), where op draws nothing
    """
    saves, runs, runs_in_graphs = compat.rng_wrappers()
    for node in list(gm.graph.nodes):
        if node.target is saves:
            register()
            _open_save(node)
        elif node.target is runs:
            register()
            _open_run(node)
        elif node.target is runs_in_graphs:
            _open_in_graphs(node)


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers: all do that are not attention without dropout."""
    for k, parameter in enumerate(op._schema.arguments):
        if parameter.name == "dropout_p":
            given = args[k] if k < len(args) else kwargs.get("dropout_p", parameter.default_value)
            return not (isinstance(given, (int, float)) and given == 0)
    return True


def _device(args: Any, kwargs: Any) -> torch.device:
    """Of the generator that a call draws from."""
    given = kwargs.get("device")
    if given is not None:
        return torch.device(given)
    return next((value_of(a).device for a in args if is_tensor(a)), torch.device("cpu"))


def _open_save(node: Node) -> None:
    op, *args = node.args
    graph = node.graph
    parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    with graph.inserting_before(node):
        if 0 in parts and _draws(op, args, node.kwargs):
            state = insert(graph, torch.ops.dicp.rng_state.default, (_device(args, node.kwargs),), like=node)
            parts[0].replace_all_uses_with(state)
        elif 0 in parts:  # somebody returns it, and nobody reads it
            parts[0].replace_all_uses_with(_nothing(parts[0]))
        if 1 in parts:
            y = insert(graph, op, args, node.kwargs, like=parts[1], value=value_of(parts[1]))
            parts[1].replace_all_uses_with(y)
    for part in parts.values():
        graph.erase_node(part)
    graph.erase_node(node)


def _nothing(state: Node) -> Node:
    """A tensor without elements in a state's place."""
    kwargs = {"dtype": torch.uint8, "device": value_of(state).device}
    return insert(state.graph, aten.full.default, ([0], 0), kwargs, like=state)


def _open_run(node: Node) -> None:
    state, op, *args = node.args
    graph, swap = node.graph, torch.ops.dicp.swap_rng_state.default
    with graph.inserting_before(node):
        draws = _draws(op, args, node.kwargs)
        if draws:
            device = _device(args, node.kwargs)
            old = insert(graph, swap, (state, device), like=node)
        y = insert(graph, op, args, node.kwargs, like=node)
        if draws:
            insert(graph, swap, (old, device), like=node)
    node.replace_all_uses_with(y)
    graph.erase_node(node)


def _open_in_graphs(node: Node) -> None:
    op, *args = node.args
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    graph = node.graph
    with graph.inserting_before(node):
        y = insert(graph, op, args, kwargs, like=node)
    if _draws(op, args, kwargs):
        node.meta["val"] = value_of(y)  # torch gives it none
        graph.erase_node(y)
    else:
        node.replace_all_uses_with(y)
        graph.erase_node(node)


__all__ = ["open_rng_states"]
