"""Convolutions that a matrix product serves better: the channels-last value as rows, one per position.

    y[p,o] = sum_k x[p,k] w[o,k]        dx[p,k] = sum_o g[p,o] w[o,k]        dw[o,k] = sum_p g[p,o] x[p,k]

p: batch * height * width; o: output channels; k: input channels * window. A window of 1x1 and stride 1 needs
no copy of x; any other gathers each position's window first (im2col), and dx is what windows add up to
(passes/conv_fold.py). A transposed convolution is the dx of the convolution that it transposes.

What dicp.linear does inside its call goes with it: an activation behind the result, or what is added to it.

Of a low precision that is computed in float32 (dicp.passes.widen), the product takes the operands as they are
stored, and gives what is stored, where the vendor has products of such.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import fake_mode_of, quiet_shapes, size_hint
from dicp.ir.expr import LOW_PRECISION
from dicp.ir.meta_keys import FREE_OUTPUTS
from dicp.ir.verify import same_stride
from dicp.ops.conv_call import ConvCall, conv_call, pair, the_conv_call
from dicp.ops.library import register
from dicp.passes import conv_fold
from dicp.passes.facts import aten, is_tensor, prims, same_dtype, value_of
from dicp.passes.freeze import constants_of
from dicp.passes.pack import packed_form
from dicp.passes.rules import Activations, Emitter, activations_of, finish, replace
from dicp.vendor.base import Convolution, ConvolutionPart, VendorBase


def convolution_of(node: Node, activated: bool = False) -> Convolution | None:
    """The convolution that a node computes or differentiates, or of which it computes the input's gradient (a
    transposed one, whose own gradients are the others), where a product could stand for it: two dimensions,
    one group, no dilation, no activation; of any size, and with something added, where no window is
    gathered, else of a known height and width. Of windows that overlap the batch is known as well: of more
    images than were seen, gathering would take as many times the memory. activated: what activation it has
    does not matter."""
    call = conv_call(node)
    plain = call is not None and _is_plain(call) and (activated or call.act == "none")
    if call is None or not plain:
        return None
    x, weight, result = value_of(call.x), value_of(call.weight), value_of(call.result)
    if call.transposed:
        x, result = result, x
    if x.dim() != 4 or weight.dim() != 4:
        return None
    if not all(isinstance(n, int) for n in (x.shape[1], *weight.shape, result.shape[1])):
        return None
    size = (size_hint(result.shape[2]), size_hint(result.shape[3]))
    conv = Convolution(
        positions=size_hint(result.shape[0]) * math.prod(size),
        size=size,
        channels=(x.shape[1], result.shape[1]),
        window=tuple(weight.shape[2:]),
        stride=pair(call.stride),
        padding=pair(call.padding),
        dtype=x.dtype,
        stored=value_of(_stored(call.x)).dtype,
    )
    sizes = (*x.shape[2:], *result.shape[2:], *([] if conv.apart else [x.shape[0]]))
    known = all(isinstance(n, int) for n in sizes)
    rows_as_they_are = conv.pointwise and not call.transposed
    return conv if rows_as_they_are or (known and call.other is None) else None


def _is_plain(call: ConvCall) -> bool:
    if call.groups != 1 or any(d != 1 for d in call.dilation):
        return False
    return call.other is None or same_dtype(call.other, call.node)


def _stored(x: Any) -> Any:
    """The value of a low precision that x is a float32 copy of, whatever order the copy has; else x."""
    source = x.args[0] if is_tensor(x) and x.target is aten.clone.default else x
    if is_tensor(source) and source.target is prims.convert_element_type.default:
        low = value_of(source.args[0]).dtype in LOW_PRECISION
        if low and value_of(source).dtype == torch.float32:
            return source.args[0]
    return x


def parts_of(node: Node) -> tuple[ConvolutionPart, ...]:
    """What a call computes of the convolution that `convolution_of` is about."""
    call = conv_call(node)
    transposed = call is not None and call.transposed
    if call is None or not call.is_backward:
        return ("input",) if transposed else ("result",)
    of_x: ConvolutionPart = "result" if transposed else "input"
    parts: tuple[ConvolutionPart, ...] = (of_x, "weight")
    return tuple(part for part, asked in zip(parts, call.mask, strict=False) if asked)


def pays(vendor: VendorBase, part: ConvolutionPart, conv: Convolution | None) -> bool:
    """Whether the vendor would rather have that part as a matrix product."""
    return conv is not None and bool(vendor.matmul_pays(part, conv))


def rewrite_conv_matmul(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """conv(x, w)  ->  mm(rows of x, w^T), and the gradients likewise, where x is channels-last and the vendor
    says that it pays. Convolutions stay whose weights the vendor packs, or whose bias has another dtype."""
    register()
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes])
    if mode is None:
        return gm
    constants, activations = constants_of(gm), activations_of(gm)
    for node in list(gm.graph.nodes):
        conv = convolution_of(node)
        if conv is None or packed_form(vendor, node, constants) is not None:
            continue
        with mode, quiet_shapes(mode):
            if node.target is aten.convolution_backward.default:
                _gradients(node, conv, vendor)
            elif the_conv_call(node).transposed:
                _transposed(node, conv, vendor)
            elif pays(vendor, "result", conv) and can_be_product(node, conv):
                _result(node, conv, vendor, activations)
    return finish(gm)


def can_be_product(node: Node, conv: Convolution) -> bool:
    """Whether a convolution's operands lie, and are of dtypes, as a product wants them."""
    call = the_conv_call(node)
    return _of_one_dtype(call) and _ready(call.x, call.weight, conv)


