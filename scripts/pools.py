"""Max pools under eager, whose are ATen's, Inductor and dicp_cpu: milliseconds of a call, medians, in turns.
Without places, with them, and forward and backward, for images channels-last and row-major.

    python scripts/pools.py [--dtype float32]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.bench.measure import alternating

LAYOUTS = {"channels-last": torch.channels_last, "row-major": torch.contiguous_format}
KINDS = (("elements", False, False), ("and places", True, False), ("step", False, True))
"""Name; whether the places are wanted; whether the gradient is."""
IMAGES = (((2, 64, 112, 112), (3, 2, 1)), ((2, 256, 28, 28), (2, 2, 0)), ((8, 64, 57, 57), (3, 1, 1)))
"""Shape; window, stride and padding."""


def _forward(how: tuple[int, ...], places: bool) -> Callable[[Tensor], Any]:
    return lambda x: F.max_pool2d(x, *how, return_indices=places)


def _step(pool: Callable[[Tensor], Any], x: Tensor) -> object:
    y = pool(x)
    return torch.autograd.grad(y, x, torch.ones_like(y))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--dtype", default="float32")
    dtype = getattr(torch, parser.parse_args().dtype)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; ms")
    print(f"{'':54}{'eager':>9}{'Inductor':>9}{'dicp_cpu':>9}")
    for shape, how in IMAGES:
        for layout, order in LAYOUTS.items():
            image = torch.randn(shape).to(dtype).contiguous(memory_format=order)
            for name, places, trains in KINDS:
                x, call = image.clone().requires_grad_(trains), _forward(how, places)
                pools = [call]
                for backend in ("inductor", "dicp_cpu"):
                    torch._dynamo.reset()
                    pools.append(torch.compile(call, backend=backend, dynamic=False))
                    pools[-1](x)
                calls = [functools.partial(_step, p, x) if trains else functools.partial(p, x) for p in pools]
                times = "".join(f"{t:9.3f}" for t in alternating(calls))
                print(f"{shape!s:20} {how!s:10} {layout:14} {name:11} {times}", flush=True)


if __name__ == "__main__":
    main()
