"""3x3 convolutions by oneDNN and by Winograd's algorithm (dicp_winograd.h), channels-last, float32: GF/s of
the sum as written, so that fewer multiplications show as more than the processor has. claims/winograd.py
decides by this table.

    python scripts/winograd.py [--only resnet50,unet] [--seconds 0.5]

free: weights are reordered or transformed at each call; constant: once, before. With --gradients those of the
input and of the weight.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dicp.config import Config
from dicp.vendor.cpu_graph.build import Unit, build
from dicp.vendor.cpu_graph.claims import winograd

SHAPES: dict[str, list[tuple[int, int, int, int]]] = {  # batch, channels, results, height and width
    "resnet50": [(2, 64, 64, 56), (2, 128, 128, 28), (2, 256, 256, 14), (2, 512, 512, 7), (1, 512, 512, 7)],
    "unet": [(1, 128, 128, 64), (1, 384, 128, 64), (1, 256, 256, 32), (1, 768, 256, 32), (1, 512, 512, 16),
             (1, 1024, 512, 16)],
    "vgg": [(1, 64, 64, 224), (1, 64, 128, 112), (1, 256, 256, 56), (1, 512, 512, 28), (1, 512, 512, 14)],
    "small": [(1, 16, 16, 56), (1, 16, 64, 56), (1, 64, 16, 56), (1, 32, 32, 28), (1, 32, 32, 112),
              (1, 64, 64, 8), (1, 64, 64, 14), (1, 128, 128, 7), (1, 128, 128, 14), (1, 256, 256, 7),
              (4, 256, 256, 7), (8, 512, 512, 7)],
}  # fmt: skip
PAD = ([1, 1], [1, 1], [1, 1])


Call = Callable[..., None]


def templates() -> tuple[Call, Call]:
    """convolve(x, weight, transformed weight or None, y, flipped), gradient(x, grad, dw)"""
    library = build([Unit("winograd", winograd.UNIT), Unit("gradient", winograd.WINDOW_UNIT)], Config.make())
    pointer = ctypes.c_void_p
    place = (pointer, ctypes.c_int64, ctypes.c_int64)
    of = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 7, ctypes.c_bool, *place, pointer)
    by = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 4, *place, pointer)
    threads = torch.get_num_threads()
    space = torch.empty(32 << 20, dtype=torch.uint8)

    def room() -> tuple[int, int, int]:
        return space.data_ptr(), space.numel(), threads

    forward, backward = of(library.address("winograd_conv")), by(library.address("winograd_gradient"))
    finite = ctypes.c_bool(True)

    def numbers(x: Tensor, y: Tensor, strides: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
        pitches = [v.stride(d) for v in (x, y) for d in (0, 2, 3)]
        found = [*x.shape, *y.shape[1:], 1, 1, *pitches, 0, 0, 0, *strides]
        return (ctypes.c_int64 * len(found))(*found)

    def convolve(x: Tensor, weight: Tensor, made: Tensor | None, y: Tensor, flipped: bool = False) -> None:
        turned = weight.transpose(0, 1) if flipped else weight
        sizes, u = numbers(x, y, turned.stride()), None if made is None else made.data_ptr()
        given = (x.data_ptr(), weight.data_ptr(), u, None, None, y.data_ptr(), ctypes.addressof(sizes))
        code = forward(*given, flipped, *room(), ctypes.addressof(finite))
        assert code == 0 and finite.value

    def gradient(x: Tensor, grad: Tensor, dw: Tensor) -> None:
        sizes = numbers(x, grad, dw.stride())
        given = (x.data_ptr(), grad.data_ptr(), dw.data_ptr(), ctypes.addressof(sizes))
        assert backward(*given, *room(), ctypes.addressof(finite)) == 0 and finite.value

    return convolve, gradient


def best(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds a call: the least, in turns."""
    found = {name: float("inf") for name in calls}
    for call in calls.values():
        call()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def of_results(shape: tuple[int, int, int, int], convolve: Call) -> dict[str, Callable[[], object]]:
    batch, channels, results, size = shape
    x, y = image(batch, channels, size), image(batch, results, size)
    weight = torch.randn(results, channels, 3, 3)
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *PAD, 1, list(x.shape))
    made = winograd.transformed(weight)

    def library(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._convolution_pointwise(x, weight, None, *PAD, 1, "none", [], None)

    return {
        "free": lambda: library(weight),
        "free, Winograd": lambda: convolve(x, weight, None, y),
        "constant": lambda: library(packed),
        "constant, Winograd": lambda: convolve(x, weight, made, y),
    }


def of_gradients(
    shape: tuple[int, int, int, int], convolve: Call, gradient: Call
) -> dict[str, Callable[[], object]]:
    batch, channels, results, size = shape
    x, grad, dx = image(batch, channels, size), image(batch, results, size), image(batch, channels, size)
    weight = torch.randn(results, channels, 3, 3)
    last = weight.contiguous(memory_format=torch.channels_last)  # which the library would do, more slowly

    def library(*mask: bool) -> object:
        how = (None, *PAD, False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(grad, x, last, *how)

    return {
        "of input": lambda: library(True, False, False),
        "of input, Winograd": lambda: convolve(grad, weight, None, dx, True),
        "of weight": lambda: library(False, True, False),
        "of weight, Winograd": lambda: gradient(x, grad, weight),
    }


def image(batch: int, channels: int, size: int) -> Tensor:
    return torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--gradients", action="store_true")
    args = parser.parse_args()
    convolve, gradient = templates()
    kinds = ("of input", "of weight") if args.gradients else ("free", "constant")
    print(f"{'':37}" + "".join(f" {kind:>29}" for kind in kinds))
    print(f"{'batch, channels, results, size':37}" + f" {'oneDNN':>9} {'Winograd':>9} {'ratio':>9}" * 2)
    for name in args.only.split(","):
        for shape in SHAPES[name]:
            batch, channels, results, size = shape
            calls = of_gradients(shape, convolve, gradient) if args.gradients else of_results(shape, convolve)
            found = best(calls, args.seconds)
            operations = 18e-9 * batch * channels * results * size * size
            line = f"{name:10} {batch:3} {channels:6} {results:6} {size:6}   "
            for kind in kinds:
                theirs, ours = found[kind], found[f"{kind}, Winograd"]
                line += f" {operations / theirs:9.0f} {operations / ours:9.0f} {theirs / ours:9.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
