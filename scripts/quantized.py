"""A LLaMA of two layers whose weights torchao has quantized: milliseconds of a prompt of 128 tokens and of
one token, under eager, Inductor and dicp_cpu, which take turns.

    python scripts/quantized.py [--threads N]        needs transformers and torchao

How far each one's logits are from eager's is printed, too: float operations that are associated otherwise
flip roundings of the quantizer. The last two kinds of weights are not torchao's: four bits packed as other
libraries pack them, two rows in each byte (HQQ) and eight numbers along the depth in each word (GPTQ).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchao.quantization as ao
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import dicp  # noqa: F401  (registers the backend where the package is not installed)
from dicp.bench.measure import alternating

GROUP = 64


class Halves(nn.Module):
    """A linear layer of four bits: a byte has one number of a group, and one half of all groups behind it."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.shape = of.weight.shape
        groups = self.shape.numel() // GROUP
        self.register_buffer("weight", torch.randint(0, 256, (groups // 2, GROUP), dtype=torch.uint8))
        self.register_buffer("zero", torch.full((groups, 1), 7.5).to(of.weight.dtype))
        self.register_buffer("scale", torch.full((groups, 1), 0.005).to(of.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        whole = torch.empty(2 * rows, GROUP, dtype=torch.uint8)
        whole[:rows] = (self.weight & 0xF0) >> 4
        whole[rows:] = self.weight & 0x0F
        return F.linear(x, ((whole.to(x.dtype) - self.zero) * self.scale).reshape(self.shape))


class Words(nn.Module):
    """A linear layer of four bits, eight numbers along the depth in each word."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        columns, depth = of.weight.shape
        words = torch.randint(-(2**31), 2**31, (depth // 8, columns), dtype=torch.int32)
        self.register_buffer("weight", words)
        self.register_buffer("zero", torch.full((depth // GROUP, 1, columns), 8, dtype=torch.int32))
        self.register_buffer("scale", torch.full((depth // GROUP, 1, columns), 0.005).to(of.weight.dtype))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        bits = ((self.weight.unsqueeze(1) >> self.shifts) & 15).reshape(-1, GROUP, self.weight.shape[1])
        return x @ ((bits - self.zero) * self.scale).flatten(0, 1).to(x.dtype)


CONFIGS: dict[str, Callable[[], Any]] = {
    "as it is": lambda: None,
    "int8 weights": ao.Int8WeightOnlyConfig,
    "int8 weights and activations": ao.Int8DynamicActivationInt8WeightConfig,
    "float8 weights": ao.Float8WeightOnlyConfig,
    "4 bits, groups of 64": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(GROUP)
    ),
    "4 bits, two rows in a byte": lambda: Halves,
    "4 bits, eight in a word": lambda: Words,
}
BACKENDS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "dicp_cpu": {"backend": "dicp_cpu"},
    "freeze": {"backend": "dicp_cpu", "options": {"freeze": True}},
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "vocab_size": 4000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).eval()


def packed(model: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> None:
    """Have its linear layers replaced."""
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, kind(layer))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def measure(model: torch.nn.Module, name: str) -> None:
    torch.compiler.reset()
    arms = {"eager": model, **{k: torch.compile(model, dynamic=False, **v) for k, v in BACKENDS.items()}}
    prompt, token = torch.randint(5, 4000, (1, 128)), torch.randint(5, 4000, (1, 1))
    logits = {arm: fn(input_ids=prompt).logits for arm, fn in arms.items()}
    times = [alternating([lambda f=f, x=x: f(input_ids=x) for f in arms.values()]) for x in (prompt, token)]
    off = " ".join(f"{arm} {distance(logits[arm], logits['eager']):.0e}" for arm in list(arms)[1:])
    for what, found in zip(("prompt", "token"), times, strict=True):
        row = " ".join(f"{ms:9.2f}" for ms in found)
        print(f"{name:42} {what:7} {row}   {off if what == 'prompt' else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    base = llama()
    print(f"{'ms':42} {'':7} {'eager':>9} {' '.join(f'{b:>9}' for b in BACKENDS)}   distance from eager")
    for dtype in (torch.float32, torch.bfloat16):
        for name, config in CONFIGS.items():
            model = copy.deepcopy(base).to(dtype)
            if (wanted := config()) in (Halves, Words):
                packed(model.model, wanted)
            elif wanted is not None:
                ao.quantize_(model, wanted)
            with torch.no_grad():
                measure(model, f"{str(dtype).removeprefix('torch.')}, {name}")


if __name__ == "__main__":
    main()
