"""Convolutions over symbolic heights and widths: what the library gives channels-last is taken as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dicp.compiler import Compiled, observe
from dicp.schedule.strides import dense_strides


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def test_results_of_convolutions_are_used_where_they_lie() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, stride=2, padding=1, bias=False),
    )
    compiled = torch.compile(model, backend="dicp_cpu", dynamic=True)
    graphs: list[Compiled] = []
    with observe(graphs.append):
        for size in (96, 100):
            x = torch.randn(2, 16, size, size + 8).to(memory_format=torch.channels_last)
            given: Tensor = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(compiled(given).square().sum(), given)
            expected = x.clone().requires_grad_()
            (exact,) = torch.autograd.grad(model(expected).square().sum(), expected)
            torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 2
    calls = [c for g in graphs for c in g.program.library_calls if "oneDNN" in c.claim.name]
    assert len(calls) == 4
    images = [b for c in calls for b in c.outputs if b is not None and not isinstance(b.shape[0], int)]
    assert len(images) == 4
    for buffer in images:
        assert tuple(buffer.strides) == dense_strides(buffer.shape, (0, 2, 3, 1)), buffer
