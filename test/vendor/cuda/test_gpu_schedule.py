"""Scheduled as for a GPU, interpreted: columns in parts, small kernels side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dicp.compiler import Compiled, observe
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.ir import index as ix
from dicp.vendor.cuda_graph import CudaGraph, gpu


class Norms(nn.Module):
    """Norms over rows, whose weights' gradients are sums of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LayerNorm(96), nn.LayerNorm(96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(self.first(x))
        return x + F.gelu(self.linear(self.second(x)))


class Images(nn.Module):
    """Batch norms, whose statistics are moments of columns where images are channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.deep = nn.Conv2d(32, 32, 1, bias=False), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.narrow(x)))
        return F.relu(self.norms[1](self.deep(y)) + x)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norms": (Norms, (4, 256, 96)),
    "images": (Images, (4, 32, 24, 24)),
}


def step(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The result, the gradients, and the net's statistics after it."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(x)
    y.square().mean().backward()
    grads = [p.grad for p in net.parameters()]
    return [y.detach(), x.grad, *grads, *(b.clone() for b in net.buffers())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", NETS)
def test_training_agrees_with_eager(name: str, cuda_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    eager = copy.deepcopy(net)
    want, kernels = step(eager, eager, x), []
    for launch_bytes in (0, gpu(32).launch_bytes):
        machine = replace(gpu(32), launch_bytes=launch_bytes)
        monkeypatch.setattr(CudaGraph, "machine", lambda self, config, machine=machine: machine)
        torch._dynamo.reset()
        mine, seen = copy.deepcopy(net), list[Compiled]()
        options: dict[str, Any] = {"interpret": True, "cache_dir": cuda_cache}
        with observe(seen.append):
            got = step(mine, torch.compile(mine, backend=dicp_cuda, options=options), x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        kernels.append([launch.kernel for s in seen for launch in s.program.launches])
    apart, beside = kernels
    assert len(beside) < len(apart)
    longest = max(ix.product(a.size for a in k.axes if a.reduced) for k in apart)
    assert isinstance(longest, int) and longest < 512  # of more than a thousand rows
