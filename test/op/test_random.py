"""Random operators: the distribution of eager's draws, reproducible by seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

N = 20_000
Draw = Callable[[], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda: torch.rand(N),
    "rand_f64": lambda: torch.rand(N, dtype=torch.float64),
    "randn": lambda: torch.randn(N),
    "randn_odd": lambda: torch.randn(N + 1),
    "rand_like": lambda: torch.rand_like(torch.empty(N)),
    "randint": lambda: torch.randint(-5, 40, (N,)),
    "randperm": lambda: torch.randperm(N),
    "bernoulli": lambda: torch.bernoulli(torch.full((N,), 0.3)),
    "normal": lambda: torch.normal(torch.full((N,), 2.0), 3.0),
    "uniform_": lambda: torch.empty(N).uniform_(-2, 5),
    "exponential_": lambda: torch.empty(N).exponential_(1.5),
    "cauchy_": lambda: torch.empty(N).cauchy_(0.5, 2.0),
    "log_normal_": lambda: torch.empty(N).log_normal_(0.1, 0.7),
    "geometric_": lambda: torch.empty(N).geometric_(0.2),
    "poisson": lambda: torch.poisson(torch.full((N,), 4.0)),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), N, replacement=True),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(N), 0.25),
    "dropout_then_add": lambda: torch.nn.functional.dropout(torch.linspace(0, 1, N), 0.5) + 1,
    "alpha_dropout": lambda: torch.nn.functional.alpha_dropout(torch.linspace(-1, 1, N), 0.3, training=True),
    "rrelu": lambda: torch.nn.functional.rrelu(-torch.ones(N), training=True),
    "gumbel_softmax": lambda: torch.nn.functional.gumbel_softmax(torch.zeros(N // 4, 4))[:, 0],
}


def seeded(draw: Draw, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return draw()


def ks_p(a: torch.Tensor, b: torch.Tensor) -> float:
    """p of the two-sample Kolmogorov-Smirnov test (asymptotic)."""
    a, b = a.double().flatten().sort().values, b.double().flatten().sort().values
    points = torch.cat([a, b])
    gap = (
        (
            torch.searchsorted(a, points, right=True) / len(a)
            - torch.searchsorted(b, points, right=True) / len(b)
        )
        .abs()
        .max()
    )
    x = float(gap) * math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    return (
        min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 60)))
        if x > 0.2
        else 1.0
    )


@pytest.mark.parametrize("name", DRAWS)
def test_distribution_and_seeds(name: str, backend: str) -> None:
    draw = DRAWS[name]
    torch._dynamo.reset()
    compiled = torch.compile(draw, backend=backend)
    eager, first, again, other = (
        seeded(draw, 1),
        seeded(compiled, 1),
        seeded(compiled, 1),
        seeded(compiled, 2),
    )
    assert (first.dtype, first.shape, first.stride()) == (eager.dtype, eager.shape, eager.stride())
    assert torch.equal(first, again), "the same seed must draw the same"
    assert not torch.equal(first, other), "another seed must draw something else"
    if not torch.equal(first, eager):
        assert ks_p(first, eager) > 1e-6
    if name == "randperm":
        assert torch.equal(first.sort().values, torch.arange(N))


@pytest.mark.parametrize("name", ("rand", "dropout"))
def test_two_draws_of_one_call_differ(name: str, backend: str) -> None:
    draw = DRAWS[name]
    torch._dynamo.reset()
    one, two = torch.compile(lambda: (draw(), draw()), backend=backend)()
    assert not torch.equal(one, two)


def test_dropout_backward_uses_the_forward_mask(backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(1000, requires_grad=True)
    y = torch.compile(lambda x: torch.nn.functional.dropout(x * 2, 0.5), backend=backend)(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, y != 0)
    assert torch.equal(x.grad[y != 0], torch.full((int((y != 0).sum()),), 4.0))


def test_dropout_rate_zero_and_one(backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(64)
    f = torch.compile(
        lambda x: (torch.nn.functional.dropout(x, 0.0), torch.nn.functional.dropout(x, 1.0)), backend=backend
    )
    kept, dropped = f(x)
    assert torch.equal(kept, x) and not dropped.any()
