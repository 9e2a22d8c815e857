"""Gradients that add rows into zeros, and are then added to another, add into that other.

    add(x, embedding_dense_backward(g, i, rows, -1, False))    ->   index_put(x, [i], g, accumulate=True)
    add(x, index_put(zeros, i, v, accumulate=True))            ->   index_put(x, i, v, accumulate=True)
    add(x, scatter_add(zeros, d, i, v))                        ->   scatter_add(x, d, i, v)

A table that is both embedding and output layer has such a gradient: its zeros, and the sum over the whole
table, go. In low precision, where sums are float32 and x would be copied to it and back, the gradient of a
table becomes dicp.add_rows if the vendor claims that; the rest stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.ir.verify import same_meta
from dicp.passes.facts import aten, rank, same_dtype, same_shape, uniform_value, value_of
from dicp.passes.rules import Claims, Emitter, finish, replace, try_claim

_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)


def rewrite_scatter(gm: GraphModule, vendor: Claims) -> GraphModule:
    """Rewrite each sum of a tensor and of what was added into zeros for it alone."""
    for node in list(gm.graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs:
            _rewrite(node, vendor)
    return finish(gm)


def _rewrite(node: Node, vendor: Claims) -> None:
    for base, added in (node.args, reversed(node.args)):
        if not isinstance(base, Node) or not same_meta(value_of(base), value_of(node)):
            continue  # what is written over keeps the strides of the base
        if not isinstance(added, Node) or len(added.users) != 1 or added is base:
            continue
        if same_shape(added, node) and same_dtype(added, node) and _adds_into_zeros(added):
            new = _rounded_once(node, base, added, vendor)
            if new is None and value_of(node).dtype not in LOW_PRECISION:
                new = _onto(Emitter(node), base, added)
            if new is not None:
                replace(node, new)
            return


def _adds_into_zeros(node: Node) -> bool:
    if node.target is aten.embedding_dense_backward.default:
        scaled_by_frequency = node.args[4]
        return not scaled_by_frequency
    if node.target in _PUTS:
        accumulates = len(node.args) > 3 and node.args[3]
        return bool(accumulates) and uniform_value(node.args[0]) == 0
    return node.target is aten.scatter_add.default and uniform_value(node.args[0]) == 0


def _rounded_once(node: Node, base: Node, added: Node, vendor: Claims) -> Node | None:
    if added.target is not aten.embedding_dense_backward.default or value_of(node).dtype not in LOW_PRECISION:
        return None
    grad, indices, _, padding, _ = added.args
    return try_claim(vendor, torch.ops.dicp.add_rows.default, (base, grad, indices, padding), at=node)


def _onto(emit: Emitter, base: Any, added: Node) -> Node:
    """The same additions, into `base`."""
    if added.target is not aten.embedding_dense_backward.default:
        return emit(added.target, base, *added.args[1:])
    grad, indices, _, padding, _ = added.args
    if isinstance(padding, Node) or padding >= 0:  # type: ignore[operator]
        nothing = emit(aten.eq.Scalar, indices, padding)
        nothing = emit(aten.unsqueeze.default, nothing, rank(nothing))
        zero = emit(aten.full.default, [], 0, dtype=value_of(grad).dtype, device=value_of(grad).device)
        grad = emit(aten.where.self, nothing, zero, grad)
    return emit(aten.index_put.default, base, [indices], grad, True)


__all__ = ["rewrite_scatter"]