def _ready(x: Any, weight: Any, conv: Convolution) -> bool:
    """Whether rows of x and the flat weight are views; of windows, which are gathered anyway, the weight. Of
    row-major images with a border windows are gathered a few elements at a time, which is no faster."""
    gathered = not conv.pointwise and conv.padding == (0, 0)
    in_order = gathered or value_of(x).is_contiguous(memory_format=torch.channels_last)
    return bool(in_order and value_of(weight).is_contiguous())


def _of_one_dtype(call: ConvCall) -> bool:
    """Whether a convolution's bias is of the dtype of all else, as a product's is: that of a norm folded into
    a low precision is float32, which a library's convolution adds before it rounds."""
    return call.bias is None or value_of(call.bias).dtype == value_of(call.node).dtype


def _fused(node: Node, conv: Convolution, vendor: VendorBase, activations: Activations) -> bool:
    """Put dicp.linear for a convolution and what it adds, or the activation behind it, if the vendor claims
    that. Not for a convolution that is computed in another dtype than its operands are stored in."""
    call = the_conv_call(node)
    x, weight, bias, other = call.x, call.weight, call.bias, call.other
    act, root = activations.get(node, ("none", node)) if other is None else ("none", node)
    given = [operand for operand in (x, weight, bias, other) if operand is not None]
    if (other is None and act == "none") or any(_stored(operand) is not operand for operand in given):
        return False
    if other is not None and not value_of(other).is_contiguous(memory_format=torch.channels_last):
        return False
    emit, linear = Emitter(node), torch.ops.dicp.linear.default
    added = None if other is None else _channels_as_rows(emit, other)
    y = emit(linear, _rows(emit, x, conv), _flat_weight(emit, weight), bias, added, act)
    if not vendor.supports(linear, y):
        emit.undo()
        return False
    _replace(root, y, lambda y, of: _ordered(emit, _image(emit, y, of, x, conv), of))
    return True


def _result(node: Node, conv: Convolution, vendor: VendorBase, activations: Activations) -> None:
    call = the_conv_call(node)
    if _fused(node, conv, vendor, activations) or call.other is not None:
        return
    emit = Emitter(node)

    def product(emit: Emitter, x: Any, weight: Any, bias: Any) -> Node:
        columns = emit(aten.permute.default, _flat_weight(emit, weight), [1, 0])
        rows = _rows(emit, x, conv)
        if bias is None:
            return emit(aten.mm.default, rows, columns)
        return emit(aten.addmm.default, bias, rows, columns)

    y = _multiplied(node, node, (call.x, call.weight, call.bias), product, vendor)
    _replace(node, y, lambda y, of: _ordered(emit, _image(emit, y, of, call.x, conv), of))


