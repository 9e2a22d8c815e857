"""The exact run, and the training runs that are compared."""

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dicp.bench.arms import Arm, Step, trainer
from dicp.bench.models.case import Case, Inputs
from model import checks


def exact_arm(case: Case, model: nn.Module) -> Arm:
    """The model in float64 under eager."""
    with checks.in_double():
        twin = checks.exact_copy(model)
    case.exactly(twin)
    return Arm("exact", twin, twin, torch.float64, checks.in_double, checks.to_double)


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
        images = {
            k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v
            for k, v in inputs.items()
        }
        plain = copy.deepcopy(arm.model)
        ways.append((Arm("channels last", wide, wide, arm.dtype), images, contextlib.nullcontext()))
        ways.append((Arm("no oneDNN", plain, plain, arm.dtype), inputs, without_onednn()))
        moved = copy.deepcopy(arm.model)
        rounded = {k: v.nextafter(torch.zeros(())) if v.is_floating_point() else v for k, v in inputs.items()}
        ways.append((Arm("the next images", moved, moved, arm.dtype), rounded, contextlib.nullcontext()))
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
