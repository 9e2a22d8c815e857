"""Operands whose strides a library refuses, and running sums as exact as eager's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


@pytest.mark.parametrize(
    "weight",
    [
        lambda x: x[:, ::2],  # rows of 2 x 9 elements, one every 17
        lambda x: x[:, :9].expand(2, 9),
        lambda x: x.as_strided((2, 9), (3, 1)),  # rows that overlap
        lambda x: x.as_strided((2, 9), (1, 1)),
        lambda x: x.as_strided((2, 9), (1, 2)),
    ],
)
def test_weights_that_do_not_lie_row_by_row(weight) -> None:  # type: ignore[no-untyped-def]
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = weight(x)
        return F.linear(x[:, :9], w), x[:, :9] @ w.t()

    x = torch.randn(2, 17)
    for got, want in zip(torch.compile(fn, backend="dicp_cpu")(x), fn(x)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("op", [torch.cumsum, torch.cumprod])
def test_running_sums_do_not_gather_roundings(op, dim: int) -> None:  # type: ignore[no-untyped-def]
    x = torch.full((2000, 2000), 1.0001)
    if op is torch.cumsum:
        x = x * 0.1
    exact = op(x.double(), dim)
    got = torch.compile(lambda x: op(x, dim), backend="dicp_cpu")(x)
    mine, eager = (((y.double() - exact) / exact).abs().max().item() for y in (got, op(x, dim)))
    assert mine <= 2 * eager
