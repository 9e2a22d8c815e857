"""The gradients of a convolution as calls of their own, where the vendor has an algorithm for each."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from dicp.compat import fake_mode_of, quiet_shapes
from dicp.passes.facts import aten, value_of
from dicp.passes.rules import Emitter, finish
from dicp.vendor.base import VendorBase


def split_backward(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """convolution_backward(g, x, w, [True, True, True])  ->  convolution_backward(.., [True, False, False]),
    convolution_backward(.., [False, True, False]), sum(g, [0, 2, 3]), where `vendor.splits_gradients(node)`.
    """
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes])
    if mode is None:
        return gm
    for node in list(gm.graph.nodes):
        if node.target is aten.convolution_backward.default and sum(map(bool, node.args[10])) > 1:
            if vendor.splits_gradients(node) and all(u.target is operator.getitem for u in node.users):
                with mode, quiet_shapes(mode):
                    _split(node)
    return finish(gm)


def _split(node: Node) -> None:
    emit, meta = Emitter(node), {k: v for k, v in node.meta.items() if k != "val"}
    for user in list(node.users):
        which = user.args[1]
        if which == 2:
            new = emit(aten.sum.dim_IntList, node.args[0], [0, 2, 3])
            user.replace_all_uses_with(new)
            continue
        part = emit(node.target, *node.args[:10], [which == 0, which == 1, False])
        part.meta.update({k: v for k, v in meta.items() if k not in part.meta})
        user.replace_input_with(node, part)


__all__ = ["split_backward"]
