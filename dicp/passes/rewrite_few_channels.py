"""Products over few channels that lie apart, as the heads of attention scores do, become sums of products.

    x: [B,I,J,K], whose channels are not innermost in memory: scores [B,K,I,J], permuted
    y = view(addmm(bias, view(x, [BIJ,K]), w: [K,N]), [B,I,J,N])
    ->
    x = permute(x, [0,3,1,2])
    y = permute(x[:, 0:1] * w[0] + .. + x[:, K-1:K] * w[K-1] + bias, [0,2,3,1])

So do convolutions of row-major images with a window of one element, and their gradients by the image; those
by the weight, where the vendor has them as products, a batch of one row for each channel, as long as an
image, and their sum.

A product reads and writes rows of channels: its operand is copied so that they lie beside each other, and so
is its result for what reads it otherwise, as a softmax does. The sums leave each where it is, and kernels
take them in. oneDNN's convolutions take ten times as long (one-off script).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal, size_hint
from dicp.ir.expr import LOW_PRECISION
from dicp.ir.memory_order import no_overlap, order_of
from dicp.ops.aliases import base_of
from dicp.ops.conv_call import ConvCall, conv_call
from dicp.passes.conv_matmul import convolution_of, pays
from dicp.passes.facts import (
    aten,
    is_plain_sum,
    is_tensor,
    mutated_arguments,
    prims,
    rank,
    same_shape,
    value_of,
)
from dicp.passes.layout import relay
from dicp.passes.rules import Emitter, finish, replace, sole_user
from dicp.vendor.base import VendorBase, takes_graphs

FEW, LONG = 12, 16
"""Channels up to which sums are ahead, read and made, and elements beside each other that make it worth
looking. A block of attention over 196 positions whose heads are mixed before the softmax and behind it, in
float32 and bf16: with 4 heads 0.88 and 1.94 ms as products, 0.64 and 0.73 as sums, with 12 3.6 and 4.6, and
3.3 and 3.4; with 16 they are level (two Intel cores of the 5th generation, one-off script)."""
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_DTYPES = (torch.float32, torch.float64, *LOW_PRECISION)


class _Mix(NamedTuple):
    """result[.., n, ..] = sum over k of x[.., k, ..] * weight[k, n] + bias[n]; the result may have more dims
    of size 1, or fewer."""

    x: Node
    dim: int
    """of x, in which the channels are"""
    weight: Node
    along: int
    """the dim of the weight that is summed over"""
    across: int
    """its dim of N elements; others are of size 1"""
    bias: Node | None
    result: Node
    """of gradients all of them"""


def rewrite_few_channels(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """Rewrite such products, and give what follows the strides that come of it."""
    if takes_graphs(vendor):  # whose toolchains choose where values lie
        return gm
    written = {base_of(a) for n in gm.graph.nodes for a in mutated_arguments(n)}
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS:
            found, call = _product(node, written), None
        else:
            call = conv_call(node)
            found = None if call is None else _convolution(call)
        if found is None or not _is_few(found) or not _lies_apart(found):
            continue
        if call is not None and call.is_backward:
            _rewrite_gradients(gm, vendor, call, found)
        else:
            _become(gm, found.result, _sums(Emitter(node), found))
    return finish(gm)


def _become(gm: GraphModule, node: Node, new: Node) -> None:
    laid_out, new.meta["val"] = value_of(new), value_of(node)
    replace(node, new)
    relay(gm, {new: laid_out})


def _product(node: Node, written: set[Node]) -> _Mix | None:
    *bias, rows, weight = node.args
    weight = _of_all_rows(weight)
    if weight is None or not is_plain_sum(node) or bias and rank(bias[0]) != 1:
        return None
    x, (depth, columns) = _before_rows(rows, written), value_of(weight).shape[-2:]
    sizes = _sizes(x)
    if not sizes or not known_equal(sizes[-1], depth):
        return None
    for result in (node, sole_user(node)):
        if result is node or result is not None and result.target in _VIEWS:
            made = _sizes(result)
            wanted = (*sizes[:-1], columns)
            if len(made) == len(wanted) and all(map(known_equal, made, wanted)):
                dim = max(d for d, n in enumerate(value_of(x).shape) if not _is_one(n))
                last = rank(weight) - 1
                return _Mix(x, dim, weight, last - 1, last, bias[0] if bias else None, result)
    return None


def _of_all_rows(weight: Node) -> Node | None:
    """[K, N] or [1,K,N], which a batch of products shares: what was expanded for it."""
    shape = value_of(weight).shape[-2:]
    source = weight.args[0] if weight.target in _VIEWS else weight
    if source.target is aten.expand.default:
        source = source.args[0]
        if rank(source) >= 2 and all(map(known_equal, value_of(source).shape[-2:], shape)):
            weight = source
    return weight if all(_is_one(n) for n in value_of(weight).shape[:-2]) else None


def _sizes(x: Node) -> list[int | torch.SymInt]:
    """Of the dims that have more than one element."""
    return [n for n in value_of(x).shape if not _is_one(n)]


def _before_rows(rows: Node, written: set[Node]) -> Node:
    """What was viewed as [M, K], and copied for it where it had to be; not of what somebody writes to, which
    the copy may precede."""
    x = rows.args[0] if rows.target in _VIEWS else rows
    if x.target is aten.clone.default and base_of(x.args[0]) not in written:
        x = x.args[0]
    return x.args[0] if x.target is aten.unsqueeze.default else x


def _convolution(call: ConvCall) -> _Mix | None:
    if call.transposed or call.groups != 1 or call.act != "none":
        return None
    window = value_of(call.weight).shape[2:]
    if any(n != 1 for n in (*window, *call.stride)) or any(call.padding) or call.other is not None:
        return None
    if not call.is_backward:
        return _Mix(call.x, 1, call.weight, 1, 0, call.bias, call.node)
    return _Mix(call.grad, 1, call.weight, 0, 1, None, call.node)


def _is_few(mix: _Mix) -> bool:
    read = mix.weight, *((mix.bias,) if mix.bias is not None else ())
    if value_of(mix.x).dtype not in _DTYPES or not all(is_tensor(x) for x in (mix.x, *read)):
        return False
    shape = value_of(mix.weight).shape
    depth, columns = shape[mix.along], shape[mix.across]
    if mix.bias is not None and not known_equal(value_of(mix.bias).shape[0], columns):
        return False
    return all(isinstance(n, int) and 1 < n <= FEW for n in (depth, columns))


def _lies_apart(mix: _Mix) -> bool:
    """Whether something else than the channels lies beside each other in memory."""
    value = value_of(mix.x)
    innermost = order_of(value)[-1]
    beside = innermost != mix.dim and known_equal(value.stride(innermost), 1)
    return beside and no_overlap(value) and size_hint(value.shape[innermost]) >= LONG


def _sums(emit: Emitter, mix: _Mix) -> Node:
    dims, dtype = rank(mix.x), value_of(mix.x).dtype
    order = order_of(value_of(mix.x))
    channels = order.index(mix.dim)
    behind = [1] * (dims - 1 - channels)

    def by_channel(x: Node) -> Node:
        """As [N,1,..], to be multiplied with where the channels are."""
        return emit(aten.view.default, x, [value_of(weight).shape[mix.across], *behind])

    def term(k: int) -> Node:
        image = emit(aten.slice.Tensor, x, channels, k, k + 1)
        return emit(aten.mul.Tensor, image, by_channel(emit(aten.select.int, weight, mix.along, k)))

    x, weight = _read(emit, emit(aten.permute.default, mix.x, list(order))), _read(emit, mix.weight)
    terms = [term(k) for k in range(value_of(weight).shape[mix.along])]
    total = functools.reduce(lambda a, b: emit(aten.add.Tensor, a, b), terms)
    if mix.bias is not None:
        total = emit(aten.add.Tensor, total, by_channel(_read(emit, mix.bias)))
    total = _rounded(emit, total, dtype)
    result = emit(aten.permute.default, total, [order.index(d) for d in range(dims)])
    if same_shape(result, mix.result):
        return result
    sizes = iter([emit.size(result, d) for d in range(dims) if not _is_one(value_of(result).shape[d])])
    shape = [1 if _is_one(n) else next(sizes) for n in value_of(mix.result).shape]
    return emit(aten.view.default, result, shape)


def _is_one(size: int | torch.SymInt) -> bool:
    return known_equal(size, 1)


def _rewrite_gradients(gm: GraphModule, vendor: VendorBase, call: ConvCall, of_image: _Mix) -> None:
    emit, node, by_weight = Emitter(call.node), call.node, pays(vendor, "weight", convolution_of(call.node))
    for user in list(node.users):
        if user.args[1] == 0:
            _become(gm, user, _sums(emit, of_image._replace(result=user)))
        elif by_weight and user.args[1] == 1:
            _become(gm, user, _weight_gradient(emit, call))
        elif by_weight:
            others = [d for d in range(rank(call.grad)) if d != 1]
            _become(gm, user, emit(aten.sum.dim_IntList, call.grad, others))
    if node.users:
        rest = emit(node.target, *call.masked(False, call.mask[1], call.mask[2]))
        rest.meta.update({k: v for k, v in node.meta.items() if k not in ("val", *rest.meta)})
        node.replace_all_uses_with(rest)


def _weight_gradient(emit: Emitter, call: ConvCall) -> Node:
    """[O,C,1,..], added up over all images before it is rounded."""

    def rows(image: Node) -> Node:
        if not value_of(image).is_contiguous():
            image = emit(aten.clone.default, image, memory_format=torch.contiguous_format)
        return _read(emit, emit(aten.view.default, image, [emit.size(image, 0), emit.size(image, 1), -1]))

    columns = emit(aten.permute.default, rows(call.x), [0, 2, 1])
    of_images = emit(aten.bmm.default, rows(call.grad), columns)
    total = emit(aten.sum.dim_IntList, of_images, [0])
    return emit(
        aten.view.default, _rounded(emit, total, value_of(call.grad).dtype), list(value_of(call.weight).shape)
    )


def _read(emit: Emitter, x: Node) -> Node:
    low = value_of(x).dtype in LOW_PRECISION
    return emit(prims.convert_element_type.default, x, torch.float32) if low else x


def _rounded(emit: Emitter, x: Node, dtype: torch.dtype) -> Node:
    return x if value_of(x).dtype == dtype else emit(prims.convert_element_type.default, x, dtype)


__all__ = ["rewrite_few_channels"]
