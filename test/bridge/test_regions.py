"""Regions that are traced once and called often are part of the graph: no extern call is left of them."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import compiles
from torch import nn

nested = torch.compiler.nested_compile_region


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.where(torch.arange(x.shape[-1]) > 2, self.linear(self.norm(x)), 0).tanh()


@nested
def inner(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


@nested
def block(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@nested
def outer(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return inner(module(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = (block if torch.is_grad_enabled() else outer)(each, x)
        return x


@pytest.mark.parametrize("grad", [False, True])  # torch 2.13 fails for gradients of regions within regions
def test_regions_leave_no_extern(grad: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack().requires_grad_(grad)
    twin = copy.deepcopy(model)
    options = {"strict": True}  # of static sizes: torch 2.13 fails for regions with others
    call = torch.compile(twin, backend="dicp_cpu", options=options, dynamic=False, fullgraph=True)
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        with compiles() as found, torch.set_grad_enabled(grad):
            got, want = call(x), model(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        if grad:
            got.sum().backward()
            want.sum().backward()
            for mine, theirs in zip(twin.parameters(), model.parameters()):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        assert all(not c.program.externs for c in found)