def _multiplied(
    at: Node, result: Node, operands: Sequence[Any], product: Callable[..., Node], vendor: VendorBase
) -> Node:
    """`product(emit, *operands)` before a node: as the operands are stored where all, and all that is made of
    the result, are of one low precision of which the vendor has products; else as given."""
    stored = [_stored(x) for x in operands]
    dtypes = {value_of(x).dtype for x in stored if is_tensor(x)} | {_made_of(user) for user in result.users}
    if stored != list(operands) and len(dtypes) == 1:
        emit = Emitter(at)
        y = product(emit, *stored)
        if not vendor.computes_wide(y):
            return y
        emit.undo()
    return product(Emitter(at), *operands)


def _made_of(user: Node) -> torch.dtype | None:
    """What a float32 value is rounded to, where that is all that a call does."""
    return value_of(user).dtype if user.target is prims.convert_element_type.default else None


def _replace(old: Node, product: Node, shaped: Callable[[Node, Node], Node]) -> None:
    """`shaped(product, value)` for the value, or for what it is rounded to where the product is that."""
    if value_of(product).dtype == value_of(old).dtype:
        return replace(old, shaped(product, old))
    for rounded in list(old.users):
        replace(rounded, shaped(product, rounded))


def _gradients(node: Node, conv: Convolution, vendor: VendorBase) -> None:
    call = the_conv_call(node)
    grad, x, weight = call.grad, call.x, call.weight
    image, of_positions = (grad, x) if call.transposed else (x, grad)
    ready, folds = _ready(image, weight, conv), not (call.transposed or conv.pointwise)
    of_x: ConvolutionPart = "result" if call.transposed else "input"
    of_input = call.mask[0] and (ready or folds) and pays(vendor, of_x, conv)
    of_weight = call.mask[1] and ready and pays(vendor, "weight", conv)
    users = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if not (of_input or of_weight) or len(users) != len(node.users):
        return
    emit = Emitter(node)

    by_channel = conv_fold.lays_by_channel(weight, conv)
    as_rows = functools.cache(lambda x: _channels_as_rows(emit, x))
    windows = functools.cache(lambda image: _rows(emit, image, conv))

    def input_gradient(emit: Emitter, grad: Any, weight: Any) -> Node:
        if folds:
            return conv_fold.product(emit, as_rows(grad), weight, by_channel)
        if call.transposed:
            columns = emit(aten.permute.default, _flat_weight(emit, weight), [1, 0])
            return emit(aten.mm.default, windows(grad), columns)
        return emit(aten.mm.default, as_rows(grad), _flat_weight(emit, weight))

    def input_image(dx: Node, of: Node) -> Node:
        if folds:
            return _ordered(emit, conv_fold.fold(emit, dx, by_channel, conv, value_of(x).shape[2:]), of)
        dx = _image(emit, dx, x, x, conv)
        return _ordered(emit, dx, of) if call.transposed else dx

    def weight_gradient(emit: Emitter, of_positions: Any, image: Any) -> Node:
        by_channel = emit(aten.permute.default, as_rows(of_positions), [1, 0])
        return emit(aten.mm.default, by_channel, windows(image))

    if of_input and 0 in users:
        operands = (grad, weight)
        if folds and not conv.apart:
            dx = input_gradient(emit, *operands)
        else:
            dx = _multiplied(node, users[0], operands, input_gradient, vendor)
        _replace(users.pop(0), dx, input_image)
    if of_weight and 1 in users:
        old = users.pop(1)
        shape = list(value_of(weight).shape)
        dw = _multiplied(node, old, (of_positions, image), weight_gradient, vendor)
        _replace(old, dw, lambda dw, of: _as_traced(emit, emit(aten.view.default, dw, shape), of))
    if 2 in users:
        replace(users.pop(2), emit(aten.sum.dim_IntList, grad, [0, 2, 3]))
    if users:
        left = (0 in users, 1 in users, 2 in users)
        new = emit(node.target, *call.masked(*left))
        new.meta.update({k: v for k, v in node.meta.items() if k not in ("val", *new.meta)})
        node.replace_all_uses_with(new)


