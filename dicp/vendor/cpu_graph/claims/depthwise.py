"""Depthwise convolutions and their gradients (include/dicp_depthwise.h, dicp_depthwise_grad.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.ops.conv_call import conv_call, pair, the_conv_call
from dicp.runtime.cpu import cpu_flags
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import (
    ACTIVATIONS,
    FLOATS,
    LIMITS,
    LOW,
    SPACE,
    activation_of,
    aten,
    onednn_has,
    space,
)
from dicp.vendor.cpu_graph.claims.images import pitch, prepare, strides, threads
from dicp.vendor.cpu_graph.expression import STORAGE

SPARED_BYTES = 1.0
"""Bytes, as the layout pass counts them, that a multiplication spares where oneDNN is far from any limit in
every layout."""
SPARED_BYTES_FORWARD = 0.25
"""The same of a convolution without a stride, for which oneDNN takes up to twice as long."""

MOST_TAPS, TAP_BYTES, TOGETHER = 7, 28 << 10, 32
"""The header's constants: columns of a window that a function is made for, and those that its workspace
depends on."""

_PARAMETERS = (
    "const {T}* x, const {T}* w, const {T}* bias, const float* wide, const {T}* other, {T}* y, "
    f"const int64_t* sizes, float low, float high, {SPACE}"
)
_UNIT = """\
#include "dicp_depthwise.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  const Workspace own{{space, bytes, threads}};
  return depthwise<{act}, {window}>(x, w, {{bias, wide, other, {{low, high}}}}, y, sizes, own);
}}
"""

_GRADIENT_PARAMETERS = {
    "input": f"const {{T}}* grad, const {{T}}* w, {{T}}* x, const int64_t* sizes, {SPACE}",
    "window": f"const {{T}}* x, const {{T}}* grad, {{T}}* w, const int64_t* sizes, {SPACE}",
}
_GIVEN = {"input": "grad, w, x", "window": "x, grad, w"}
_GRADIENT_UNIT = """\
#include "dicp_depthwise_grad.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return depthwise_{part}({given}, sizes, {{space, bytes, threads}});
}}
"""
_GROUP = 64
"""DEPTHWISE_CHANNELS of the header."""


@dataclass(frozen=True)
class Depthwise:
    """A dicp::conv or a convolution_backward of images [batch, channels, height, width] in which every
    channel is a group of its own."""

    channels: int
    window: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    dtype: torch.dtype

    @property
    def slides(self) -> bool:
        return _slides(self.channels, (*self.strides, *self.dilation))


def _slides(channels: int, steps: Sequence[int]) -> bool:
    """Whether dicp_depthwise.h serves a convolution: neighbours share pixels, channels fill a vector."""
    return channels >= 16 and set(steps) == {1}


def slides_faster(dtype: torch.dtype, channels: int, steps: Sequence[int]) -> bool:
    """Whether that is faster than oneDNN: where vectors are of 512 bits. steps: strides and dilations."""
    return _slides(channels, steps) and onednn_has(dtype) and "avx512f" in cpu_flags()


def depthwise_of(node: fx.Node) -> Depthwise | None:
    """What the templates compute of this node."""
    call = conv_call(node) if node.target is not aten.convolution.default else None
    if call is None or call.act not in (LIMITS if call.other is not None else (*ACTIVATIONS, *LIMITS)):
        return None
    image, weight, result = (x.meta["val"] for x in (call.x, call.weight, call.result))
    groups = call.groups
    fits = (
        not call.transposed
        and weight.dim() == 4
        and result.dtype == image.dtype == weight.dtype
        and weight.dtype in FLOATS
        and all(isinstance(n, int) for n in (*weight.shape, groups))
        and groups == weight.shape[0] == result.shape[1] == image.shape[1] > 1
    )
    if not fits:
        return None
    channels, _, rows, columns = (int(n) for n in weight.shape)
    return Depthwise(channels, (rows, columns), pair(call.stride), pair(call.dilation), weight.dtype)


def is_ahead(node: fx.Node) -> bool:
    """Whether the convolution, or one of the gradients that are asked for, is better than oneDNN's
    (scripts/depthwise.py): the window's, up to 80 times as fast, and for 3x3 windows level; the others where
    vectors are of 512 bits and there is no stride; the input's where there is one: of a low precision oneDNN
    makes it element by element, in float32 it is now faster and now four times as slow."""
    conv = depthwise_of(node)
    if conv is None:
        return False
    slides = slides_faster(conv.dtype, conv.channels, (*conv.strides, *conv.dilation))
    call = the_conv_call(node)
    if not call.is_backward:
        return slides
    wants_input, wants_window, _ = call.mask
    return wants_window or wants_input and (slides or max(conv.strides) > 1)


def gain(node: fx.Node) -> float:
    """What channels-last spares by way of these, in the layout pass's bytes."""
    conv = depthwise_of(node)
    if conv is None or not is_ahead(node):
        return 0.0
    call = the_conv_call(node)
    if call.is_backward and conv.window[1] <= 3 and not (conv.dtype in LOW and max(conv.strides) > 1):
        return 0.0
    result, bytes_each = call.result.meta["val"], SPARED_BYTES if call.is_backward else SPARED_BYTES_FORWARD
    return bytes_each * math.prod(conv.window) * math.prod(size_hint(n) for n in result.shape)


