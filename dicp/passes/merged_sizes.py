"""Sizes read from data that AOTAutograd's partitioner leaves without a maker.

Of two equal calls it keeps one, in graphs that are differentiated: of two `nonzero(mask)`, say. What was
computed of the other still has the size that went with it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dicp.compat import fake_mode_of
from dicp.ir.verify import infer


def repair_merged_sizes(gm: GraphModule) -> None:
    """x[mask] * sigmoid(x[mask]): f32[u0] * f32[u1]  ->  f32[u0] * f32[u0], where nothing makes u1."""
    if not any(_brings_sizes(n) for n in gm.graph.nodes):
        return
    made: set[Any] = set()
    mode: Any = None
    for node in gm.graph.nodes:
        found = free_unbacked_symbols(node.meta.get("val"))
        if node.op in ("placeholder", "get_attr") or node.meta.get("unbacked_bindings"):
            made |= found  # the bindings' own keys may be older names
        if found <= made or not _is_inferred(node):
            continue
        mode = mode or fake_mode_of([n.meta.get("val") for n in gm.graph.nodes])
        value = infer(node, mode)
        if free_unbacked_symbols(value) <= made:
            node.meta["val"] = value


def _brings_sizes(node: Node) -> bool:
    """Whether symbols begin here: most graphs have none."""
    if node.op != "placeholder":
        return bool(node.meta.get("unbacked_bindings"))
    val = node.meta.get("val")
    sizes = val.shape if isinstance(val, torch.Tensor) else (val,)
    return any(isinstance(n, torch.SymInt) for n in sizes)


def _is_inferred(node: Node) -> bool:
    """Whether the value follows from those of the operands."""
    is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    is_call = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return node.op == "call_function" and (is_number or is_call)


__all__ = ["repair_merged_sizes"]
