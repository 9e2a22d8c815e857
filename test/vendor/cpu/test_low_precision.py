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
from dicp.runtime import cpu
from dicp.vendor.cpu_graph import claims, microkernels, vendor
from dicp.vendor.cpu_graph.claims import attention, common, gemm, matmul


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
    for module in (common, claims, matmul, attention):
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
        for module in (gemm, attention):
            monkeypatch.setattr(module, "available", lambda dtype: False)
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
    if without_tiles:  # ATen's kernels of attention widen tiles of bfloat16 themselves
        assert low == ["attention: flash"] * (dtype == torch.bfloat16)
    else:
        assert {name.split(": ")[1] for name in low} == {"tiles"} and len(low) == 10
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


@pytest.mark.parametrize(
    "maker, flags, slow",
    [("intel", {"avx512_bf16"}, True), ("intel", {"avx512_bf16", "amx_bf16"}, False), ("amd", {"avx512_bf16"}, False)],
)
def test_pairs_are_not_used_where_they_are_slow(
    maker: str, flags: set[str], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_maker", lambda: maker)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: flags)
    assert cpu.pairs_are_slow() is slow
    if slow:
        assert not common.multiplies.__wrapped__(torch.bfloat16)
        assert torch.bfloat16 not in microkernels._available.__wrapped__()


@pytest.mark.parametrize(
    "maker, flags, slow",
    [
        ("intel", {"avx512_fp16", "amx_bf16"}, True),
        ("intel", {"avx512_fp16", "amx_fp16"}, False),
        ("amd", {"avx512_fp16"}, False),
    ],
)
def test_nor_is_float16(maker: str, flags: set[str], slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_maker", lambda: maker)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: flags)
    assert cpu.halves_are_slow() is slow
    assert not (slow and common.multiplies.__wrapped__(torch.float16))


def images(*shape: int) -> Tensor:
    """Channels-last, whose rows are positions as they lie."""
    return torch.randn(shape).bfloat16().to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make, shape, dynamic, tiled",
    [
        (lambda: nn.Conv2d(16, 24, 1), (2, 16, 9, 11), False, 3),
        (lambda: nn.Conv2d(16, 24, 1), (2, 16, 9, 11), True, 3),
        (lambda: nn.Conv2d(3, 24, 4, stride=4), (2, 3, 16, 24), False, 2),  # patches
        (lambda: nn.Conv2d(3, 24, 4, stride=4), (2, 3, 16, 24), True, 0),  # how many, nobody knows
        (lambda: nn.Conv2d(8, 24, 3, padding=1), (2, 8, 17, 19), False, 0),
    ],
)
def test_convolutions_that_are_products_read_what_is_stored(
    slow: None, make: Any, shape: tuple[int, ...], dynamic: bool, tiled: int
) -> None:
    model, x = make().bfloat16(), images(*shape)
    graphs: list[Compiled] = []
    results = []
    for precise in (False, False, True):
        fn = copy.deepcopy(model).double() if precise else copy.deepcopy(model)
        given = x.to(fn.weight.dtype).requires_grad_(tiled == 3)
        call = fn if len(results) else torch.compile(fn, backend="dicp_cpu", dynamic=dynamic)
        with observe(graphs.append):
            y = call(given)
            grads = torch.autograd.grad(y.square().sum(), [*[given] * (tiled == 3), *fn.parameters()])
        results.append([y, *grads])
    for mine, theirs, exact in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        unit = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max() + unit
    assert results[0][0].stride() == results[1][0].stride()
    calls = [c for g in graphs for c in g.program.library_calls]
    assert sum(c.claim.name.endswith(": tiles") for c in calls) == tiled
    wide = [c for c in calls if any(v.buffer.dtype == torch.float32 for v in c.args if hasattr(v, "buffer"))]
    assert bool(wide) == (tiled == 0)
