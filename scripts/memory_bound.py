"""What is bound by memory, of one matrix, under eager, Inductor and dicp_cpu: milliseconds of a call,
medians, in turns, and GB/s of dicp_cpu, every element that has to be read or written counted once.

    python scripts/memory_bound.py [--shapes 4096x4096,64x100000] [--dtype float32]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dicp.bench.measure import alternating


class Case(NamedTuple):
    """A function of the matrix, and how often it reads or writes a whole one."""

    call: Callable[[Tensor], object]
    passes: int


def _cleared(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, torch.arange(8), x[:8])


CASES = {
    **{
        f"{name} of {'columns' if dim == 0 else 'rows'}": Case(functools.partial(reduce, dim=dim), passes)
        for name, reduce, passes in (
            ("sum", torch.sum, 1),
            ("largest", torch.amax, 1),
            ("position", torch.argmax, 1),
            ("variance", torch.var_mean, 1),
            ("softmax", torch.softmax, 2),
        )
        for dim in (1, 0)
    },
    "turned": Case(lambda x: x.t().contiguous(), 2),
    "turned, twice and one": Case(lambda x: (x.t() * 2 + 1).contiguous(), 2),
    "zeros, 8 rows added": Case(_cleared, 1),
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shapes", default="1000x1003,4096x4096,64x100000,100000x64")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; ms")
    print(f"{'':40}{'eager':>9}{'Inductor':>9}{'dicp_cpu':>9}{'GB/s':>7}")
    for shape in options.shapes.split(","):
        x = torch.randn([int(n) for n in shape.split("x")]).to(getattr(torch, options.dtype))
        for name, case in CASES.items():
            calls = [functools.partial(case.call, x)]
            for backend in ("inductor", "dicp_cpu"):
                torch._dynamo.reset()
                compiled = torch.compile(case.call, backend=backend, dynamic=False)
                compiled(x)
                calls.append(functools.partial(compiled, x))
            ms = alternating(calls)
            times = "".join(f"{t:9.3f}" for t in ms)
            rate = case.passes * x.nbytes / ms[-1] / 1e6
            print(f"{shape:>15}  {name:22} {times} {rate:6.1f}", flush=True)


if __name__ == "__main__":
    main()
