"""A convolution, a depthwise one and a pointwise one, with an activation behind each of the first two, become
dicp::separable: inverted residuals, and a network's first convolutions before them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
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
    if not any(_is_depthwise(n) for n in convs):
        return gm
    register()
    activations = activations_of(gm)
    ending: dict[Node, Activated] = {}
    for node in convs:
        if node.args[8] != "none":
            ending[node] = Activated(node, node.args[8], node)
        else:
            act, root = activations.get(node, ("none", node))
            ending[root] = Activated(node, act, root)
    for last in convs:
        middle = ending.get(last.args[0])
        first = middle and ending.get(middle.conv.args[0])
        if first and middle and _is_chain(first, middle, last):
            _apply(first, middle, last, vendor)
    return finish(gm)


def _is_image_conv(node: Node) -> bool:
    return (
        node.target is torch.ops.dicp.conv.default
        and is_tensor(node.args[0])
        and value_of(node).dim() == 4
        and all(d == 1 for d in node.args[6])
    )


def _is_depthwise(node: Node) -> bool:
    """Whether each channel is convolved for itself, and makes one of the result."""
    channels = value_of(node.args[1]).shape[0]
    return node.args[3] is None and node.args[7] == channels == value_of(node.args[0]).shape[1] != 1


def _is_pointwise(node: Node) -> bool:
    window = value_of(node.args[1]).shape[2:]
    ones = (*window, *node.args[4], node.args[7])
    return all(n == 1 for n in ones) and not any(node.args[5])


def _is_chain(first: Activated, middle: Activated, last: Node) -> bool:
    shaped = first.conv.args[7] == 1 and _is_depthwise(middle.conv) and _is_pointwise(last)
    alone = sole_user(first.root) is middle.conv and sole_user(middle.root) is last
    added = last.args[3]
    plain = first.conv.args[3] is None and last.args[8] == "none"
    return shaped and alone and plain and (added is None or same_dtype(added, last))


def _apply(first: Activated, middle: Activated, last: Node, vendor: Claims) -> None:
    emit = Emitter(last)
    biases = [_float(emit, n.args[2]) for n in (first.conv, middle.conv, last)]
    x, w1 = first.conv.args[:2]
    w2, w3, other = middle.conv.args[1], last.args[1], last.args[3]
    how = (*first.conv.args[4:6], *middle.conv.args[4:6], first.act, middle.act)
    args = (x, w1, biases[0], other, w2, biases[1], w3, biases[2], *how)
    new = try_claim(vendor, torch.ops.dicp.separable.default, args, at=last)
    if new is None:
        emit.undo()
        return
    last.replace_all_uses_with(new)


def _float(emit: Emitter, bias: Any) -> Any:
    if bias is None or value_of(bias).dtype not in LOW_PRECISION:
        return bias
    return emit(prims.convert_element_type.default, bias, torch.float32)


__all__ = ["rewrite_separable"]
