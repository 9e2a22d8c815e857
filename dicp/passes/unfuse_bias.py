"""Biases added by kernels, for vendors whose library computes the product alone faster."""

from __future__ import annotations

from torch.fx import GraphModule

from dicp.passes.facts import aten, is_plain_sum
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase


def unfuse_bias(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """addmm(b, x, w)  ->  add(mm(x, w), b), where the vendor asks for it: what follows is one kernel with
    the addition."""
    for node in list(gm.graph.nodes):
        if node.target is aten.addmm.default and is_plain_sum(node) and vendor.unfuses_bias(node):
            bias, x, w = node.args
            emit = Emitter(node)
            replace(node, emit(aten.add.Tensor, emit(aten.mm.default, x, w), bias))
    return finish(gm)


__all__ = ["unfuse_bias"]
