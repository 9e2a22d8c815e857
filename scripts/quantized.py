"""A LLaMA of two layers whose weights torchao has quantized: milliseconds of a prompt of 128 tokens and of
one token, under eager, Inductor and dicp_cpu, which take turns.

    python scripts/quantized.py [--threads N]        needs transformers and torchao

How far each one's logits are from eager's is printed, too: float operations that are associated otherwise
flip roundings of the quantizer.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torchao.quantization as ao
from transformers import LlamaConfig, LlamaForCausalLM

import dicp  # noqa: F401  (registers the backend where the package is not installed)
from dicp.bench.measure import alternating

CONFIGS: dict[str, Callable[[], Any]] = {
    "as it is": lambda: None,
    "int8 weights": ao.Int8WeightOnlyConfig,
    "int8 weights and activations": ao.Int8DynamicActivationInt8WeightConfig,
    "4 bits, groups of 64": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(64)
    ),
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
            if (wanted := config()) is not None:
                ao.quantize_(model, wanted)
            with torch.no_grad():
                measure(model, f"{str(dtype).removeprefix('torch.')}, {name}")


if __name__ == "__main__":
    main()
