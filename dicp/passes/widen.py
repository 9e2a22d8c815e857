"""Contractions of a low precision computed in float32, where the vendor's libraries are slow at their own.

    y: bf16 = mm(a, b)   ->   y = bf16(mm(f32(a), f32(b)))

The sums are float32 in either, and the result is rounded once in either. Operands that others use too are
converted once; kernels that make them or use the result do the conversion, where there are such. A vendor
whose own products convert blocks of their operands asks for no such copies.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dicp.ir.expr import LOW_PRECISION
from dicp.ir.verify import same_stride
from dicp.ops.library import register
from dicp.passes.facts import aten, is_tensor, prims, value_of
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase


def widen(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """Rewrite what `vendor.computes_wide(node)` names."""
    register()
    operands = _operands()
    wide: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target in operands and _is_low(node, operands[node.target]) and vendor.computes_wide(node):
            _rewrite(node, wide)
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


def _rewrite(node: Node, wide: dict[Node, Node]) -> None:
    """The call in float32, where its results have the strides that they were traced with."""
    emit, known = Emitter(node), dict(wide)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _converted(emit, n, known))
    new = emit(node.target, *args, **kwargs)
    old, now = value_of(node), value_of(new)
    if isinstance(old, torch.Tensor):
        if not same_stride(old, now):
            emit.undo()
            return
        replace(node, emit(prims.convert_element_type.default, new, old.dtype))
    else:
        pairs = [(a, b) for a, b in zip(old, now, strict=True) if isinstance(a, torch.Tensor)]
        if not all(same_stride(a, b) for a, b in pairs):
            emit.undo()
            return
        for user in list(node.users):
            part = emit(operator.getitem, new, user.args[1])
            if value_of(part).dtype != value_of(user).dtype:
                part = emit(prims.convert_element_type.default, part, value_of(user).dtype)
            replace(user, part)
        node.graph.erase_node(node)
    wide.update(known)


__all__ = ["widen"]
