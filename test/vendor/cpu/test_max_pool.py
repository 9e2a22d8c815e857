"""Which max pools are ATen's and which are kernels of ours, and that both give eager's elements and places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe

LAYOUTS = {"channels-last": torch.channels_last, "row-major": torch.contiguous_format}
HOWS = [(3, 2, 1), (2, 2, 0), (3, 1, 1, 2)]  # window, stride, padding, dilation


def compiled(fn: Any, *args: Any) -> tuple[Any, list[str]]:
    """The function's result, and the calls in what was compiled."""
    torch._dynamo.reset()
    seen: list[Compiled] = []
    with observe(seen.append):
        out = torch.compile(fn, backend="dicp_cpu")(*args)
    return out, [c.claim.name for s in seen for c in s.program.library_calls]


def image(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """With equal elements, NaN and infinity."""
    torch.manual_seed(3)
    x = torch.randint(-4, 4, (2, 19, 13, 12)).to(dtype)
    x[0, 1, 2, 3], x[1, 2, 4:9, 5:9], x[0, 3] = float("nan"), float("inf"), -float("inf")
    return x.contiguous(memory_format=LAYOUTS[layout])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_alone_are_generated(layout: str, dtype: torch.dtype) -> None:
    x = image(layout, dtype)
    for how in HOWS:
        got, calls = compiled(lambda x, how=how: F.max_pool2d(x, *how), x)
        eager = F.max_pool2d(x, *how)
        assert calls == []
        assert torch.equal(got.nan_to_num(99.0), eager.nan_to_num(99.0)) and got.stride() == eager.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_are_atens_where_channels_are_dense(layout: str, dtype: torch.dtype) -> None:
    x = image(layout, dtype)
    for how in HOWS:
        (got, at), calls = compiled(lambda x, how=how: F.max_pool2d(x, *how, return_indices=True), x)
        eager, there = F.max_pool2d(x, *how, return_indices=True)
        assert calls == (["max_pool2d"] if layout == "channels-last" else [])
        assert torch.equal(got.nan_to_num(99.0), eager.nan_to_num(99.0)) and torch.equal(at, there)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_atens(layout: str) -> None:
    x = image(layout, torch.float32).nan_to_num(0.0).requires_grad_()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    torch._dynamo.reset()
    seen: list[Compiled] = []
    with observe(seen.append):
        y = torch.compile(fn, backend="dicp_cpu")(x)
        (got,) = torch.autograd.grad(y.square().sum(), x)
    (eager,) = torch.autograd.grad(fn(x).square().sum(), x)
    torch.testing.assert_close(got, eager)
    assert [c.claim.name for s in seen for c in s.program.library_calls].count("max_pool2d") == (
        2 if layout == "channels-last" else 1
    )
