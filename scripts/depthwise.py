"""Depthwise convolutions and their gradients by oneDNN and by the templates (dicp_depthwise.h,
dicp_depthwise_grad.h), channels-last: milliseconds of a call, medians, in turns. claims/depthwise.py decides
by this table.

    python scripts/depthwise.py
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dicp.bench.measure import alternating
from dicp.config import Config
from dicp.vendor.cpu_graph.build import Unit, build
from dicp.vendor.cpu_graph.claims import depthwise
from dicp.vendor.cpu_graph.expression import STORAGE

SHAPES = {  # batch, channels, height and width, window, stride
    "convnext": [(2, 96, 56, 7, 1), (2, 192, 28, 7, 1), (2, 384, 14, 7, 1), (2, 768, 7, 7, 1)],
    "mobilenet_v2": [(4, 32, 112, 3, 1), (4, 96, 112, 3, 2), (4, 144, 56, 3, 2), (4, 192, 28, 3, 1),
                     (4, 384, 14, 3, 1), (4, 576, 14, 3, 2), (4, 960, 7, 3, 1)],
    "efficientnet": [(4, 144, 56, 5, 2), (4, 240, 28, 5, 1), (4, 672, 14, 5, 2), (4, 1152, 7, 5, 1)],
    "large windows": [(2, 128, 56, 31, 1), (2, 256, 28, 13, 1), (2, 64, 28, 9, 2)],
}  # fmt: skip


def templates(dtype: torch.dtype) -> dict[str, Callable[..., object]]:
    """input(grad, weight, dx, image's sizes, ..) and window(x, grad, dw, ..)"""
    found: dict[str, Callable[..., object]] = {}
    for part in ("input", "window"):
        name, _, text = depthwise.gradient_unit(part, STORAGE[dtype])
        found[part] = native(name, text, 3)
    return found


@functools.cache
def convolution(dtype: torch.dtype, columns: int) -> Callable[..., object]:
    """(x, weight, bias, None, None, y, sizes), for windows with so many columns, without a stride"""
    name, _, text = depthwise.unit(STORAGE[dtype], "limited", columns)
    return native(name, text, 6, -math.inf, math.inf)


def native(name: str, text: str, pointers: int, *limits: float) -> Callable[..., object]:
    pointer, space = ctypes.c_void_p, torch.empty(64 << 20, dtype=torch.uint8)
    kinds = [*[pointer] * pointers, pointer, *[ctypes.c_float] * len(limits)]
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds, pointer, ctypes.c_int64, ctypes.c_int64)
    call = kind(build([Unit(name, text)], Config.make()).address(name))

    def run(given: list[Tensor | None], sizes: list[int]) -> None:
        numbers = (ctypes.c_int64 * len(sizes))(*sizes)
        where = [None if v is None else v.data_ptr() for v in given]
        room = (space.data_ptr(), space.numel(), torch.get_num_threads())
        assert call(*where, ctypes.addressof(numbers), *limits, *room) == 0

    return run


Calls = dict[str, Callable[[], object]]


def nothing() -> None:
    """Where there is no template."""


def calls_of(shape: tuple[int, ...], dtype: torch.dtype, own: dict[str, Callable[..., object]]) -> Calls:
    batch, channels, size, window, stride = shape
    pad = window // 2
    x = torch.randn(batch, channels, size, size).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(channels, 1, window, window).to(dtype), torch.randn(channels).to(dtype)
    y = torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad, groups=channels)
    grad, dx, dw = torch.randn_like(y), torch.empty_like(x), torch.empty_like(weight)
    how = [window, window, stride, stride, pad, pad, 1, 1]
    pitches = [[v.stride(d) for d in (0, 2, 3)] for v in (x, y, weight)]
    sizes = [*x.shape, *y.shape[2:], *how, *pitches[0], *pitches[1], *pitches[2], 0, 0, 0]
    turned = [-n if k else n for k, n in enumerate(pitches[2])]
    back = [*y.shape, *x.shape[2:], *how, *pitches[1], *pitches[0], *turned, 0, 0, 0]
    same = [[pad] * 2, [stride] * 2, [1, 1], channels]
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *same, list(x.shape))

    def library(*mask: bool) -> object:
        how = ([stride] * 2, [pad] * 2, [1, 1], False, [0, 0], channels, mask)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *how)

    def pointwise(w: Tensor) -> object:
        return torch.ops.mkldnn._convolution_pointwise(x, w, bias, *same, "none", [], None)

    slide, corner = convolution(dtype, window), weight.flatten()[window * window - 1 :]
    return {
        "forward": lambda: pointwise(weight),
        "forward, constant": lambda: pointwise(packed),
        "forward, own": nothing if stride > 1 else lambda: slide([x, weight, bias, None, None, y], sizes),
        "input": lambda: library(True, False, False),
        "input, own": (lambda: own["input"]([grad, weight, dx], sizes))
        if stride > 1
        else lambda: slide([grad, corner, None, None, None, dx], back),
        "window": lambda: library(False, True, False),
        "window, own": lambda: own["window"]([x, grad, dw], sizes),
    }


def main() -> None:
    print(f"{'':54} {'forward':>29} {'of the input':>19} {'of the window':>19}")
    print(
        f"{'batch, channels, size, window, stride':54} {'oneDNN':>9} {'constant':>9} {'own':>9}"
        + f" {'oneDNN':>9} {'own':>9}" * 2
    )
    for dtype in (torch.float32, torch.bfloat16):
        own = templates(dtype)
        for name, shapes in SHAPES.items():
            for shape in shapes:
                calls = list(calls_of(shape, dtype, own).values())
                found = iter(alternating([c for c in calls if c is not nothing]))
                times = "".join(f" {'-':>9}" if c is nothing else f" {next(found):9.3f}" for c in calls)
                sizes = "".join(f"{n:6}" for n in shape)
                print(f"{str(dtype)[6:]:9} {name:14}{sizes} {times}", flush=True)


if __name__ == "__main__":
    main()
