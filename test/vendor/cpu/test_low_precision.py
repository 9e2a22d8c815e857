"""Products, convolutions and attention in low precision on a processor without instructions for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph import claims, vendor
from dicp.vendor.cpu_graph.claims import common, gemm, matmul


class Block(nn.Module):
    """A convolution, a layer of attention, a gated product, a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.qkv, self.up = nn.Linear(16, 48), nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        gate, value = self.up(h).chunk(2, -1)
        return torch.bmm(h, (F.silu(gate) * value).transpose(1, 2)).float()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor whose libraries have no products of low precision, wherever the test runs."""
    for module in (common, claims, matmul):
        monkeypatch.setattr(module, "multiplies", lambda dtype: False)
    torch._dynamo.reset()
    torch.manual_seed(4)
    yield
    torch._dynamo.reset()


def gradients(fn: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and the gradients of its weighted sum."""
    y = fn(x)
    grads = torch.autograd.grad(
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), list(model.parameters())
    )
    return [y.detach(), *grads]


@pytest.mark.parametrize(
    "dtype, dynamic, without_tiles",
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float16, False, False),
        (torch.float16, True, True),
    ],
)
def test_contractions_are_made_in_float32(
    slow: None, dtype: torch.dtype, dynamic: bool, without_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_tiles:
        monkeypatch.setattr(gemm, "available", lambda dtype: False)
    model, x = Block().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    double = copy.deepcopy(model).double()
    graphs: list[Compiled] = []
    with observe(graphs.append):
        got = gradients(torch.compile(model, backend="dicp_cpu", dynamic=dynamic), model, x)
    eager, exact = gradients(model, model, x), gradients(double, double, x.double())
    for mine, theirs, reference in zip(got, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        unit = torch.finfo(dtype).eps * reference.abs().max()
        assert (mine.double() - reference).abs().max() <= 2 * (theirs.double() - reference).abs().max() + unit
    calls = [c for g in graphs for c in g.program.library_calls]
    low = [c.claim.name for c in calls if any(b is not None and b.dtype == dtype for b in c.outputs)]
    # ATen's kernels widen tiles of bfloat16 themselves, as ours do
    wide = {"attention: flash"} if dtype == torch.bfloat16 else set()
    assert {name for name in low if not name.endswith(": tiles")} == wide
    assert len(low) == (len(wide) if without_tiles else 9 + len(wide))
    assert len(calls) >= 12


def test_eager_numerics_call_what_eager_calls(slow: None) -> None:
    x, w = (torch.randn(64, 64).bfloat16() for _ in range(2))
    compiled = torch.compile(torch.mm, backend="dicp_cpu", options={"numerics": "eager"})
    assert torch.equal(compiled(x, w), x @ w)


def test_few_rows_are_read_as_stored(slow: None) -> None:
    x, w = torch.randn(2, 512).bfloat16(), torch.randn(512, 512).bfloat16()
    graphs: list[Compiled] = []
    with observe(graphs.append):
        torch.compile(F.linear, backend="dicp_cpu")(x, w)
    assert [c.claim.name for c in graphs[0].program.library_calls] == ["linear: few rows"]


def test_programs_are_kept_apart_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    from dicp.config import Config

    texts = set()
    for has in (True, False):
        monkeypatch.setattr(common, "multiplies", lambda dtype, has=has: has)
        texts.add(vendor.fingerprint(Config.make()))
    assert len(texts) == 2
