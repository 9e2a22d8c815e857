"""Products with few columns, and those of one row with a weight that kernels make, become sums of products;
those of depth one become products of elements.

    y = mm(a: [M, K], b: [K, 1])   ->   y = sum(a * permute(b, [1, 0]), -1, keepdim)
    y = mm(a: [M, K], b: [K, 2])   ->   y = sum(unsqueeze(a, 1) * permute(b, [1, 0]), -1)
    y = mm(a: [1, K], b: [K, N])   ->   y = unsqueeze(sum(a * permute(b, [1, 0]), -1), 0)
    y = mm(a: [M, 1], b: [1, N])   ->   y = a * b
    y = addmm(c, a, b)             ->   y = that + c

They take in what makes their operands and what is made of them: heads of one unit, and their gradients, which
are an outer product and a sum over rows. Libraries read what was stored first, make tiles of which one column
is used, and some add one product after the other: MKL's dot product of 1,025 positive float32 is 3.6e-6 off.
What makes a weight is in made_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal
from dicp.ir.expr import LOW_PRECISION
from dicp.ops.library import register
from dicp.passes.facts import aten, is_plain_sum, prims, rank, value_of
from dicp.passes.made_weights import is_made
from dicp.passes.rules import Emitter, finish, replace
from dicp.vendor.base import VendorBase, takes_graphs

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_SINGLE = (torch.float32, torch.float64, *LOW_PRECISION)
FEW_COLUMNS, DEEP = 3, 64
"""Columns up to which sums are ahead of libraries and tiles, if they are this deep. Two columns of 4,096 rows
of 1,024 elements take MKL 2.0 ms, tiles 4.1 and sums 1.5; four take 2.3, 4.6 and 2.8 (one core with AVX2,
one-off script; scripts/operators.py has the first)."""


def rewrite_dot(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """Rewrite such products, of one matrix or a batch; to sums where the left operand lies by rows, or is one
    row that meets one column."""
    if takes_graphs(vendor):  # whose toolchains have products
        return gm
    register()
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS and is_plain_sum(node) and value_of(node).dtype in _SINGLE:
            if _depth(node) == 1:
                _rewrite(node, _outer)
            elif _has_few_columns(node):
                _rewrite(node, _sum)
            elif _is_row_by_made_weight(node):
                _rewrite(node, _sum_of_row)
    return finish(gm)


def _depth(node: Node) -> int | None:
    """None where it is a symbol."""
    depth = value_of(node.args[-1]).shape[-2]
    return depth if isinstance(depth, int) else None


def _has_few_columns(node: Node) -> bool:
    (rows, columns), depth = value_of(node).shape[-2:], _depth(node)
    if not isinstance(columns, int) or depth == 0:
        return False
    is_one = isinstance(rows, int) and rows == columns == 1
    if not is_one and not known_equal(value_of(node.args[-2]).stride(-1), 1):
        return False
    return columns == 1 or depth is not None and depth >= DEEP and 1 < columns <= FEW_COLUMNS


def _is_row_by_made_weight(node: Node) -> bool:
    shape, depth = value_of(node).shape, _depth(node)
    return len(shape) == 2 and known_equal(shape[0], 1) and (depth or 0) >= DEEP and is_made(node.args[-1])


def _rewrite(node: Node, product: Callable[[Emitter, Node, Node], Node]) -> None:
    emit, dtype = Emitter(node), value_of(node).dtype
    low = dtype in LOW_PRECISION
    *c, a, b = (emit(prims.convert_element_type.default, x, torch.float32) if low else x for x in node.args)
    new = product(emit, a, b)
    for added in c:
        new = emit(aten.add.Tensor, new, added)
    replace(node, emit(prims.convert_element_type.default, new, dtype) if low else new)


def _outer(emit: Emitter, a: Node, b: Node) -> Node:
    return emit(aten.mul.Tensor, a, b)


def _sum(emit: Emitter, a: Node, b: Node) -> Node:
    """[.., M, K] and [.., K, N]  ->  [.., M, N]"""
    dims = rank(b)
    one = value_of(b).shape[-1] == 1
    rows = emit(aten.permute.default, b, [1, 0] if dims == 2 else [0, 2, 1])
    if not one:
        a, rows = emit(aten.unsqueeze.default, a, dims - 1), emit(aten.unsqueeze.default, rows, dims - 2)
    return emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, a, rows), [-1], one)


def _sum_of_row(emit: Emitter, a: Node, b: Node) -> Node:
    """[1, K] and [K, N]  ->  [1, N]"""
    products = emit(aten.mul.Tensor, a, emit(aten.permute.default, b, [1, 0]))
    return emit(aten.unsqueeze.default, emit(aten.sum.dim_IntList, products, [-1]), 0)


__all__ = ["rewrite_dot"]