def _transposed(node: Node, conv: Convolution, vendor: VendorBase) -> None:
    call = the_conv_call(node)
    if not pays(vendor, "input", conv) or not _of_one_dtype(call):
        return
    emit, by_channel = Emitter(node), conv_fold.lays_by_channel(call.weight, conv)

    def product(emit: Emitter, x: Any, weight: Any) -> Node:
        return conv_fold.product(emit, _channels_as_rows(emit, x), weight, by_channel)

    def image(rows: Node, of: Node) -> Node:
        y = conv_fold.fold(emit, rows, by_channel, conv, value_of(node).shape[2:])
        if call.bias is not None:
            y = emit(aten.add.Tensor, y, emit(aten.view.default, call.bias, [-1, 1, 1]))
        return _ordered(emit, y, of)

    operands = (call.x, call.weight)
    if call.bias is None and conv.apart:
        y = _multiplied(node, node, operands, product, vendor)
    else:  # rounded once, when all is added up
        y = product(emit, *operands)
    _replace(node, y, image)


def _ordered(emit: Emitter, image: Node, old: Node) -> Node:
    """The channels-last image, or a copy in the order of the value that it stands for."""
    if same_stride(value_of(image), value_of(old)):
        return image
    return emit(aten.clone.default, image, memory_format=torch.contiguous_format)


def _as_traced(emit: Emitter, new: Node, old: Node) -> Node:
    """new with the strides of old, where a result of the graph needs them."""
    output = new.graph.output_node()
    free = new.graph.owning_module.meta.get(FREE_OUTPUTS, ())  # type: ignore[union-attr]
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    shown = any(r is old and k not in free for k, r in enumerate(results))
    if not shown or value_of(new).stride() == value_of(old).stride():
        return new
    return emit(aten.clone.default, new, memory_format=torch.channels_last)


def _flat_weight(emit: Emitter, weight: Any) -> Node:
    """[O,C,KH,KW] -> [O,C*KH*KW]"""
    shape = value_of(weight).shape
    if not value_of(weight).is_contiguous():
        weight = emit(aten.clone.default, weight, memory_format=torch.contiguous_format)
    return emit(aten.view.default, weight, [shape[0], shape[1] * shape[2] * shape[3]])


def _channels_as_rows(emit: Emitter, image: Any) -> Node:
    """[B,C,H,W] -> [B*H*W,C]; a copy unless the image is channels-last."""
    last = emit(aten.permute.default, image, [0, 2, 3, 1])
    if not value_of(last).is_contiguous():
        last = emit(aten.clone.default, last, memory_format=torch.contiguous_format)
    return emit(aten.view.default, last, [-1, value_of(image).shape[1]])


def _rows(emit: Emitter, x: Any, conv: Convolution) -> Node:
    """[B,C,H,W] -> [positions, C * window]"""
    if conv.pointwise:
        return _channels_as_rows(emit, x)
    (kh, kw), (sh, sw), (ph, pw) = conv.window, conv.stride, conv.padding
    if ph or pw:
        x = emit(aten.constant_pad_nd.default, x, [pw, pw, ph, ph], 0)
    windows = emit(aten.unfold.default, emit(aten.unfold.default, x, 2, kh, sh), 3, kw, sw)
    ordered = emit(aten.permute.default, windows, [0, 2, 3, 1, 4, 5])
    dense = emit(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return emit(aten.view.default, dense, [-1, conv.channels[0] * kh * kw])


def _image(emit: Emitter, rows: Node, like: Any, x: Any, conv: Convolution) -> Node:
    """[B*H*W,C] -> [B,C,H,W], channels-last. x: what symbolic height and width are those of."""
    _, c, h, w = value_of(like).shape
    if conv.pointwise:
        h, w = emit.size(x, 2), emit.size(x, 3)
    return emit(aten.permute.default, emit(aten.view.default, rows, [-1, h, w, c]), [0, 3, 1, 2])
