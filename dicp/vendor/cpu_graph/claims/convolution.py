"""Convolution and its gradients, by oneDNN and by Winograd's algorithm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.ir.meta_keys import LAYOUT_KEY, PACKED
from dicp.ir.value import Value
from dicp.ops.conv_call import ConvCall, the_conv_call
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims import depthwise, rectified, winograd
from dicp.vendor.cpu_graph.claims.common import (
    FLOATS,
    SHIM,
    activation,
    aten,
    channels_last,
    dtype_of,
    in_layout,
    lists,
    order_in_memory,
)
from dicp.vendor.cpu_graph.claims.conv_products import FEW_POSITIONS
from dicp.vendor.cpu_graph.claims.images import CHANNELS_LAST


def _conv_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """Convolutions answer in channels-last when the input or the weight is; else as traced."""
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    first = val[0] if isinstance(val, (tuple, list)) else val
    x = args[0] if not isinstance(val, (tuple, list)) else args[1]
    if not isinstance(first, torch.Tensor) or first.dim() not in (4, 5):
        return None
    last = (
        channels_last(x)
        or channels_last(args[1] if x is args[0] else args[2])
        or (isinstance(val, (tuple, list)) and channels_last(args[0]))
    )
    n = first.dim()
    order = (0, *range(2, n), 1) if last else tuple(range(n))

    def strides(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return None
        sizes = tuple(lowering.index(s) for s in v.shape)
        return dense_strides(sizes, order if v.dim() == n else tuple(range(v.dim())))

    vals = val if isinstance(val, (tuple, list)) else [val]
    return [strides(v) for v in vals]


def _prepare_conv(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    count = 3 if node.target is aten.convolution_backward.default else 1
    wanted = [in_layout(lowering, node, args, k) for k in range(count)]
    if count == 3 and len(wanted[1].shape) == 4 and channels_last(wanted[1]):
        wanted[2] = lowering.in_order(args[2], (0, 2, 3, 1))  # which the library would do, more slowly
    rest = (
        args[count:] if count == 3 else dense(2)(lowering, node, args)[1:]
    )  # the bias of a forward convolution
    return (*wanted, *rest)


OTHER = 3
"""Of dicp::conv's arguments, what it adds: oneDNN can do that in place."""

LAYOUTS = {"channels-last": CHANNELS_LAST, "row-major": (0, 1, 2, 3)}


def _in_both_layouts(claim: Claim, node: fx.Node, config: Config, operands: Sequence[int]) -> list[Claim]:
    """The call in the layout that its operands have or the layout pass chose, and with `operands` brought
    into the one or the other first, which oneDNN's kernels for some sizes are worth."""
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    packed = any(PACKED in a.meta for a in node.all_input_nodes)  # for the layout that was chosen
    if config.numerics == "eager" or image.dim() != 4 or packed:
        return [claim]

    def brought(order: tuple[int, ...]) -> Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]]:
        def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
            bias = () if 2 in operands else (2,)
            return [
                lowering.in_order(a, order) if k in operands and a is not None else a
                for k, a in enumerate(dense(*bias)(lowering, n, args))
            ]

        return prepare

    lies = {order_in_memory(node.args[k]) for k in operands} - {None}
    others = {name: order for name, order in LAYOUTS.items() if lies != {order}}
    return [
        claim,
        *(
            dataclasses.replace(claim, name=f"{claim.name}, {name}", prepare=brought(order))
            for name, order in others.items()
        ),
    ]


def convolution(node: fx.Node, config: Config) -> list[Claim]:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return []

    def emit(w: Any, c: Call) -> None:
        call = the_conv_call(c.node, c.args)
        head = [w.tensor(call.x), w.tensor(call.weight), w.optional(call.bias)]
        w.call(c, SHIM + "convolution", [*head, *_how(w, call)])

    claim = Claim("convolution: oneDNN", emit, strides=_conv_strides, prepare=_prepare_conv)
    return _in_both_layouts(claim, node, config, (0, 1))