def forward() -> Claim:
    """y = act(conv(x, w) + bias + other) without a stride."""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        return _bytes_of_taps(args[1].shape, threads(lowering))

    return Claim(
        "conv: depthwise",
        _emit_forward,
        out=True,
        strides=strides,
        prepare=prepare(0, 3, bias=2),
        workspace=workspace,
    )


def _bytes_of_taps(shape: Sequence[int], threads: int) -> int:
    """Of a group of channels for each thread: ChannelGroups of the header."""
    channels, _, rows, columns = shape
    units = max(channels // TOGETHER, 1)
    groups = min(-(-4 * channels * rows * columns // TAP_BYTES), units)
    return 4 * threads * (rows * columns + 1) * (-(-units // groups) + 1) * TOGETHER + 64


def input_gradient() -> Claim:
    """The first result of convolution_backward, where only that is asked for."""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        channels, _, rows, columns = shape = args[2].shape
        own = 4 * rows * columns * (channels + 4 * threads(lowering)) + 64
        return max(own, _bytes_of_taps(shape, threads(lowering)))

    return Claim(
        "convolution_backward: depthwise",
        _emit_input,
        out=True,
        strides=strides,
        prepare=prepare(0),
        workspace=workspace,
    )


def window_gradient() -> Claim:
    """The second result of convolution_backward, where only that is asked for."""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        channels, _, rows, columns = args[2].shape
        return 4 * 2 * threads(lowering) * -(-channels // _GROUP) * _GROUP * rows * columns + 64

    return Claim(
        "convolution_backward: depthwise",
        _emit_window,
        out=True,
        strides=lambda lowering, node, args: [None, None, None],  # as traced
        prepare=prepare(0, 1),
        workspace=workspace,
    )


def _emit_forward(w: Any, c: Call) -> None:
    call = the_conv_call(c.node, c.args)
    given = (call.x, call.weight, call.bias, call.other)
    _emit_sliding(w, c, given, call.act, call.padding, [call.weight.strides[k] for k in (0, 2, 3)])


def _emit_input(w: Any, c: Call) -> None:
    call = the_conv_call(c.node, c.args)
    grad, weight = call.grad, call.weight
    out = c.outputs[0]
    assert out is not None
    conv = depthwise_of(c.node)
    assert conv is not None
    down, across = weight.strides[2:]
    if conv.slides:  # the window turned by 180 degrees over the result's gradient
        last = weight.offset + (conv.window[0] - 1) * down + (conv.window[1] - 1) * across
        turned = View(weight.buffer, weight.shape, weight.strides, last)
        pads = [n - 1 - p for n, p in zip(conv.window, pair(call.padding), strict=True)]
        _emit_sliding(w, c, (grad, turned, None, None), "none", pads, [weight.strides[0], -down, -across])
        return
    image = View(out, out.shape, out.strides)
    pointers = [w.pointer_to(grad), w.pointer_to(weight), w.pointer(out)]
    _emit_gradient(w, c, "input", pointers, image, grad, [weight.strides[0], down, across])


def _emit_window(w: Any, c: Call) -> None:
    call = the_conv_call(c.node, c.args)
    out = c.outputs[1]
    assert out is not None
    pointers = [w.pointer_to(call.x), w.pointer_to(call.grad), w.pointer(out)]
    _emit_gradient(w, c, "window", pointers, call.x, call.grad, [out.strides[k] for k in (0, 2, 3)])


def _emit_sliding(
    w: Any, c: Call, given: Any, act: str, padding: Sequence[int], window: Sequence[Any]
) -> None:
    """The call of dicp_depthwise.h. window: strides of the weight per channel, row and column."""
    x, weight, bias, other = given
    out = c.outputs[0]
    assert out is not None
    y = View(out, out.shape, out.strides)
    once = [1, 1]
    sizes, _ = w.ints(
        [*x.shape, *y.shape[2:], *weight.shape[2:], *once, padding[0], padding[-1], *once]
        + [*pitch(x), *pitch(y), *window, *pitch(other)]
    )
    word, limits = activation_of(act)
    name, parameters, text = unit(STORAGE[out.dtype], word, weight.shape[3])
    is_wide = bias is not None and bias.buffer.dtype != out.dtype
    biases = (None, bias) if is_wide else (bias, None)
    pointers = [*(w.pointer_to(v) for v in (x, weight, *biases, other)), w.pointer(out)]
    w.call(c, w.template(name, parameters, text), [*pointers, sizes, *limits, *space(w, c)])


def _emit_gradient(
    w: Any, c: Call, part: str, pointers: Sequence[str], image: View, grad: View, window: Sequence[Any]
) -> None:
    """The call of dicp_depthwise_grad.h. window: strides of the window per channel, row and column."""
    call = the_conv_call(c.node, c.args)
    how = [n for values in (call.stride, call.padding, call.dilation) for n in pair(values)]
    sizes, _ = w.ints(
        [*image.shape, *grad.shape[2:], *call.weight.shape[2:], *how]
        + [*pitch(image), *pitch(grad), *window, *pitch(None)]
    )
    name, parameters, text = gradient_unit(part, STORAGE[grad.buffer.dtype])
    w.call(c, w.template(name, parameters, text), [*pointers, sizes, *space(w, c)])


def unit(word: str, act: str, columns: int) -> tuple[str, str, str]:
    """The function for images of a storage type and windows with so many columns: name, parameters, source.
    act: a word of the header's Activation."""
    window = columns if columns <= MOST_TAPS else 0
    name, parameters = f"depthwise_{window or 'wide'}_{word}_{act}", _PARAMETERS.format(T=word)
    return name, parameters, _UNIT.format(name=name, parameters=parameters, act=act.upper(), window=window)


def gradient_unit(part: str, word: str) -> tuple[str, str, str]:
    """The same of a gradient. part: "input" or "window"."""
    name, parameters = f"depthwise_{part}_gradient_{word}", _GRADIENT_PARAMETERS[part].format(T=word)
    given = _GIVEN[part]
    return name, parameters, _GRADIENT_UNIT.format(name=name, parameters=parameters, part=part, given=given)


__all__ = [
    "Depthwise",
    "depthwise_of",
    "forward",
    "gain",
    "gradient_unit",
    "input_gradient",
    "is_ahead",
    "slides_faster",
    "unit",
    "window_gradient",
]
