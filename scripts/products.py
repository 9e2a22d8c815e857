"""What docs/tuning.md says of products: GF/s of ATen's low precision beside float32's with the conversions,
and of float32 by MKL and by oneDNN, with how far each errs.

    python scripts/products.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.bench.measure import alternating

LOW = (torch.bfloat16, torch.float16)


def low_precision(label: str, flops: float, fn: Callable[..., Tensor], *operands: Tensor) -> None:
    """GF/s of fn in each low precision, and by way of float32."""
    figures = []
    for dtype in LOW:
        given = [t.to(dtype) for t in operands]
        plain = functools.partial(fn, *given)
        ms = alternating([plain, functools.partial(through_float32, fn, given)])
        figures += [f"{dtype} {flops / ms[0] / 1e6:.0f}", f"through float32 {flops / ms[1] / 1e6:.0f}"]
    print(f"{label}: {', '.join(figures)}", flush=True)


def through_float32(fn: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
    return fn(*(t.float() for t in given)).to(given[0].dtype)


def libraries(rows: int, depth: int, columns: int) -> None:
    """GF/s of a float32 product by MKL and by oneDNN, and oneDNN's error over MKL's, root mean square."""
    x, w = torch.randn(rows, depth), torch.randn(columns, depth)
    calls = [lambda: x @ w.t(), lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")]
    exact, flops = x.double() @ w.double().t(), 2.0 * rows * depth * columns
    mkl, onednn = (flops / ms / 1e6 for ms in alternating(calls))
    errors = [(call().double() - exact).norm().item() for call in calls]
    print(f"{rows:6} {depth:6} {columns:8} {mkl:6.0f} {onednn:8.0f} {errors[1] / errors[0]:8.2f}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; GF/s")
    r = torch.randn
    low_precision("linear 512x1024x1024", 2.0 * 512 * 1024**2, F.linear, r(512, 1024), r(1024, 1024))
    image, window = r(2, 256, 14, 14), r(256, 256, 3, 3)
    flops = 2.0 * 2 * 14 * 14 * 256**2 * 9
    low_precision("convolution", flops, lambda x, w: F.conv2d(x, w, padding=1), image, window)
    low_precision("24 products", 2.0 * 24 * 197**2 * 64, torch.bmm, r(24, 197, 64), r(24, 64, 197))
    print("\n  rows  depth  columns    MKL   oneDNN  errors")
    for depth in (256, 512, 1024, 2816):
        for rows in (16, 64, 256, 1024):
            libraries(rows, depth, 1024)


if __name__ == "__main__":
    main()
