"""Images that windows are added up to: the gradient of a convolution's input, and a transposed convolution,
which is the same map.

    x[b,c, y*stride + i - padding, ...] += sum_o g[b,o,y,...] w[o,c,i,...]

The product over o has a row for each position of g and a column for each element of a window. Folding it
adds up, for each element of the image, those of the windows that hold it: no more than ceil(window / stride)
of them do along each axis. Where they lie in the rows is known, so that a fold is a kernel that gathers, and
what follows is a part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dicp.passes.facts import aten, value_of
from dicp.passes.rules import Emitter
from dicp.vendor.base import Convolution


def lays_by_channel(weight: Any, conv: Convolution) -> bool:
    """Whether the channels of a product's rows had better lie side by side, as the image wants them: not
    where the weight is larger than what is made of it, and so is left as it lies. To be asked once: what a
    product reads may lie otherwise than the weight that the convolution has, which may be a copy of it."""
    value = value_of(weight)
    return value.is_contiguous(memory_format=torch.channels_last) or conv.positions >= value.shape[0]


def product(emit: Emitter, rows: Any, weight: Any, by_channel: bool) -> Node:
    """What each position adds to its window: [positions, window * C], or [positions, C * window] if not
    by_channel.  rows: [positions, O], weight: [O,C,KH,KW]."""
    if by_channel:
        weight = emit(aten.permute.default, weight, [0, 2, 3, 1])
    if not value_of(weight).is_contiguous():
        weight = emit(aten.clone.default, weight, memory_format=torch.contiguous_format)
    depth, *window = value_of(weight).shape
    return emit(aten.mm.default, rows, emit(aten.view.default, weight, [depth, torch.Size(window).numel()]))


def fold(emit: Emitter, rows: Node, by_channel: bool, conv: Convolution, sizes: Sequence[int]) -> Node:
    """A product's rows -> [B,C,H,W], channels-last, of these sizes (height, width)."""
    c, window = conv.channels[0], conv.window
    if by_channel:
        parts = emit(aten.view.default, rows, [-1, *conv.size, *window, c])
    else:
        parts = emit(aten.view.default, rows, [-1, *conv.size, c, *window])
        parts = emit(aten.permute.default, parts, [0, 1, 2, 4, 5, 3])
    axes = [_Axis(*axis) for axis in zip(conv.size, window, conv.stride, conv.padding, sizes, strict=True)]
    total = _added_up(emit, _by_steps(emit, parts, axes), axes)
    interleaved = emit(aten.permute.default, total, [0, 1, 3, 2, 4, 5])
    if not value_of(interleaved).is_contiguous():
        interleaved = emit(aten.clone.default, interleaved, memory_format=torch.contiguous_format)
    image = emit(aten.view.default, interleaved, [-1, *(axis.grid * axis.stride for axis in axes), c])
    for dim, axis in enumerate(axes, 1):
        if (axis.padding, axis.size) != (0, axis.grid * axis.stride):
            image = emit(aten.slice.Tensor, image, dim, axis.padding, axis.padding + axis.size)
    if not value_of(image).is_contiguous():
        image = emit(aten.clone.default, image, memory_format=torch.contiguous_format)
    return emit(aten.permute.default, image, [0, 3, 1, 2])


class _Axis:
    """Height or width. The image with its border is cut into steps of the stride, and so is each window, of
    which one step lies upon another of the image."""

    def __init__(self, positions: int, window: int, stride: int, padding: int, size: int) -> None:
        self.positions, self.padding, self.size = positions, padding, size
        self.stride = window if positions == 1 else stride  # one window is met by no other
        self.steps = -(-window // self.stride)
        """of a window"""
        self.more = self.steps * self.stride - window
        """what the last of them lacks"""
        self.grid = max(positions + self.steps - 1, -(-(size + padding) // self.stride))
        """steps of the image"""

    def pads(self, step: int) -> list[int]:
        """What lies before and behind the positions on the image's grid for that step of their windows."""
        return [step, self.grid - self.positions - step]


def _by_steps(emit: Emitter, parts: Node, axes: Sequence[_Axis]) -> Node:
    """[B,OH,OW,KH,KW,C] -> [B,OH,OW,steps,stride,steps,stride,C]"""
    *_, c = value_of(parts).shape
    if any(axis.more for axis in axes):
        parts = emit(aten.constant_pad_nd.default, parts, [0, 0, 0, axes[1].more, 0, axes[0].more], 0)
    cut = [n for axis in axes for n in (axis.steps, axis.stride)]
    return emit(aten.view.default, parts, [-1, *(axis.positions for axis in axes), *cut, c])


def _added_up(emit: Emitter, parts: Node, axes: Sequence[_Axis]) -> Node:
    """[B,OH,OW,steps,stride,steps,stride,C] -> [B,grid,grid,stride,stride,C]"""
    down, right = axes
    laid: list[Node] = []
    for i in range(down.steps):
        row = emit(aten.select.int, parts, 3, i)
        for j in range(right.steps):
            part = emit(aten.select.int, row, 4, j)
            pads = [0] * 6 + right.pads(j) + down.pads(i)
            laid.append(emit(aten.constant_pad_nd.default, part, pads, 0) if any(pads) else part)
    return functools.reduce(lambda total, part: emit(aten.add.Tensor, total, part), laid)


__all__ = ["fold", "lays_by_channel", "product"]
