"""Batch-1 decoding against the memory's read bandwidth: LLaMA (dicp.bench's, static cache) in fp32, bf16 and
with int8 weights, under several contestants in turns.

    python scripts/decode.py [--contestants eager,inductor,dicp_cpu] [--dtypes fp32,bf16,int8] [--rounds 20]
    python scripts/decode.py --model llama_1b --dtypes bf16,int8       weights of gigabytes, as they are used

The bandwidth is that of the fastest way to read known: each thread four streams, far apart and contiguous.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dicp.bench import arms, measure, workloads
from dicp.vendor import for_device


def bandwidth() -> float:
    """GB/s, the median of ten reads."""
    _, read = for_device("cpu").ceilings(torch.float32)
    return read.rate(statistics.median(measure.seconds(read.call) for _ in range(10)) * 1e3)


class Int8Linear(nn.Module):
    """A linear layer as int8 models write it: one scale per row of the weight."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        scales = of.weight.data.float().abs().amax(1) / 127
        self.register_buffer("weight", (of.weight.data.float() / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales.to(of.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


def to_int8(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            to_int8(child)


def token(model_name: str, contestant: str, dtype: str) -> tuple[Callable[[], Tensor], int]:
    """(one token's call, bytes of weights it reads)."""
    case = workloads.WORKLOADS[f"{model_name}-decode"].case
    computed = "bf16" if dtype == "int8" else dtype
    model = arms.cast(case.build("full"), workloads.DTYPES[computed])
    if dtype == "int8":
        to_int8(model)
    prompt = case.inputs("full", 0, workloads.DTYPES[computed])["input_ids"]
    arm = arms.compiled_arm(model, contestant, workloads.DTYPES[computed])
    call = arms.Decoder(arm, prompt.shape[1] + workloads.ROOM).step(prompt)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, Int8Linear))]

    return call, sum(m.weight.numel() * m.weight.element_size() for m in layers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [name.removesuffix("-decode") for name in workloads.WORKLOADS if name.endswith("-decode")]
    parser.add_argument("--model", default="llama", choices=models)
    parser.add_argument("--contestants", default="eager,inductor,dicp_cpu")
    parser.add_argument("--dtypes", default="fp32,bf16,int8")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    for dtype in given.dtypes.split(","):
        before = bandwidth()
        calls = {name: token(given.model, name, dtype) for name in given.contestants.split(",")}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call, _ in calls.values():
            for _ in range(3):
                call()
        for _ in range(given.rounds):
            for name, (call, _) in calls.items():
                begun = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begun)
        reads = (before + bandwidth()) / 2
        for name, (_, nbytes) in calls.items():
            seconds = statistics.median(times[name])
            speed = nbytes / seconds / 1e9
            print(
                f"{dtype} {name}: {seconds * 1e3:.2f} ms a token, {speed:.1f} GB/s of weights, "
                f"{100 * speed / reads:.0f} % of {reads:.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