def _how(w: Any, call: ConvCall) -> list[str]:
    """The arguments from the strides to the groups, as ATen's own functions take them."""
    sizes = lists(w, call.stride, call.padding, call.dilation)
    return [*sizes, str(int(call.transposed)), *lists(w, call.output_padding), w.text(call.groups)]


def conv(node: fx.Node, config: Config) -> list[Claim]:
    act = the_conv_call(node).act

    def emit(w: Any, c: Call) -> None:
        rectified.emit(w, c, act, lambda inside: _pointwise(w, c, inside))

    def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        wanted = list(dense(2)(lowering, n, args))
        for k in (0, 3):
            if wanted[k] is not None:
                wanted[k] = in_layout(lowering, n, args, k)
        if wanted[3] is not None and LAYOUT_KEY in n.meta:
            wanted[3] = lowering.in_order(args[3], n.meta[LAYOUT_KEY])
        return wanted

    claim = Claim("conv: oneDNN", emit, strides=_conv_strides, prepare=prepare, over=OTHER)
    found = _in_both_layouts(claim, node, config, (0, 1, 3))
    if PACKED in node.args[1].meta:  # type: ignore[union-attr]
        return found
    if (depth := depthwise.depthwise_of(node)) is not None:
        return _with_depthwise(depthwise.forward(), found, node, config) if depth.slides else found
    return _with_winograd(winograd.forward(), found, node, config)


def _pointwise(w: Any, c: Call, act: str) -> None:
    """oneDNN's call with an activation inside, and a sum before that where there is something to add."""
    call = the_conv_call(c.node, c.args)
    packed = call.weight.buffer.kind == "packed"
    handle = f"(Handle){w.packed(call.weight)}[0]" if packed else w.tensor(call.weight)
    head = [w.tensor(call.x)]
    sizes = [*lists(w, call.padding, call.stride, call.dilation), w.text(call.groups)]
    if call.other is None:
        args = [*head, handle, w.optional(call.bias), *sizes, *activation(w, act)]
        w.call(c, SHIM + "mkldnn__convolution_pointwise", args)
        return
    w.lines.append("double alpha = 1.0;")
    name, *rest = activation(w, act)
    inside = "nullptr"
    if act != "none":
        inside = w.fresh("act")
        w.lines.append(f"const char* {inside} = {name};")
        inside = f"&{inside}"
    added = w.tensor(call.other)
    tail = [handle, w.optional(call.bias), *sizes, '"add"', "&alpha", inside, *rest]
    if w.is_over(c):
        w.call_over(c, SHIM + "mkldnn__convolution_pointwise_binary_", [added, *head, *tail])
    else:
        w.call(c, SHIM + "mkldnn__convolution_pointwise_binary", [*head, added, *tail])


def _with_own(own: Claim, ahead: bool, library: list[Claim], node: fx.Node, config: Config) -> list[Claim]:
    """The claims that can serve a node, the likely fastest first. ahead: whether a template of ours is, of
    images that are channels-last."""
    if config.numerics == "eager":
        return library
    return [own, *library] if ahead and order_in_memory(node.args[0]) == CHANNELS_LAST else [*library, own]


def _with_winograd(own: Claim, library: list[Claim], node: fx.Node, config: Config) -> list[Claim]:
    if winograd.window_of(node) is None:
        return library
    return _with_own(own, winograd.is_ahead(node), library, node, config)


def _with_depthwise(own: Claim, library: list[Claim], node: fx.Node, config: Config) -> list[Claim]:
    return _with_own(own, depthwise.is_ahead(node), library, node, config)


VECTOR = 16
"""Elements of 32 bits in the widest vector of any processor."""


