"""Eight-bit floats in Triton (what they are in kernels of every vendor: test_eight_bit_floats.py): kernels that
convert compile for every GPU, and results have memory of their own."""

from __future__ import annotations

from typing import Any

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


def test_kernels_compile_for_every_gpu(cuda_cache: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t().to(KINDS[0]).to(torch.float32) + x.to(KINDS[1]).to(torch.float32).t()

    x = torch.randn(5, 7)
    got, program = compiled(fn, cuda_cache, x)
    torch.testing.assert_close(got, fn(x), rtol=0, atol=0)
    assert not program.externs
    sources = list(emit_all(program, Config.make()).values())
    assert any("d.to_e4m3(" in s.text and "d.from_e5m2(" in s.text for s in sources)
    assert compile_everywhere(sources, Config.make(options={"cache_dir": cuda_cache})) == 3 * len(sources) >= 3


def test_results_have_memory_of_their_own(cuda_cache: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.softmax(-1) @ x.t()
        return wide.to(KINDS[0]), (x + 1).to(KINDS[1]), wide.sum()

    got, _ = compiled(fn, cuda_cache, torch.randn(16, 16))  # type: ignore[misc]
    sizes = [t.untyped_storage().nbytes() for t in got]
    assert sizes == [256, 256, 4] and len({t.untyped_storage().data_ptr() for t in got}) == 3
