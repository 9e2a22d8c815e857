"""Milliseconds of single operators under eager PyTorch and dicp_cpu, forward and gradient, on one thread.

    python scripts/operators.py [REGEX]

The least of 20 calls each. Images are (4, 32, 56, 56); "cl" means channels-last.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import dicp  # noqa: F401  (registers the backend where the package is not installed)

Op = Callable[[torch.Tensor], torch.Tensor]

GRID = torch.rand(4, 56, 56, 2) * 2 - 1
ROWS = torch.randint(0, 512, (512,))
PLACES = torch.randint(0, 512, (512, 1024))
IMAGES: dict[str, Op] = {
    "bilinear x2": functools.partial(F.interpolate, scale_factor=2, mode="bilinear"),
    "bilinear x1.7": functools.partial(F.interpolate, scale_factor=1.7, mode="bilinear"),
    "nearest x2": functools.partial(F.interpolate, scale_factor=2, mode="nearest"),
    "grid_sample": lambda x: F.grid_sample(x, GRID, align_corners=False),
    "reflection padding": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
    "avg_pool 3x3 by 2": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool 5x5": lambda x: F.adaptive_avg_pool2d(x, 5),
}
ROWS_OF: dict[str, Op] = {
    "index_add": lambda x: torch.zeros(512, 1024).index_add(0, ROWS, x),
    "index_reduce mean": lambda x: torch.zeros(64, 1024).index_reduce(0, ROWS % 64, x, "mean"),
    "scatter_add": lambda x: torch.zeros(512, 1024).scatter_add(0, PLACES, x),
    "index_select": lambda x: x.index_select(0, ROWS),
    "erfinv": lambda x: x.sigmoid().erfinv(),
}


def least(call: Callable[[], object]) -> float:
    """Milliseconds of the fastest of 20 calls."""
    call()
    found = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


def measure(name: str, fn: Op, x: torch.Tensor, gradient: bool) -> None:
    """Prints a line for the operator, and one for its gradient."""
    torch.compiler.reset()
    arms = {"eager": fn, "dicp": torch.compile(fn, backend="dicp_cpu", dynamic=False)}
    times = [f"{arm} {least(lambda f=f: f(x)):.2f}" for arm, f in arms.items()]  # type: ignore[misc]
    print(f"{name}: {', '.join(times)}", flush=True)
    if not gradient:
        return
    x, times = x.requires_grad_(), []
    for arm, f in arms.items():
        y = f(x)
        back = functools.partial(torch.autograd.grad, y, x, torch.ones_like(y), retain_graph=True)
        times.append(f"{arm} {least(back):.2f}")
    print(f"{name}, gradient: {', '.join(times)}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    for name, fn in IMAGES.items():
        for suffix, order in (("", torch.contiguous_format), (" cl", torch.channels_last)):
            if wanted.search(name + suffix):
                measure(name + suffix, fn, torch.randn(4, 32, 56, 56).contiguous(memory_format=order), True)
    for name, fn in ROWS_OF.items():
        if wanted.search(name):
            measure(name, fn, torch.randn(512, 1024), False)


if __name__ == "__main__":
    main()
