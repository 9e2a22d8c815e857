"""1-D convolutions as 2-D ones, over images of one line: what there is for images (layouts, folding, packing,
templates) is for them too then."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import fake_mode_of, quiet_shapes
from dicp.ir.verify import same_stride
from dicp.ops.table import table
from dicp.passes.facts import aten, is_tensor, value_of
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import takes_graphs

LINE = 2  # the dim that an image of one line has more

_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
)


def rewrite_conv1d(gm: GraphModule, vendor: Any) -> GraphModule:
    """relu(convolution(x: [B,C,L], w: [O,C,K], b, [s], [p], [d]))  ->
    squeeze(relu(convolution(unsqueeze(x, 2), unsqueeze(w, 2), b, [1,s], [0,p], [1,d])), 2)

    Elementwise calls and batch norms between convolutions are of images too, so that no view comes between.
    The graph stays where a result would have other strides, as with operands whose channels are dense.
    """
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes])
    if mode is None or takes_graphs(vendor) or not any(_is_1d(n) for n in gm.graph.nodes):
        return gm
    images: dict[Node, Node] = {}
    with mode, quiet_shapes(mode):
        for node in list(gm.graph.nodes):
            if _is_1d(node):
                _rewrite(node, _convolution(node, images), images)
            elif node.op == "call_function" and any(a in images for a in node.all_input_nodes):
                if node.target in _NORMS:
                    _rewrite(node, (images.get(node.args[0]), *node.args[1:]), images)  # type: ignore[arg-type]
                elif _is_elementwise(node):
                    _rewrite(node, tuple(_as_image(Emitter(node), a, images) for a in node.args), images)
    return finish(gm)


def _is_1d(node: Node) -> bool:
    """Whether a call is a 1-D convolution of batches, or its gradients."""
    at = {aten.convolution.default: 0, aten.convolution_backward.default: 1}.get(node.target)
    return at is not None and value_of(node.args[at]).dim() == 3


def _is_elementwise(node: Node) -> bool:
    """Whether a call computes each element of rows from those of its operands at the same place."""
    row = table().get(node.target)
    if row is None or row.kind != "elementwise" or not is_tensor(node) or value_of(node).dim() != 3:
        return False
    given = node.kwargs.values()
    return not any(is_tensor(a) or isinstance(a, torch.memory_format) for a in given)


def _convolution(node: Node, images: dict[Node, Node]) -> tuple[Any, ...]:
    """The arguments of the 2-D call."""
    emit = Emitter(node)
    args = list(node.args)
    backward = node.target is aten.convolution_backward.default
    for k in (0, 1, 2) if backward else (0, 1):
        args[k] = _as_image(emit, args[k], images)
    first = 4 if backward else 3
    for k, one in ((0, 1), (1, 0), (2, 1), (4, 0)):  # stride, padding, dilation, output_padding
        args[first + k] = [one, *args[first + k]]  # type: ignore[misc]
    return tuple(args)


def _as_image(emit: Emitter, x: Any, images: dict[Node, Node]) -> Any:
    """An operand as it is broadcast to images of one line: numbers and vectors stay."""
    if not is_tensor(x) or value_of(x).dim() < 2:
        return x
    if x not in images:
        images[x] = emit(aten.unsqueeze.default, x, value_of(x).dim() - 1)
    return images[x]


def _rewrite(node: Node, args: tuple[Any, ...], images: dict[Node, Node]) -> None:
    """Put the call over images in the place of the node, where the results are as they were."""
    emit = Emitter(node)
    new = emit(node.target, *args, **node.kwargs)
    if isinstance(value_of(node), torch.Tensor):
        _stand_for(node, new, images)
        return
    for user in list(node.users):
        if user.target is not operator.getitem:
            return
    for user in list(node.users):
        part = Emitter(user)(operator.getitem, new, user.args[1])
        part.meta["val"] = value_of(new)[user.args[1]]
        if value_of(user).dim() == 3:
            _stand_for(user, part, images)
        else:
            replace(user, part)


def _stand_for(node: Node, image: Node, images: dict[Node, Node]) -> None:
    rows = Emitter(node)(aten.squeeze.dim, image, LINE)
    if not same_stride(value_of(rows), value_of(node)):
        return
    images[rows] = image
    replace(node, rows)


__all__ = ["rewrite_conv1d"]
