"""What the benchmarks run: a workload is built for one contestant, and is then a call without arguments."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))

import torch  # noqa: E402
from model import arms  # noqa: E402
from model.models import CASES  # noqa: E402

CONTESTANTS = ("eager", "inductor", "dicp_cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], object]


def _arm(name: str, contestant: str, dtype: torch.dtype) -> arms.Arm:
    return arms.compiled_arm(arms.cast(CASES[name].build("full"), dtype), contestant, dtype, dynamic=False)


def _inference(name: str, **extra: Any) -> Callable[[str, torch.dtype], Call]:
    def make(contestant: str, dtype: torch.dtype) -> Call:
        arm = _arm(name, contestant, dtype)
        inputs = {**CASES[name].inputs("full", 0, dtype), **extra}
        return lambda: arms.scores(arm, inputs)

    return make


def _training(name: str) -> Callable[[str, torch.dtype], Call]:
    """Forward, backward and the step of SGD with momentum; the model compiled, the optimizer eager for
    everybody."""

    def make(contestant: str, dtype: torch.dtype) -> Call:
        case, arm = CASES[name], _arm(name, contestant, dtype)
        inputs = case.inputs("full", 0, dtype)
        step = arms.trainer(arm, case, inputs, rate=1e-5)
        return lambda: step()

    return make


def _decode(contestant: str, dtype: torch.dtype) -> Call:
    """One token after a prompt of 128, batch 1, static key-value cache."""
    prompt = CASES["llama"].inputs("full", 0, dtype)["input_ids"]
    decoder = arms.Decoder(_arm("llama", contestant, dtype), prompt.shape[1] + 64)

    def call() -> object:
        decoder.rewind(prompt.shape[1])
        return decoder.feed(prompt[:, -1:])

    return call


WORKLOADS: dict[str, Callable[[str, torch.dtype], Call]] = {
    "llama-prefill": _inference("llama", use_cache=False),
    "llama-decode": _decode,
    "resnet50": _inference("resnet50"),
    "resnet50-train": _training("resnet50"),
    "bert": _inference("bert"),
    "gpt2": _inference("gpt2"),
    "vit": _inference("vit"),
    "bert-train": _training("bert"),
    "gpt2-train": _training("gpt2"),
    "vit-train": _training("vit"),
}
STANDARD = tuple(name for name in WORKLOADS if name in ("resnet50-train",) or not name.endswith("-train"))


def conditions() -> dict[str, Any]:
    """The machine and the versions that figures hold for."""
    import transformers

    from dicp.info import cpu_model

    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