def overruns(node: fx.Node) -> bool:
    """Whether oneDNN may write past the end of its memory for the weight's gradient: that of a strided 1x1
    window over a channels-last image of fewer channels than a vector has (uxlfoundation/oneDNN#6035; seen
    with 2 to 7 channels and AVX2)."""
    call = the_conv_call(node)
    x, weight = call.x.meta["val"], call.weight.meta["val"]
    few = not isinstance(x.shape[1], int) or x.shape[1] < VECTOR
    pointwise = x.dim() == 4 and tuple(weight.shape[2:]) == (1, 1) and not any(call.padding)
    strided = any(n != 1 for n in call.stride)
    plain = call.groups == 1 and not call.transposed
    return bool(few and pointwise and strided and call.mask[1] and plain)


def _met(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """What the weight's gradient of a strided 1x1 window is computed from, without the stride: of the image
    the positions that the window meets."""
    grad, x, weight, bias, stride, *rest = args
    steps = (1, 1, stride[0], stride[-1])
    shape = (*x.shape[:2], *grad.shape[2:])
    met = Value(shape, x.dtype, lambda idx: x(tuple(i * n for i, n in zip(idx, steps))))
    return _prepare_conv(lowering, node, (grad, met, weight, bias, [1, 1], *rest))


def splits_gradients(node: fx.Node) -> bool:
    """Whether the gradients of a convolution are better calls of their own."""
    if overruns(node):
        return True
    if order_in_memory(node.args[0]) != CHANNELS_LAST:
        return False
    return winograd.is_ahead(node) or depthwise.is_ahead(node)


def _lies_half_channels_last(node: fx.Node) -> bool:
    """Whether of the image and the result's gradient one is channels-last and there are positions enough to
    bring the other there. ATen goes by the image and the weight, and oneDNN's row-major gradients of a window
    over few channels are slow: of 16 images of 3x224x224, a window of 7x7 by steps of 2, 68 ms, and 20 with
    the image copied channels-last first (2 Intel cores)."""
    grad, x = (order_in_memory(n) for n in node.args[:2])
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    positions = math.prod(size_hint(n) for n in (shape[0], *shape[2:]))
    return (grad == CHANNELS_LAST) != (x == CHANNELS_LAST) and positions >= FEW_POSITIONS


def convolution_backward(node: fx.Node, config: Config) -> list[Claim]:
    if dtype_of(node.args[0]) not in (*FLOATS, torch.float64):
        return []

    def emit(w: Any, c: Call) -> None:
        call = the_conv_call(c.node, c.args)
        handles = [w.tensor(call.grad), w.tensor(call.x), w.tensor(call.weight)]
        if call.bias_sizes is None:
            bias = ["nullptr", "0"]
        else:
            name, n = w.ints(call.bias_sizes)
            w.lines.append(f"const int64_t* bias_sizes = {name};")
            bias = ["&bias_sizes", str(n)]
        w.lines.append(f"const int32_t mask[] = {{{', '.join(str(int(m)) for m in call.mask)}}};")
        w.call(c, SHIM + "convolution_backward", [*handles, *bias, *_how(w, call), "mask", "3"])

    claim = Claim("convolution_backward: oneDNN", emit, strides=_conv_strides, prepare=_prepare_conv)
    asked = list(the_conv_call(node).mask)
    if overruns(node):
        return [dataclasses.replace(claim, prepare=dense(0, 1, 2) if asked[0] else _met)]
    found = _in_both_layouts(claim, node, config, (0, 1, 2))
    if _lies_half_channels_last(node):
        found.sort(key=lambda c: c.name != f"{claim.name}, channels-last")
    if asked.count(True) == 1 and not asked[2] and depthwise.depthwise_of(node) is not None:
        own = depthwise.input_gradient() if asked[0] else depthwise.window_gradient()
        return _with_depthwise(own, found, node, config)
    if asked == [True, False, False]:
        return _with_winograd(winograd.input_gradient(), found, node, config)
    if asked == [False, True, False]:
        return _with_winograd(winograd.weight_gradient(), found, node, config)
    return found
