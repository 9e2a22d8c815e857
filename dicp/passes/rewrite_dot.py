"""Products of one row with one column become sums of products.

    y = mm(a: [1, K], b: [K, 1])   ->   y = sum(a * permute(b, [1, 0]), -1, keepdim)
    y = addmm(c, a, b)             ->   y = that + c

A sum takes in what makes its operands, and is added in parts, where libraries read what was stored first and
some add one product after the other: MKL's of 1,025 positive float32 are 3.6e-6 off.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dicp.ir.expr import LOW_PRECISION
from dicp.passes.facts import aten, is_plain_sum, prims, rank, value_of
from dicp.passes.rules import Emitter, finish, replace

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_SINGLE = (torch.float32, torch.float64, *LOW_PRECISION)


def rewrite_dot(gm: GraphModule) -> GraphModule:
    """Rewrite the products, of one matrix or of a batch, whose results are one element each."""
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS and _is_one_element(node):
            _rewrite(node)
    return finish(gm)


def _is_one_element(node: Node) -> bool:
    value, depth = value_of(node), value_of(node.args[-1]).shape[-2]
    rows, columns = value.shape[-2:]
    ones = isinstance(rows, int) and isinstance(columns, int) and rows == columns == 1
    some = not (isinstance(depth, int) and depth == 0)
    return ones and some and is_plain_sum(node) and value.dtype in _SINGLE


def _rewrite(node: Node) -> None:
    emit, dtype = Emitter(node), value_of(node).dtype
    low = dtype in LOW_PRECISION
    *c, a, b = (emit(prims.convert_element_type.default, x, torch.float32) if low else x for x in node.args)
    row = emit(aten.permute.default, b, [1, 0] if rank(node) == 2 else [0, 2, 1])
    new = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, a, row), [-1], True)
    for added in c:
        new = emit(aten.add.Tensor, new, added)
    replace(node, emit(prims.convert_element_type.default, new, dtype) if low else new)


__all__ = ["rewrite_dot"]
