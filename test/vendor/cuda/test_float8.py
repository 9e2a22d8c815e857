"""Eight-bit floats: every conversion gives eager's numbers, and is no extern call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels import compile_everywhere

from dicp import compiler
from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.vendor.cuda_graph.assemble import emit_all

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def compiled(fn: Any, cache: str, *args: torch.Tensor) -> tuple[torch.Tensor, Any]:
    seen: list[Any] = []
    with compiler.observe(seen.append):
        options = {"interpret": True, "cache_dir": cache}
        out = torch.compile(fn, backend=dicp_cuda, options=options, fullgraph=True)(*args)
    return out, seen[0].program


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_eight_bits(kind: torch.dtype, wide: torch.dtype, cuda_cache: str) -> None:
    x = torch.arange(256).to(torch.uint8).view(kind)
    got, program = compiled(lambda x: x.to(wide), cuda_cache, x)
    assert not program.externs
    torch.testing.assert_close(got, x.to(wide), rtol=0, atol=0, equal_nan=True)
    number = ~got.isnan()
    assert torch.equal(got.signbit()[number], x.to(wide).signbit()[number])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_rounding_and_overflow(kind: torch.dtype, wide: torch.dtype, cuda_cache: str) -> None:
    """All magnitudes of bfloat16, whose ties and overflows are among them; and what lies between."""
    bits = torch.arange(-(1 << 15), 1 << 15, 7).to(torch.int16)
    x = bits.view(torch.bfloat16).to(wide)
    x = torch.cat([x, x * (1 + 2**-12), torch.tensor([464.0, 465, 448, 480, 61440, 57344, 65536, 2**-17, -0.0]).to(wide)])
    got, program = compiled(lambda x: x.to(kind), cuda_cache, x)
    assert not program.externs
    want = x.to(kind).view(torch.uint8)
    same = (got.view(torch.uint8) == want) | (got.float().isnan() & x.to(kind).float().isnan())
    assert same.all(), x[~same][:8]


def test_they_go_together_with_kernels_and_compile_for_every_gpu(cuda_cache: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t().to(KINDS[0]).to(torch.float32) + x.to(KINDS[1]).to(torch.float32).t()

    x = torch.randn(5, 7)
    got, program = compiled(fn, cuda_cache, x)
    torch.testing.assert_close(got, fn(x), rtol=0, atol=0)
    sources = [s for s in emit_all(program, Config.make()).values() if s.name.startswith("convert")]
    assert compile_everywhere(sources, Config.make(options={"cache_dir": cuda_cache})) == 3 * len(sources) >= 6


def test_results_have_memory_of_their_own(cuda_cache: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.softmax(-1) @ x.t()
        return wide.to(KINDS[0]), (x + 1).to(KINDS[1]), wide.sum()

    got, _ = compiled(fn, cuda_cache, torch.randn(16, 16))  # type: ignore[misc]
    sizes = [t.untyped_storage().nbytes() for t in got]
    assert sizes == [256, 256, 4] and len({t.untyped_storage().data_ptr() for t in got}) == 3
