"""Contractions of a low precision computed in float32, where the vendor's libraries are slow at their own.

    y: bf16 = mm(a, b)   ->   y = bf16(mm(f32(a), f32(b)))

The sums are float32 in either, and the result is rounded once in either. Operands that others use too are
converted once; kernels that make them or use the result do the conversion, where there are such. A vendor
whose own products convert blocks of their operands asks for no such copies.

What follows a convolution and may become part of its call (a norm by running statistics, a sum, ReLU) is
computed in float32 as well, and what lies between two convolutions is not rounded, where nothing else reads
it:

    conv(f32(bf16(relu(f32(bf16(conv(x)))))))   ->   conv(relu(conv(x)))
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dicp.ir.expr import LOW_PRECISION
from dicp.ir.verify import same_stride
from dicp.ops.library import register
from dicp.passes.facts import aten, is_tensor, prims, value_of
from dicp.passes.rules import Emitter, finish, replace, sole_user
from dicp.vendor.base import VendorBase


def widen(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """Rewrite what `vendor.computes_wide(node)` names."""
    register()
    operands, before = _operands(), frozenset(gm.graph.nodes)
    wide: dict[Node, Node] = {}
    images: set[Node] = set()
    for node in list(gm.graph.nodes):
        if node.target in operands and _is_low(node, operands[node.target]) and vendor.computes_wide(node):
            is_image = node.target is aten.convolution.default
            rounded = _rewrite(node, wide)
            if is_image and rounded is not None:
                images.add(rounded)
    if images:
        _widen_followers(gm.graph, images)
        _join(images, before)
    return finish(gm)


def _operands() -> dict[Any, int]:
    """The contractions, and how many leading arguments hold the tensors that must be of one dtype."""
    return {
        aten.mm.default: 2,
        aten.addmm.default: 3,
        aten.bmm.default: 2,
        aten.baddbmm.default: 3,
        aten.convolution.default: 3,
        aten.convolution_backward.default: 3,
        aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
        torch.ops.dicp.attention.default: 3,
    }


def _is_low(node: Node, count: int) -> bool:
    """Whether a contraction multiplies tensors of one low precision; eager refuses others."""
    dtypes = {value_of(a).dtype for a in node.args[:count] if is_tensor(a)}
    return len(dtypes) == 1 and dtypes <= set(LOW_PRECISION)


def _converted(emit: Emitter, x: Any, wide: dict[Node, Node]) -> Any:
    """x in float32. What x permutes is converted, so that the copy is made in the order of memory."""
    if not is_tensor(x) or value_of(x).dtype not in LOW_PRECISION:
        return x
    if x not in wide and x.target is aten.permute.default:
        wide[x] = emit(x.target, _converted(emit, x.args[0], wide), *x.args[1:])
    elif x not in wide:
        wide[x] = emit(prims.convert_element_type.default, x, torch.float32)
    return wide[x]


def _rewrite(node: Node, wide: dict[Node, Node]) -> Node | None:
    """The call in float32, where its results have the strides that they were traced with. Gives its result,
    rounded, where it has one."""
    emit, known = Emitter(node), dict(wide)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _converted(emit, n, known))
    new = emit(node.target, *args, **kwargs)
    old, now = value_of(node), value_of(new)
    if isinstance(old, torch.Tensor):
        if not same_stride(old, now):
            emit.undo()
            return None
        rounded = emit(prims.convert_element_type.default, new, old.dtype)
        replace(node, rounded)
    else:
        rounded = None
        pairs = [(a, b) for a, b in zip(old, now, strict=True) if isinstance(a, torch.Tensor)]
        if not all(same_stride(a, b) for a, b in pairs):
            emit.undo()
            return None
        for user in list(node.users):
            part = emit(operator.getitem, new, user.args[1])
            if value_of(part).dtype != value_of(user).dtype:
                part = emit(prims.convert_element_type.default, part, value_of(user).dtype)
            replace(user, part)
        node.graph.erase_node(node)
    wide.update(known)
    return rounded


_NORM = aten._native_batch_norm_legit_no_training.default
_FOLLOWERS = frozenset({_NORM, aten.relu.default, aten.hardtanh.default, aten.add.Tensor})


def _widen_followers(graph: Graph, images: set[Node]) -> None:
    """Have calls that alone read one of the rounded images compute in float32, and round what they make: that
    joins the images."""
    wide: dict[Node, Node] = {}  # not that of the convolutions, which may come later
    for node in list(graph.nodes):
        if node.target not in _FOLLOWERS or not any(sole_user(x) is node for x in images & {*node.args}):
            continue
        result = _result(node)
        if result is None or value_of(result).dtype not in LOW_PRECISION:
            continue
        emit, known = Emitter(result), dict(wide)
        new = emit(node.target, *(_unrounded(emit, x, images, known) for x in node.args), **node.kwargs)
        new = new if result is node else emit(operator.getitem, new, 0)
        if not same_stride(value_of(result), value_of(new)):
            emit.undo()
            continue
        rounded = emit(prims.convert_element_type.default, new, value_of(result).dtype)
        replace(result, rounded)
        if result is not node:
            graph.erase_node(node)
        images.add(rounded)
        wide.update(known)


def _result(node: Node) -> Node | None:
    """What a follower makes, if nothing else of it is used."""
    if node.target is not _NORM:
        return node
    part = sole_user(node)
    return part if part is not None and part.args[1] == 0 else None


def _unrounded(emit: Emitter, x: Any, images: set[Node], wide: dict[Node, Node]) -> Any:
    """x in float32: of an image that only the caller reads, what was rounded."""
    if x in images and len(x.users) == 1:
        return x.args[0]
    return _converted(emit, x, wide)


def _join(images: set[Node], before: frozenset[Node]) -> None:
    """Have the pass's own conversions of a rounded image give it unrounded, if nobody else reads it. before:
    the nodes that are not the pass's."""
    for image in images:
        own = [n for n in image.users if n not in before and n.target is prims.convert_element_type.default]
        if len(own) == len(image.users):
            for user in own:
                user.replace_all_uses_with(image.args[0])


__all__ = ["widen"]
