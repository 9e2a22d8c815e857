"""Products over few channels that lie apart, compiled: kernels alone compute them, in any dtype, frozen, and their
gradients; against float64 under the rule of all tests (no further from it than twice eager)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dicp.compiler import Compiled, observe
from dicp.schedule.defs import Call

HEADS, POSITIONS, WIDTH = 4, 21, 8
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield


class Mixed(nn.Module):
    """Attention whose heads are mixed before the softmax, row by row, and behind it, as an image."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(HEADS, HEADS + 1)
        self.behind = nn.Conv2d(HEADS + 1, HEADS, 1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)
        return self.behind(self.before(scores).permute(0, 3, 1, 2).softmax(-1)) @ v


def operands(batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(batch, HEADS, POSITIONS, WIDTH).to(dtype) for _ in range(3)]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_heads_are_mixed_by_kernels(dtype: torch.dtype, batch: int, freeze: bool) -> None:
    model, inputs, called = Mixed().to(dtype), operands(batch, dtype), list[Any]()

    def look(graph: Compiled) -> None:
        defs = graph.program.lowered.defs
        called.extend(d.node.target._opname for d in defs if isinstance(d, Call))

    with torch.no_grad(), observe(look):
        y = torch.compile(model, backend="dicp_cpu", options={"freeze": freeze})(*inputs)
        exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
        assert error(y, exact) <= 2 * error(model(*inputs), exact) + ROUNDING[dtype]
    assert called == ["bmm", "bmm"]  # of q and k, and of v


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradients(dtype: torch.dtype) -> None:
    model, inputs = Mixed().to(dtype), operands(3, dtype)

    def gradients(run: Any, of: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [x.to(dtype).requires_grad_() for x in inputs]
        y = run(*given)
        weights = [p for name, p in of.named_parameters() if name != "before.bias"]  # a softmax takes it out
        return list(torch.autograd.grad(y, [*given, *weights], torch.ones_like(y).cumsum(-1)))

    found = gradients(torch.compile(model, backend="dicp_cpu"), model, dtype)
    exact = copy.deepcopy(model).double()
    for mine, eager, right in zip(
        found, gradients(model, model, dtype), gradients(exact, exact, torch.float64), strict=True
    ):
        assert mine.shape == eager.shape and mine.dtype == eager.dtype
        assert error(mine, right) <= 2 * error(eager, right) + ROUNDING[dtype]
