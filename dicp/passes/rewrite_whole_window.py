"""Convolutions whose window is the whole image: a layer that connects everything, written as one."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dicp.compat import fake_mode_of, quiet_shapes
from dicp.ir.verify import same_stride
from dicp.ops.conv_call import the_conv_call
from dicp.passes.facts import aten, value_of
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase, takes_graphs


def rewrite_whole_window(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """convolution(x: [B,C,H,W], w: [O,C,H,W], b)  ->
    view(addmm(b, view(x, [B,CHW]), permute(view(w, [O,CHW]), [1,0])), [B,O,1,1])

    Libraries of convolutions turn such weights, which are large, at each call.
    """
    found = [n for n in gm.graph.nodes if _is_whole(n)]
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes]) if found else None
    if mode is None or takes_graphs(vendor):
        return gm
    with mode, quiet_shapes(mode):
        for node in found:
            _rewrite(node)
    return finish(gm)


def _is_whole(node: Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    call = the_conv_call(node)
    x, weight = value_of(call.x), value_of(call.weight)
    same = isinstance(x, torch.Tensor) and x.dim() == weight.dim() == 4 and x.shape[1:] == weight.shape[1:]
    if not same or call.transposed or call.groups != 1 or any(call.padding) or not weight.is_contiguous():
        return False
    if not all(isinstance(n, int) for n in weight.shape) or any(d != 1 for d in call.dilation):
        return False
    return call.bias is None or value_of(call.bias).dtype == value_of(node).dtype


def _rewrite(node: Node) -> None:
    emit = Emitter(node)
    call = the_conv_call(node)
    x, weight, bias = call.x, call.weight, call.bias
    outputs, depth = value_of(weight).shape[0], value_of(weight)[0].numel()
    batch = emit.size(x, 0)  # type: ignore[arg-type]
    if not value_of(x).is_contiguous():
        x = emit(aten.clone.default, x, memory_format=torch.contiguous_format)
    rows = emit(aten.view.default, x, [batch, depth])
    columns = emit(aten.permute.default, emit(aten.view.default, weight, [outputs, depth]), [1, 0])
    if bias is None:
        y = emit(aten.mm.default, rows, columns)
    else:
        y = emit(aten.addmm.default, bias, rows, columns)
    image = emit(aten.view.default, y, [batch, outputs, 1, 1])
    if same_stride(value_of(image), value_of(node)):
        replace(node, image)


__all__ = ["rewrite_whole_window"]
