"""What a device is given, traced without one: layouts, library calls and saved values are not those of CPU
tensors under the interpreter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_kernels.py"
MODELS = ["llama", pytest.param("resnet50", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the device is made by g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch's CUDA build has a device in its books"),
]


def rows(models: str, *how: str) -> list[dict]:
    command = [sys.executable, str(SCRIPT), "--models", models, *how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("model", MODELS)
def test_a_training_steps_kernels_compile_for_a_gpu(model: str) -> None:
    pytest.importorskip("transformers")
    (row,) = rows(model, "--phases", "training", "--size", "small", "--archs", "90")
    assert row["programs"] == ["forward", "backward"]
    assert row["binaries"] >= row["kernels"] > 20
    library = " ".join(row["library"])
    assert "cuBLAS" in library
    if model == "llama":  # on CPU tensors: products and a softmax, or the CPU's own op
        assert row["library"]["attention"] == 4
    else:
        assert row["library"]["convolution: cuDNN"] > 0


@pytest.mark.slow
def test_every_models_kernels_compile_for_every_gpu() -> None:
    pytest.importorskip("transformers")
    for row in rows("llama,qwen,mixtral,gpt2,bert,t5,whisper,vit,resnet50,mobilenet_v2,convnext,unet"):
        assert row["binaries"] >= 3 * row["kernels"] > 0
