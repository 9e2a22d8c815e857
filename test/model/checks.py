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
square, each step): an error of that size in the scores moves the loss by as much. The floor's first term is
sqrt(3) roundings there: the logarithm, the difference and the mean that end in a loss are one each, where
eager's single number may have had none (under torch 2.11 that of a small ConvNeXt is the nearest float to
the exact one, and the next float to it would be refused).

Models with kinks (ReLU, max-pooling) need one thing more. Rounding decides on which side of a kink a value
near it falls; each such flip changes every gradient upstream by far more than rounding does, and where the
flips fall is chance: eager in channels-last layout differs from eager by 2000 times its own distance on some
gradients of ResNet-50. For them eager runs in every way it has (as it is, channels-last, without oneDNN; and
as it is on images whose elements are the next floats, an error of one rounding that the steps of a training
run multiply), and its own distance is the largest of these; a tensor of a group may be as far off, relative to
its norm, as eager is on the worst tensor of that group; and the whole group, every tensor weighing the same,
is held to the plain rule."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def _norm(exact: Tensor) -> float:
    """Euclidean norm of the finite elements."""
    return float(exact[exact.isfinite()].norm())


def _distance(x: Tensor, exact: Tensor) -> float:
    """|x - exact| over the finite elements; infinite where NaN or an infinity is not where exact has it."""
    x, exact = x.double(), exact.double()
    finite = exact.isfinite()
    if not torch.equal(finite, x.isfinite()):
        return math.inf
    if not torch.equal(x[~finite].nan_to_num(0.0), exact[~finite].nan_to_num(0.0)):
        return math.inf
    return float((x[finite] - exact[finite]).norm())


def judge(
    name: str,
    got: Tensor,
    eager: Sequence[Tensor],
    exact: Tensor,
    scale: float = 0.0,
    at_least: float = 0.0,
    roundings: float = 1.0,
) -> Verdict:
    """The fp64 rule for one tensor, given eager's result in each of its ways.

    scale, roundings: see the floor above; at_least: a lower bound on eager's own distance.
    """
    if got.shape != eager[0].shape or got.dtype != eager[0].dtype:
        reason = f"is {got.dtype}{list(got.shape)}, eager's is {eager[0].dtype}{list(eager[0].shape)}"
        return Verdict(name, False, math.inf, 0.0, 0.0, reason)
    exact = exact.double()
    norm = _norm(exact)
    floor = roundings * norm * torch.finfo(got.dtype).eps / 2 + _noise(exact, scale)
    distance, own = _distance(got, exact), max(_distance(e, exact) for e in eager)
    allowed = FACTOR * max(own, at_least) + floor
    per = norm or 1.0
    return Verdict(name, distance <= allowed, distance / per, own / per, allowed / per)


def _noise(exact: Tensor, scale: float) -> float:
    """The floor's second term."""
    return torch.finfo(torch.float32).eps * math.sqrt(exact.numel()) * scale


Group = Mapping[str, Tensor]


def judge_group(name: str, got: Group, eager: Sequence[Group], exact: Group, kinks: bool) -> list[Verdict]:
    """The rule for each tensor of a group; a tensor that is missing, or there too many, fails."""
    if got.keys() != eager[0].keys():
        odd = sorted(got.keys() ^ eager[0].keys())
        return [Verdict(name, False, math.inf, 0.0, 0.0, f"other tensors than eager's, such as {odd[:5]}")]
    floating = [key for key, value in got.items() if value.is_floating_point()]
    found = [
        Verdict(f"{name} {key}", False, math.inf, 0.0, 0.0, "differs from eager's")
        for key, value in got.items()
        if key not in floating and not torch.equal(value, eager[0][key])
    ]
    scale = rms(exact[key] for key in floating)
    norms = {key: _norm(exact[key].double()) for key in floating}
    worst = 0.0
    # a tensor that is zero but for rounding is held to the floor: relative to its norm, any error is large
    weighed = [key for key in floating if not norms[key] <= _noise(exact[key], scale)]
    if kinks and weighed:
        relative = {
            way: torch.tensor([_distance(run[k], exact[k]) / norms[k] for k in weighed])
            for way, run in enumerate([got, *eager])
        }
        worst = max(float(relative[1 + way].max()) for way in range(len(eager)))
        whole = rms([relative[0]]), max(rms([relative[1 + way]]) for way in range(len(eager)))
        allowed = FACTOR * whole[1] + torch.finfo(got[floating[0]].dtype).eps / 2
        found.append(Verdict(f"{name}s together", whole[0] <= allowed, *whole, allowed))
    for key in floating:
        runs = [run[key] for run in eager]
        found.append(judge(f"{name} {key}", got[key], runs, exact[key], scale, at_least=worst * norms[key]))
    return found
