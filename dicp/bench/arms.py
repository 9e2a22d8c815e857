"""One way of running a model: eager, compiled by some backend, or another; and what it is put through."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dicp.bench import contestants
from dicp.bench.models.case import Case, Inputs, scores_of


def _as_given(inputs: Inputs) -> Inputs:
    return inputs


@dataclass(frozen=True)
class Arm:
    """A model and how it is called. `call` is the model itself or its compiled form; both share parameters.

    context: what every use of it runs under; prepare: inputs as it takes them.
    """

    name: str
    model: nn.Module
    call: Callable[..., Any]
    dtype: torch.dtype
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    prepare: Callable[[Inputs], Inputs] = _as_given


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in that dtype; rotary frequencies stay float32, as transformers has them when it loads a
    model."""
    kept = {name: b for name, b in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(dtype)
    for name, buffer in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.float())
    return model


def compiled_arm(
    model: nn.Module, contestant: str, dtype: torch.dtype, dynamic: bool = False, training: bool = False
) -> Arm:
    """The model as a contestant runs it (contestants.py), in one graph; `training`: for steps, not for
    inference."""
    compile = contestants.get(contestant).compiler(training, dynamic=dynamic, fullgraph=True)
    return Arm(contestant, model, compile(model), dtype)


def scores(arm: Arm, inputs: Inputs) -> Tensor:
    """Class scores of an inference call."""
    with torch.no_grad(), arm.context():
        return scores_of(arm.call(**arm.prepare(inputs)))


@dataclass(frozen=True)
class Step:
    """What one training step gave; `gradients` of the parameters by name."""

    loss: Tensor
    scores: Tensor
    gradients: dict[str, Tensor]


def trainer(arm: Arm, case: Case, inputs: Inputs, rate: float) -> Callable[[], Step]:
    """A function that takes one more step of SGD with momentum on this batch, and says what it gave."""
    parameters = dict(arm.model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=rate, momentum=0.9)
    targets = case.targets(inputs).to(next(iter(parameters.values())).device)
    inputs = arm.prepare(inputs)
    arm.model.train()

    def step() -> Step:
        optimizer.zero_grad()
        with arm.context():
            out = scores_of(arm.call(**inputs))
            loss = case.loss(out, targets)
        loss.backward()
        optimizer.step()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return Step(loss.detach(), out.detach(), gradients)

    return step


class Decoder:
    """A language model with its static key-value cache: prefill a prompt, then one token at a time."""

    def __init__(self, arm: Arm, cache_tokens: int) -> None:
        from transformers import StaticCache

        self.arm, self.cache_tokens = arm, cache_tokens
        config = arm.model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = StaticCache(config=config, max_cache_len=cache_tokens)
        device = next(arm.model.parameters()).device
        self.cache.early_initialization(1, heads, width, arm.dtype, device)

    def feed(self, ids: Tensor) -> Tensor:
        """Scores [1, T, vocabulary] for the tokens [1, T] that follow what the cache holds."""
        # Strides of their own: a slice's would be guarded on, and cost a compile.
        ids = ids.clone(memory_format=torch.contiguous_format)
        with torch.no_grad(), self.arm.context():
            return self.arm.call(input_ids=ids, past_key_values=self.cache, use_cache=True).logits

    def prefill(self, ids: Tensor) -> Tensor:
        """Scores for a prompt, on an empty cache."""
        self.cache.reset()
        return self.feed(ids)

    def rewind(self, tokens: int) -> None:
        """Let the cache hold only its first tokens."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(tokens)

    def step(self, prompt: Tensor) -> Callable[[], Tensor]:
        """One token more in each call, as in a loop that generates; after the prompt again when the cache is
        full."""
        room = self.cache_tokens - prompt.shape[1]
        calls = itertools.count()

        def call() -> Tensor:
            if next(calls) % room == 0:
                self.rewind(prompt.shape[1])
            return self.feed(prompt[:, -1:])

        return call

    def generate(self, ids: Tensor, count: int) -> Tensor:
        """The next tokens [1, count], each the most likely one."""
        found = [self.prefill(ids)[:, -1].argmax(-1, keepdim=True)]
        while len(found) < count:
            found.append(self.feed(found[-1])[:, -1].argmax(-1, keepdim=True))
        return torch.cat(found, dim=1)

    def forced(self, ids: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Scores along given tokens: for the prompt, and for each token fed after it."""
        prompt = self.prefill(ids)
        return {
            "prefill": prompt,
            "decode": torch.cat([self.feed(tokens[:, i : i + 1]) for i in range(tokens.shape[1])], 1),
        }
