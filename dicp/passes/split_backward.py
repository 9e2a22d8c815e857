"""The gradients of a convolution as calls of their own, where the vendor has an algorithm for each."""

from __future__ import annotations

import operator

from torch.fx import GraphModule

from dicp.compat import fake_mode_of, quiet_shapes
from dicp.ops.conv_call import ConvCall, conv_call
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
        call = conv_call(node)
        if call is not None and sum(call.mask) > 1:
            if vendor.splits_gradients(node) and all(u.target is operator.getitem for u in node.users):
                with mode, quiet_shapes(mode):
                    _split(call)
    return finish(gm)


def _split(call: ConvCall) -> None:
    node = call.node
    emit, meta = Emitter(node), {k: v for k, v in node.meta.items() if k != "val"}
    for user in list(node.users):
        which = user.args[1]
        if which == 2:
            new = emit(aten.sum.dim_IntList, call.grad, [0, 2, 3])
            user.replace_all_uses_with(new)
            continue
        part = emit(node.target, *call.masked(which == 0, which == 1, False))
        part.meta.update({k: v for k, v in meta.items() if k not in part.meta})
        user.replace_input_with(node, part)


__all__ = ["split_backward"]
