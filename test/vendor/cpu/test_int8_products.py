"""Products of int8, as dynamic quantization makes them: bit for bit ATen's, by products of float32 where the processor
has no instruction for them."""

from __future__ import annotations

import pytest
import torch
from bridge.checks import check

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph import claims


@pytest.fixture(params=[False, True], ids=["float32", "instruction"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor seems to have one."""
    torch._dynamo.reset()
    monkeypatch.setattr(claims, "multiplies_int8", lambda: request.param)
    return request.param


def numbers(*shape: int) -> torch.Tensor:
    """All of int8, and a first row of the least, whose products are the largest."""
    x = torch.randint(-128, 128, shape, dtype=torch.int8)
    x[0] = -128
    return x


@pytest.mark.parametrize("depth", [1, 17, 1024, 1025, 2500])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_sums_are_exact(rows: int, depth: int, native: bool) -> None:
    a, by_rows, by_columns = numbers(rows, depth), numbers(24, depth), numbers(24, depth).t().contiguous()
    compiled = torch.compile(lambda a, b, c: (torch._int_mm(a, b.t()), torch._int_mm(a, c)), backend="dicp_cpu")
    seen: list[Compiled] = []
    with observe(seen.append):
        got = compiled(a, by_rows, by_columns)
    # not beside eager: of depth 1, torch reads beyond such operands where the processor has instructions for int8
    for y, w in zip(got, (by_rows.t(), by_columns)):
        assert torch.equal(y, (a.long() @ w.long()).int())
    (graph,) = seen
    assert ("_int_mm" in {str(c.node.target._opname) for c in graph.program.library_calls}) == native


def test_rows_that_vary(native: bool) -> None:
    w = numbers(32, 1500)
    compiled = torch.compile(lambda a, w: torch._int_mm(a, w.t()), backend="dicp_cpu", dynamic=True)
    for rows in (3, 9, 64):
        a = numbers(rows, 1500)
        assert torch.equal(compiled(a, w), torch._int_mm(a, w.t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 33])
def test_a_layer_that_quantizes_what_it_is_given(rows: int, dtype: torch.dtype, native: bool) -> None:
    """A scale for each row of x; the weight's scales are of rows, too."""

    def layer(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        by = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-7) / 127.5
        q = (x.float() / by).round().clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, w.t()).float() * by * scale).to(x.dtype) + bias

    x, w = torch.randn(rows, 1100, dtype=dtype), numbers(48, 1100)
    check(layer, x, w, torch.rand(48) / 100, torch.randn(48, dtype=dtype))


def test_the_processor_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from dicp.vendor.cpu_graph.claims import common

    for flags, found in (({"avx2"}, False), ({"avx512f"}, False), ({"avx512_vnni"}, True), ({"amx_int8"}, True)):
        monkeypatch.setattr(common, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert common.multiplies_int8() == found
        assert claims.keeps(torch.ops.aten._int_mm.default) == found
