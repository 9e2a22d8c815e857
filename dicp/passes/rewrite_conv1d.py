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
from dicp.passes.facts import aten, is_contiguous, is_tensor, value_of
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase, takes_graphs

LINE = 2  # the dim that an image of one line has more

_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
)


def rewrite_conv1d(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """relu(convolution(x: [B,C,L], w: [O,C,K], b, [s], [p], [d]))  ->
    squeeze(relu(convolution(unsqueeze(x, 2), unsqueeze(w, 2), b, [1,s], [0,p], [1,d])), 2)

    Elementwise calls and batch norms of such images, inputs and lower ranks are of images too, so that no
    view comes between convolutions. Results that would have other strides, as with operands whose channels
    are dense, are copied if they were row-major; else their call stays.
    """
    if takes_graphs(vendor) or not any(_is_1d(n) for n in gm.graph.nodes):
        return gm
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes])
    if mode is None:
        return gm
    lines = _Lines()
    with mode, quiet_shapes(mode):
        for node in list(gm.graph.nodes):
            if _is_1d(node):
                _rewrite(node, _convolution(node, lines), lines)
            elif node.target in _NORMS and node.args[0] in lines.images:
                _rewrite(node, (lines.images[node.args[0]], *node.args[1:]), lines)
            elif _is_elementwise(node) and lines.has_all_of(node):
                emit = Emitter(node)
                _rewrite(node, tuple(lines.as_image(emit, a) for a in node.args), lines)
    return finish(gm)


class _Lines:
    """Which values are there as images of one line. images: of rows that a rewritten call makes; turned: of
    operands, by a view."""

    def __init__(self) -> None:
        self.images: dict[Any, Node] = {}
        self.turned: dict[Node, Node] = {}

    def has_all_of(self, node: Node) -> bool:
        """Whether a call reads such images, and else only what others do not see as rows."""
        operands = [a for a in node.all_input_nodes if is_tensor(a)]
        return any(a in self.images for a in operands) and all(
            a in self.images or a.op != "call_function" or value_of(a).dim() < 3 for a in operands
        )

    def as_image(self, emit: Emitter, x: Any) -> Any:
        """An operand as it is broadcast to images of one line: numbers and vectors stay."""
        if not is_tensor(x) or value_of(x).dim() < 2:
            return x
        if x in self.images:
            return self.images[x]
        if x not in self.turned:
            self.turned[x] = emit(aten.unsqueeze.default, x, value_of(x).dim() - 1)
        return self.turned[x]


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


def _convolution(node: Node, lines: _Lines) -> tuple[Any, ...]:
    """The arguments of the 2-D call."""
    emit = Emitter(node)
    args = list(node.args)
    backward = node.target is aten.convolution_backward.default
    for k in (0, 1, 2) if backward else (0, 1):
        args[k] = lines.as_image(emit, args[k])
    first = 4 if backward else 3
    for k, one in ((0, 1), (1, 0), (2, 1), (4, 0)):  # stride, padding, dilation, output_padding
        args[first + k] = [one, *args[first + k]]  # type: ignore[misc]
    return tuple(args)


def _rewrite(node: Node, args: tuple[Any, ...], lines: _Lines) -> None:
    """Put the call over images in the place of the node, if all its results are as they were."""
    new = Emitter(node)(node.target, *args, **node.kwargs)
    if isinstance(value_of(node), torch.Tensor):
        results = [(node, new)]
    elif all(user.target is operator.getitem for user in node.users):
        results = [(user, _part(user, new)) for user in node.users]
    else:
        return
    rows = [(old, _rows(old, image), image) for old, image in results]
    if not all(same_stride(value_of(new), value_of(old)) for old, new, _ in rows):
        return
    for old, new, image in rows:
        # what is noted of the rows (that they are rounded) is so of the images: others read those now
        image.meta.update({k: v for k, v in old.meta.items() if k != "val"})
        if new is not image:
            lines.images[new] = image
        replace(old, new)


def _part(user: Node, new: Node) -> Node:
    return Emitter(user)(operator.getitem, new, user.args[1], value=value_of(new)[user.args[1]])


def _rows(old: Node, image: Node) -> Node:
    """An image as the rows that the node was, if it was such; copied where only those were row-major."""
    if value_of(old).dim() != 3:
        return image
    emit = Emitter(old)
    rows = emit(aten.squeeze.dim, image, LINE)
    if is_contiguous(old) and not is_contiguous(rows):
        return emit(aten.clone.default, rows, memory_format=torch.contiguous_format)
    return rows


__all__ = ["rewrite_conv1d"]
