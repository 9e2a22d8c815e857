"""Reductions of a matrix by rows and by columns under eager, Inductor and dicp_cpu: milliseconds of a call,
medians, in turns, and GB/s of reading the matrix once by dicp_cpu.

    python scripts/reductions.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dicp.bench.measure import alternating

SHAPES = ((1000, 1003), (4096, 4096), (64, 100_000), (100_000, 64))
REDUCTIONS: dict[str, Callable[[Tensor, int], object]] = {
    "sum": lambda x, dim: x.sum(dim),
    "largest": lambda x, dim: x.amax(dim),
    "position": lambda x, dim: x.argmax(dim),
    "variance": lambda x, dim: torch.var_mean(x, dim),
    "softmax": lambda x, dim: x.softmax(dim),
}


def main() -> None:
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; ms")
    print(f"{'':33}{'eager':>9}{'Inductor':>9}{'dicp_cpu':>9}{'GB/s':>7}")
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns)
        for name, reduce in REDUCTIONS.items():
            for dim in (1, 0):
                calls = [functools.partial(reduce, x, dim)]
                for backend in ("inductor", "dicp_cpu"):
                    torch._dynamo.reset()
                    compiled = torch.compile(reduce, backend=backend, dynamic=False)
                    compiled(x, dim)
                    calls.append(functools.partial(compiled, x, dim))
                ms = alternating(calls)
                label = f"{name} of {'columns' if dim == 0 else 'rows'}"
                times = "".join(f"{t:9.3f}" for t in ms)
                print(f"{rows:7} {columns:7} {label:16} {times} {x.nbytes / ms[-1] / 1e6:6.1f}", flush=True)


if __name__ == "__main__":
    main()
