"""One way of running a model: eager, compiled by some backend, or exact; and the runs a model is put
through."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model import checks
from model.models import Case, Inputs, loss_of, scores_of


@dataclass(frozen=True)
class Arm:
    """A model and how it is called. `call` is the model itself or its compiled form; both share
    parameters."""

    name: str
    model: nn.Module
    call: Callable[..., Any]
    dtype: torch.dtype

    def context(self) -> contextlib.AbstractContextManager[None]:
        """What every use of this arm runs under."""
        return checks.in_double() if self.dtype == torch.float64 else contextlib.nullcontext()

    def prepare(self, inputs: Inputs) -> Inputs:
        """Inputs as this arm takes them."""
        return checks.to_double(inputs) if self.dtype == torch.float64 else inputs


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in that dtype; rotary frequencies stay float32, as transformers has them when it loads a
    model."""
    kept = {name: b for name, b in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(dtype)
    for name, buffer in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.float())
    return model


def compiled_arm(model: nn.Module, backend: str, dtype: torch.dtype, dynamic: bool) -> Arm:
    """The model under `torch.compile`; "eager" is the model as it is."""
    if backend == "eager":
        return Arm(backend, model, model, dtype)
    return Arm(backend, model, torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True), dtype)


def exact_arm(model: nn.Module) -> Arm:
    """The model in float64 under eager."""
    with checks.in_double():
        twin = checks.exact_copy(model)
    return Arm("exact", twin, twin, torch.float64)


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
    assert case.targets is not None
    parameters = dict(arm.model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=rate, momentum=0.9)
    inputs, targets = arm.prepare(inputs), case.targets(inputs)
    arm.model.train()

    def step() -> Step:
        optimizer.zero_grad()
        with arm.context():
            out = scores_of(arm.call(**inputs))
            loss = loss_of(out, targets)
        loss.backward()
        optimizer.step()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return Step(loss.detach(), out.detach(), gradients)

    return step


def train(arm: Arm, case: Case, inputs: Inputs, steps: int, rate: float = 1e-3) -> list[Step]:
    """So many steps on the same batch, from the parameters that the arm has; the model is left in eval
    mode."""
    step = trainer(arm, case, inputs, rate)
    done = [step() for _ in range(steps)]
    arm.model.zero_grad()
    arm.model.eval()
    return done


def all_scores(run: list[Step]) -> Tensor:
    """The scores of every step, stacked."""
    return torch.stack([step.scores for step in run])


def all_losses(run: list[Step]) -> Tensor:
    """The losses of a run, as a vector."""
    return torch.stack([step.loss for step in run])


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Eager runs its own convolutions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # about GPUs, from the flag's setter
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def eager_ways(
    arm: Arm, case: Case, inputs: Inputs, steps: int
) -> list[tuple[list[Step], dict[str, Tensor]]]:
    """The training run, and the buffers it leaves, in each way that eager has of running it (one, if it has
    no kinks: see checks.py). Other layouts and libraries are float32's: in bf16 they hardly differ."""
    ways: list[tuple[Arm, Inputs, contextlib.AbstractContextManager[Any]]] = [
        (arm, inputs, contextlib.nullcontext())
    ]
    if case.kinks and arm.dtype == torch.float32:
        wide = copy.deepcopy(arm.model).to(memory_format=torch.channels_last)
        images = {k: v.contiguous(memory_format=torch.channels_last) for k, v in inputs.items()}
        plain = copy.deepcopy(arm.model)
        ways.append((Arm("channels last", wide, wide, arm.dtype), images, contextlib.nullcontext()))
        ways.append((Arm("no oneDNN", plain, plain, arm.dtype), inputs, without_onednn()))
    done = []
    for way, given, context in ways:
        with context:
            run = train(way, case, given, steps)
        done.append((run, {name: b.clone() for name, b in way.model.named_buffers()}))
    return done


@contextlib.contextmanager
def restored(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put parameters and buffers back, in place, to what they were."""
    kept = [(m, copy.deepcopy(m.state_dict())) for m in models]
    try:
        yield
    finally:
        for model, state in kept:
            model.load_state_dict(state)


class Decoder:
    """A language model with its static key-value cache: prefill a prompt, then one token at a time."""

    def __init__(self, arm: Arm, cache_tokens: int) -> None:
        from transformers import StaticCache

        self.arm = arm
        config = arm.model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = StaticCache(config=config, max_cache_len=cache_tokens)
        self.cache.early_initialization(1, heads, width, arm.dtype, torch.device("cpu"))

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
