"""What a model of the benchmark and of the model tests is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over class scores in the last dimension, in float32 whatever the scores' dtype."""
    return nn.functional.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


def squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error, in float32 whatever the scores' dtype."""
    return nn.functional.mse_loss(scores.float(), targets)


@dataclass(frozen=True)
class Case:
    """One model.

    build(size): the model in float32 and eval mode, "full" or "small".
    inputs(size, variant, dtype): keyword arguments of forward; variants 0, 1, 2 differ in shape.
    targets(inputs): what the loss compares the scores with (class numbers: shaped as the scores without their
        last dimension).
    loss(scores, targets): a scalar.
    unit, work(inputs): what a call gets through, for throughput: so many of these.
    steps: SGD steps that a test's training run takes (0: not trained).
    kinks: its function has them (ReLU, max-pooling, routing), which the fp64 rule has to know.
    generates: a language model that is also run with a static key-value cache.
    needs_transformers: its architecture comes from there.
    exactly(model): makes a float64 copy runnable, where the default implementation has no float64.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[str, int, torch.dtype], Inputs]
    targets: Callable[[Inputs], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    unit: str = "tokens"
    work: Callable[[Inputs], float] = lambda inputs: sum(v.numel() for k, v in inputs.items() if "ids" in k)
    steps: int = 1
    kinks: bool = False
    generates: bool = False
    needs_transformers: bool = True
    exactly: Callable[[nn.Module], None] = lambda model: None


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that inputs depend on nothing but their seed."""
    return torch.Generator().manual_seed(seed)


def scores_of(output: Any) -> Tensor:
    """The class scores in a model's output."""
    return output if isinstance(output, Tensor) else output.logits


def images_in(inputs: Inputs) -> float:
    """How many images a batch holds."""
    return next(iter(inputs.values())).shape[0]


def token_targets(inputs: Inputs) -> Tensor:
    """The tokens, moved by one."""
    ids = inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]
    return ids.roll(-1, dims=1)


def class_targets(inputs: Inputs) -> Tensor:
    """Class numbers 1, 2, ... for the images of a batch."""
    images = next(iter(inputs.values()))
    return torch.arange(1, images.shape[0] + 1)
