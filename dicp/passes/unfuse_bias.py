"""Biases added by kernels, for vendors whose library computes the product alone faster."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ops.library import register
from dicp.passes.facts import aten, is_plain_sum
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase


def unfuse_bias(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """addmm(b, x, w)  ->  add(mm(x, w), b), and dicp.linear(x, w, b)  ->  add(dicp.linear(x, w), b), where
    the vendor asks for it: what follows is one kernel with the addition."""
    register()
    for node in list(gm.graph.nodes):
        found = _biased(node)
        if found is not None and vendor.unfuses_bias(node):
            bias, target, *operands = found
            emit = Emitter(node)
            replace(node, emit(aten.add.Tensor, emit(target, *operands), bias))
    return finish(gm)


def _biased(node: Node) -> tuple[Any, ...] | None:
    """The bias of a product that nothing but a bias is added to, and the call without it."""
    if node.target is aten.addmm.default and is_plain_sum(node):
        bias, x, w = node.args
        return bias, aten.mm.default, x, w
    if node.target is torch.ops.dicp.linear.default:
        x, w, bias, other, *act = node.args
        if bias is not None and other is None and act in ([], ["none"]):
            return bias, node.target, x, w, None, None, "none"
    return None


__all__ = ["unfuse_bias"]
