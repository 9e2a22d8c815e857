"""The rule that a compiled model is held to, and how the runs that it compares are made.

The fp64 rule. The same computation runs three times: compiled, under eager PyTorch, and under eager PyTorch
in float64 ("exact"). For every tensor of interest, with |.| the Euclidean norm,

    |compiled - exact|  <=  2 |eager - exact|  +  floor

so a compiled model may round differently from eager, but may not be noticeably less accurate. The floor is
there for tensors that eager happens to get right to the last bit:

    floor = eps(dtype) / 2 * |exact|  +  eps(float32) * sqrt(n) * scale

The first term is one rounding of the result itself. The second only matters for tensors that are zero but
for rounding (the gradient of a key projection's bias is one: softmax ignores it): `scale` is the root mean
square of all values in the group that the tensor belongs to (all the gradients, say), `n` its number of
elements. NaN and infinities must stand where exact has them; shape and dtype must be eager's.

Losses are single numbers: eager's error on one of them is small by luck about as often as not. They are
therefore judged together, as one vector over the steps of a run, and `eager's own distance` for that vector
is at least the size of eager's error on the class scores that the losses are computed from (root mean
square, each step): an error of that size in the scores moves the loss by as much.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FACTOR = 2.0


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one tensor; distances are relative to the norm of the exact tensor."""

    name: str
    ok: bool
    distance: float
    eager: float
    allowed: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        return (
            f"{self.name}: distance {self.distance:.2e}, eager's {self.eager:.2e}, allowed {self.allowed:.2e}"
        )


class _InDouble(TorchFunctionMode):
    """Within it, whatever asks for float32 gets float64: models that compute a norm or a softmax "in
    float32" whatever their own dtype would otherwise put float32 errors into the exact run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        swap = {torch.float32: torch.float64}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: swap.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_double() -> Iterator[None]:
    """Run a float64 model in float64 throughout."""
    with _InDouble():
        yield


def exact_copy(model: nn.Module) -> nn.Module:
    """The same model, with the very values of its parameters, in float64. Call it under `in_double()`."""
    return copy.deepcopy(model).double()


def to_double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs, floating ones in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def rms(tensors: Iterable[Tensor]) -> float:
    """Root mean square over all elements of all tensors."""
    squares, count = 0.0, 0
    for t in tensors:
        squares += float(t.double().square().sum())
        count += t.numel()
    return math.sqrt(squares / max(1, count))


def _distance(x: Tensor, exact: Tensor) -> float:
    """|x - exact| over the finite elements; infinite where NaN or an infinity is not where exact has it."""
    x = x.double()
    finite = exact.isfinite()
    if not torch.equal(finite, x.isfinite()):
        return math.inf
    if not torch.equal(x[~finite].nan_to_num(0.0), exact[~finite].nan_to_num(0.0)):
        return math.inf
    return float((x[finite] - exact[finite]).norm())


def judge(
    name: str, got: Tensor, eager: Tensor, exact: Tensor, scale: float = 0.0, at_least: float = 0.0
) -> Verdict:
    """The fp64 rule for one tensor. `at_least`: a lower bound on eager's own distance (see the losses
    above)."""
    if got.shape != eager.shape or got.dtype != eager.dtype:
        reason = f"is {got.dtype}{list(got.shape)}, eager's is {eager.dtype}{list(eager.shape)}"
        return Verdict(name, False, math.inf, 0.0, 0.0, reason)
    exact = exact.double()
    norm = float(exact[exact.isfinite()].norm())
    floor = (
        norm * torch.finfo(got.dtype).eps / 2
        + torch.finfo(torch.float32).eps * math.sqrt(exact.numel()) * scale
    )
    distance, own = _distance(got, exact), _distance(eager, exact)
    allowed = FACTOR * max(own, at_least) + floor
    per = norm or 1.0
    return Verdict(name, distance <= allowed, distance / per, own / per, allowed / per)


def judge_group(
    name: str, got: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> list[Verdict]:
    """The rule for each tensor of a group; a tensor that is missing, or there too many, fails."""
    if got.keys() != eager.keys():
        odd = sorted(got.keys() ^ eager.keys())
        return [Verdict(name, False, math.inf, 0.0, 0.0, f"not the tensors eager has; differing: {odd[:5]}")]
    scale = rms(exact.values())
    found = []
    for key, value in got.items():
        if value.is_floating_point():
            found.append(judge(f"{name} {key}", value, eager[key], exact[key], scale))
        elif not torch.equal(value, eager[key]):
            found.append(Verdict(f"{name} {key}", False, math.inf, 0.0, 0.0, "differs from eager's"))
    return found


def judge_losses(
    got: list[Tensor], eager: list[Tensor], exact: list[Tensor], scores: list[tuple[Tensor, Tensor]]
) -> Verdict:
    """The rule for the losses of a run. `scores`: per step, eager's class scores and the exact ones."""
    own = [rms([e.double() - x.double()]) for e, x in scores]
    return judge(
        "losses", torch.stack(got), torch.stack(eager), torch.stack(exact), at_least=math.hypot(*own)
    )
