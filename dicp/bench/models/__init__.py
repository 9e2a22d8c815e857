"""The models: how each is built, what goes in, at which sizes. Random weights with a fixed seed, real
architectures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from dicp.bench.models import images, text, zoo
from dicp.bench.models.case import (
    Case,
    Inputs,
    class_targets,
    images_in,
    squared_error,
    token_targets,
)

Builder = Callable[[str], nn.Module]
Maker = Callable[[str, int, torch.dtype], Inputs]



def _classifier(
    name: str, build: Builder, inputs: Maker, steps: int = 1, kinks: bool = False, transformers: bool = True
) -> Case:
    return Case(
        name, build, inputs, class_targets, unit="images", work=images_in, steps=steps, kinks=kinks,
        needs_transformers=transformers,
    )  # fmt: skip


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama", text.build_llama, text.llama_inputs, token_targets, generates=True),
        Case("qwen", text.build_qwen, text.text_inputs(50000), token_targets),
        Case(
            "mixtral", text.build_mixtral, text.text_inputs(32000), token_targets,
            kinks=True, exactly=text.experts_one_by_one,
        ),
        Case("gpt2", text.build_gpt2, text.text_inputs(50257), token_targets),
        Case("bert", text.build_bert, text.bert_inputs, token_targets),
        Case("t5", text.build_t5, text.t5_inputs, token_targets),
        Case(
            "whisper", images.build_whisper, images.whisper_inputs, token_targets,
            unit="s of sound", work=images.seconds_of_sound,
        ),
        _classifier("vit", images.build_vit, images.pixel_inputs(224, 32)),
        _classifier(
            "resnet50", images.build_resnet50, images.resnet50_inputs, steps=5, kinks=True,
            transformers=False,
        ),
        _classifier(
            "mobilenet_v2", images.build_mobilenet_v2, images.pixel_inputs(224, 64, 4), kinks=True
        ),
        _classifier("convnext", images.build_convnext, images.pixel_inputs(224, 32)),
        Case(
            "unet", images.build_unet, images.unet_inputs, images.noise_targets, squared_error,
            unit="images", work=images_in, needs_transformers=False,
        ),
    )
}  # fmt: skip


LARGE: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "llama_1b", text.build_llama_1b, text.text_inputs(128256, text.LONG_SHAPES), token_targets,
            generates=True,
        ),
        Case(
            "llama_7b", text.build_llama_7b, text.text_inputs(32000, text.LONG_SHAPES), token_targets,
            generates=True,
        ),
    )
}  # fmt: skip
"""Of gigabytes: named, they are measured."""


def obstacle(names: Iterable[str]) -> str | None:
    """Why these models cannot be built here, and what to do; None when they can. For the driver to say before
    any is built."""
    names = set(names)
    for problem in map(zoo.problem, sorted(n for n in names if n.startswith(zoo.PREFIX))):
        if problem:
            return problem
    known = [(CASES | LARGE)[n] for n in names if not n.startswith(zoo.PREFIX)]
    wanted = sorted(case.name for case in known if case.needs_transformers)
    if wanted and importlib.util.find_spec("transformers") is None:
        return (
            f"{', '.join(wanted)}: transformers is not installed; run `bash scripts/setup_env.sh` and use "
            "its environment, or pip install 'dicp[test]'"
        )
    directory = text.llama_dir()
    if "llama" not in wanted or directory is None:
        return None
    path = Path(directory)
    if not path.is_dir():
        return f"LLAMA_MODEL_DIR={directory} is no directory; unset, the model has random weights"
    if not (path / "config.json").is_file():
        return f"LLAMA_MODEL_DIR={directory} holds no config.json; it has to be a checkpoint of transformers"
    if not any([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        return f"LLAMA_MODEL_DIR={directory} holds no weights (*.safetensors or *.bin)"
    return None
