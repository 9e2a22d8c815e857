"""Gradients of depthwise convolutions by oneDNN and by the template (dicp_depthwise.h), channels-last:
milliseconds of a call, medians, in turns. claims/depthwise.py decides by this table.

    python scripts/depthwise.py
"""

from __future__ import annotations

import ctypes
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
    pointer, space = ctypes.c_void_p, torch.empty(64 << 20, dtype=torch.uint8)
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 4, pointer, ctypes.c_int64, ctypes.c_int64)
    found: dict[str, Callable[..., object]] = {}
    for part in ("input", "window"):
        name, _, text = depthwise.unit(part, STORAGE[dtype])
        call = kind(build([Unit(name, text)], Config.make()).address(name))

        def run(given: list[Tensor], sizes: list[int], call: Callable[..., int] = call) -> None:
            numbers = (ctypes.c_int64 * len(sizes))(*sizes)
            where = [v.data_ptr() for v in given]
            room = (space.data_ptr(), space.numel(), torch.get_num_threads())
            assert call(*where, ctypes.addressof(numbers), *room) == 0

        found[part] = run
    return found


Calls = dict[str, Callable[[], object]]


def calls_of(shape: tuple[int, ...], dtype: torch.dtype, own: dict[str, Callable[..., object]]) -> Calls:
    batch, channels, size, window, stride = shape
    x = torch.randn(batch, channels, size, size).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, 1, window, window).to(dtype)
    y = torch.nn.functional.conv2d(x, weight, stride=stride, padding=window // 2, groups=channels)
    grad, dx, dw = torch.randn_like(y), torch.empty_like(x), torch.empty_like(weight)
    how = [window, window, stride, stride, window // 2, window // 2, 1, 1]
    pitches = [v.stride(d) for v in (x, y) for d in (0, 2, 3)]
    sizes = [*x.shape, *y.shape[2:], *how, *pitches, *(weight.stride(d) for d in (0, 2, 3))]

    def library(*mask: bool) -> object:
        how = ([stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], channels, mask)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *how)

    return {
        "input": lambda: library(True, False, False),
        "input, own": lambda: own["input"]([grad, weight, dx], sizes),
        "window": lambda: library(False, True, False),
        "window, own": lambda: own["window"]([x, grad, dw], sizes),
    }


def main() -> None:
    print(f"{'':54} {'of the input':>19} {'of the window':>19}")
    print(f"{'batch, channels, size, window, stride':54}" + f" {'oneDNN':>9} {'own':>9}" * 2)
    for dtype in (torch.float32, torch.bfloat16):
        own = templates(dtype)
        for name, shapes in SHAPES.items():
            for shape in shapes:
                found = alternating(list(calls_of(shape, dtype, own).values()))
                times = "".join(f" {ms:9.2f}" for ms in found)
                sizes = "".join(f"{n:6}" for n in shape)
                print(f"{str(dtype)[6:]:9} {name:14}{sizes} {times}", flush=True)


if __name__ == "__main__":
    main()
