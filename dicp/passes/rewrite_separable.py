"""A convolution, a depthwise one and a pointwise one, with an activation behind each of the first two, become
dicp::separable: inverted residuals, and a network's first convolutions before them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.ops.conv_call import ConvCall, the_conv_call
from dicp.ops.library import register
from dicp.passes.facts import is_tensor, prims, same_dtype, value_of
from dicp.passes.rules import Claims, Emitter, activations_of, finish, sole_user, try_claim


class Activated(NamedTuple):
    """A dicp::conv, and the activation of its result, which may be a call of its own."""

    conv: Node
    act: str
    root: Node
    """the activation's result"""


def rewrite_separable(gm: GraphModule, vendor: Claims) -> GraphModule:
    """conv1x1(relu6(depthwise(relu6(conv(x)))))  ->  dicp.separable(x, ...)

    Where nothing else uses what is in between, and the vendor claims the call. Biases of low precision become
    float32, which is exact, so that they are of one dtype.
    """
    convs = [n for n in gm.graph.nodes if _is_image_conv(n)]
    if not any(_is_depthwise(the_conv_call(n)) for n in convs):
        return gm
    register()
    activations = activations_of(gm)
    ending: dict[Node, Activated] = {}
    for node in convs:
        if (act := the_conv_call(node).act) != "none":
            ending[node] = Activated(node, act, node)
        else:
            act, root = activations.get(node, ("none", node))
            ending[root] = Activated(node, act, root)
    for last in convs:
        middle = ending.get(the_conv_call(last).x)
        first = middle and ending.get(the_conv_call(middle.conv).x)
        if first and middle and _is_chain(first, middle, last):
            _apply(first, middle, last, vendor)
    return finish(gm)


def _is_image_conv(node: Node) -> bool:
    if node.target is not torch.ops.dicp.conv.default:
        return False
    call = the_conv_call(node)
    return is_tensor(call.x) and value_of(node).dim() == 4 and all(d == 1 for d in call.dilation)


def _is_depthwise(call: ConvCall) -> bool:
    """Whether each channel is convolved for itself, and makes one of the result."""
    channels = value_of(call.weight).shape[0]
    return call.other is None and call.groups == channels == value_of(call.x).shape[1] != 1


def _is_pointwise(call: ConvCall) -> bool:
    window = value_of(call.weight).shape[2:]
    return all(n == 1 for n in (*window, *call.stride, call.groups)) and not any(call.padding)


def _is_chain(first: Activated, middle: Activated, last: Node) -> bool:
    one, two, three = (the_conv_call(n) for n in (first.conv, middle.conv, last))
    shaped = one.groups == 1 and _is_depthwise(two) and _is_pointwise(three)
    alone = sole_user(first.root) is middle.conv and sole_user(middle.root) is last
    plain = one.other is None and three.act == "none"
    return shaped and alone and plain and (three.other is None or same_dtype(three.other, last))


def _apply(first: Activated, middle: Activated, last: Node, vendor: Claims) -> None:
    emit = Emitter(last)
    one, two, three = (the_conv_call(n) for n in (first.conv, middle.conv, last))
    b1, b2, b3 = (_float(emit, call.bias) for call in (one, two, three))
    tensors = (one.x, one.weight, b1, three.other, two.weight, b2, three.weight, b3)
    how = (one.stride, one.padding, two.stride, two.padding, first.act, middle.act)
    new = try_claim(vendor, torch.ops.dicp.separable.default, (*tensors, *how), at=last)
    if new is None:
        emit.undo()
        return
    last.replace_all_uses_with(new)


def _float(emit: Emitter, bias: Any) -> Any:
    if bias is None or value_of(bias).dtype not in LOW_PRECISION:
        return bias
    return emit(prims.convert_element_type.default, bias, torch.float32)


__all__ = ["rewrite_separable"]
