"""3x3 convolutions by oneDNN and by Winograd's algorithm (dicp_winograd.h), channels-last: GF/s of the sum
as written, so that fewer multiplications show as more than the processor has. claims/winograd.py decides by
this table.

    python scripts/winograd.py [--only resnet50,unet] [--dtype bf16] [--seconds 0.5]

Weights are reordered or transformed at each call; constant: by oneDNN, once, before. With --gradients those
of the input and, in float32, of the weight.
"""

from __future__ import annotations

import argparse
import ctypes
import math
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
    "few": [(1, 64, 64, 4), (1, 256, 256, 4), (1, 32, 32, 8), (1, 128, 128, 8), (1, 16, 16, 8),
            (1, 512, 512, 4)],
    "small": [(1, 16, 16, 56), (1, 16, 64, 56), (1, 64, 16, 56), (1, 32, 32, 28), (1, 32, 32, 112),
              (1, 64, 64, 8), (1, 64, 64, 14), (1, 128, 128, 7), (1, 128, 128, 14), (1, 256, 256, 7),
              (4, 256, 256, 7), (8, 512, 512, 7)],
}  # fmt: skip
PAD = ([1, 1], [1, 1], [1, 1])


Call = Callable[..., None]


def templates(dtype: torch.dtype) -> tuple[Call, Call]:
    """convolve(x, weight, y, flipped), gradient(x, grad, dw)"""
    name, _, source = winograd.unit(dtype)
    sources = {"winograd": source, "gradient": winograd.WINDOW_UNIT}
    library = build([Unit(k, text, effort="light") for k, text in sources.items()], Config.make())
    pointer = ctypes.c_void_p
    place = (pointer, ctypes.c_int64, ctypes.c_int64)
    limits = (ctypes.c_float, ctypes.c_float)
    of = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 7, ctypes.c_bool, *limits, *place, pointer)
    by = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 4, *place, pointer)
    threads = torch.get_num_threads()
    space = torch.empty(32 << 20, dtype=torch.uint8)

    def room() -> tuple[int, int, int]:
        return space.data_ptr(), space.numel(), threads

    forward, backward = of(library.address(name)), by(library.address("winograd_gradient"))
    finite = ctypes.c_bool(True)

    def numbers(x: Tensor, y: Tensor, strides: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
        pitches = [v.stride(d) for v in (x, y) for d in (0, 2, 3)]
        found = [*x.shape, *y.shape[1:], 1, 1, *pitches, 0, 0, 0, *strides]
        return (ctypes.c_int64 * len(found))(*found)

    def convolve(x: Tensor, weight: Tensor, y: Tensor, flipped: bool = False) -> None:
        sizes = numbers(x, y, (weight.transpose(0, 1) if flipped else weight).stride())
        given = (x.data_ptr(), weight.data_ptr(), None, None, None, y.data_ptr(), ctypes.addressof(sizes))
        code = forward(*given, flipped, -math.inf, math.inf, *room(), ctypes.addressof(finite))
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


def of_results(
    shape: tuple[int, int, int, int], convolve: Call, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    batch, channels, results, size = shape
    x, y = image(batch, channels, size, dtype), image(batch, results, size, dtype)
    weight = torch.randn(results, channels, 3, 3, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *PAD, 1, list(x.shape))

    def library(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._convolution_pointwise(x, weight, None, *PAD, 1, "none", [], None)

    return {
        "oneDNN": lambda: library(weight),
        "oneDNN, constant": lambda: library(packed),
        "Winograd": lambda: convolve(x, weight, y),
    }


def of_gradients(
    shape: tuple[int, int, int, int], convolve: Call, gradient: Call, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    batch, channels, results, size = shape
    x, grad = image(batch, channels, size, dtype), image(batch, results, size, dtype)
    dx, weight = image(batch, channels, size, dtype), torch.randn(results, channels, 3, 3, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)  # which the library would do, more slowly

    def library(*mask: bool) -> object:
        how = (None, *PAD, False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(grad, x, last, *how)

    found: dict[str, Callable[[], object]] = {
        "input: oneDNN": lambda: library(True, False, False),
        "input: Winograd": lambda: convolve(grad, weight, dx, True),
    }
    if dtype == torch.float32:
        found["weight: oneDNN"] = lambda: library(False, True, False)
        found["weight: Winograd"] = lambda: gradient(x, grad, weight)
    return found


def image(batch: int, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, channels, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    convolve, gradient = templates(dtype)
    headed = False
    for name in args.only.split(","):
        for shape in SHAPES[name]:
            batch, channels, results, size = shape
            if args.gradients:
                calls = of_gradients(shape, convolve, gradient, dtype)
            else:
                calls = of_results(shape, convolve, dtype)
            if not headed:
                print(f"{'':10} batch, channels, results, size" + "".join(f" {call:>16}" for call in calls))
                headed = True
            found = best(calls, args.seconds)
            operations = 18e-9 * batch * channels * results * size * size
            line = f"{name:10} {batch:5} {channels:9} {results:8} {size:5} "
            print(line + "".join(f" {operations / found[call]:16.0f}" for call in calls), flush=True)


if __name__ == "__main__":
    main()
