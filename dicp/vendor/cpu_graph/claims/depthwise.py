"""Gradients of depthwise convolutions that oneDNN computes badly (include/dicp_depthwise.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import FLOATS, LOW, SPACE, aten, space
from dicp.vendor.cpu_graph.claims.images import pitch, prepare, strides, threads
from dicp.vendor.cpu_graph.expression import STORAGE

SPARED_BYTES = 1.0
"""Bytes, as the layout pass counts them, that a multiplication spares where oneDNN is far from any limit in
every layout."""

_PARAMETERS = {
    "input": f"const {{T}}* grad, const {{T}}* w, {{T}}* x, const int64_t* sizes, {SPACE}",
    "window": f"const {{T}}* x, const {{T}}* grad, {{T}}* w, const int64_t* sizes, {SPACE}",
}
_GIVEN = {"input": "grad, w, x", "window": "x, grad, w"}
_UNIT = """\
#include "dicp_depthwise.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  return depthwise_{part}({given}, sizes, {{space, bytes, threads}});
}}
"""
_GROUP = 64
"""DEPTHWISE_CHANNELS of the header."""


@dataclass(frozen=True)
class Depthwise:
    """A convolution_backward of images [batch, channels, height, width] in which every channel is a group of
    its own."""

    window: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype


def depthwise_of(node: fx.Node) -> Depthwise | None:
    """What the templates compute of this node."""
    if node.target is not aten.convolution_backward.default:
        return None
    a: Any = node.args
    grad, image, weight = (x.meta["val"] for x in a[:3])
    transposed, groups = a[7], a[9]
    window = tuple(weight.shape[2:])
    fits = (
        not transposed
        and weight.dim() == 4
        and grad.dtype == image.dtype == weight.dtype
        and weight.dtype in FLOATS
        and all(isinstance(n, int) for n in (*weight.shape, groups))
        and groups == weight.shape[0] == grad.shape[1] == image.shape[1] > 1
    )
    if not fits:
        return None
    stride = (a[4][0], a[4][-1])
    return Depthwise((int(window[0]), int(window[1])), stride, weight.dtype)


def is_ahead(node: fx.Node) -> bool:
    """Whether one of the gradients that are asked for is faster than oneDNN's (scripts/depthwise.py): the
    window's always, up to 80 times; the input's where there is a stride, of a low precision by 20 and more,
    which oneDNN makes element by element."""
    conv = depthwise_of(node)
    wants_input, wants_window, _ = node.args[10]  # type: ignore[union-attr, misc]
    return conv is not None and bool(wants_window or wants_input and max(conv.strides) > 1)


def gain(node: fx.Node) -> float:
    """What channels-last spares by way of these, in the layout pass's bytes."""
    conv = depthwise_of(node)
    if conv is None or not (conv.window[1] > 3 or conv.dtype in LOW and max(conv.strides) > 1):
        return 0.0
    result = node.args[0].meta["val"]  # type: ignore[union-attr]
    return SPARED_BYTES * math.prod(conv.window) * math.prod(size_hint(n) for n in result.shape)


def input_gradient() -> Claim:
    """The first result of convolution_backward, where only that is asked for."""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        channels, _, rows, columns = args[2].shape
        return 4 * rows * columns * (channels + 4 * threads(lowering)) + 64

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


def _emit_input(w: Any, c: Call) -> None:
    grad, _, weight = c.args[:3]
    out = c.outputs[0]
    assert out is not None
    image = View(out, out.shape, out.strides)
    pointers = [w.pointer_to(grad), w.pointer_to(weight), w.pointer(out)]
    _emit(w, c, "input", pointers, image, grad, [weight.strides[k] for k in (0, 2, 3)])


def _emit_window(w: Any, c: Call) -> None:
    grad, image, _ = c.args[:3]
    out = c.outputs[1]
    assert out is not None
    pointers = [w.pointer_to(image), w.pointer_to(grad), w.pointer(out)]
    _emit(w, c, "window", pointers, image, grad, [out.strides[k] for k in (0, 2, 3)])


def _emit(w: Any, c: Call, part: str, pointers: Sequence[str], image: View, grad: View, window: Any) -> None:
    """The template's call. window: strides of the window per channel, row and column."""
    stride, pad, dilation = ((a[0], a[-1]) for a in c.args[4:7])
    shape = c.args[2].shape[2:]
    sizes, _ = w.ints(
        [*image.shape, *grad.shape[2:], *shape, *stride, *pad, *dilation]
        + [*pitch(image), *pitch(grad), *window]
    )
    name, parameters, text = unit(part, STORAGE[grad.buffer.dtype])
    w.call(c, w.template(name, parameters, text), [*pointers, sizes, *space(w, c)])


def unit(part: str, word: str) -> tuple[str, str, str]:
    """The function's name, its parameters and the source around it. part: "input" or "window"."""
    name, parameters = f"depthwise_{part}_gradient_{word}", _PARAMETERS[part].format(T=word)
    return name, parameters, _UNIT.format(name=name, parameters=parameters, part=part, given=_GIVEN[part])


__all__ = ["Depthwise", "depthwise_of", "gain", "input_gradient", "is_ahead", "unit", "window_gradient"]
