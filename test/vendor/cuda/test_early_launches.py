"""Kernels that are launched while the one before runs: they wait before they touch memory, all but weights."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import TARGETS, load, pointwise
from test_products import product

from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.ir import index as ix
from dicp.ir.index import Var
from dicp.vendor.cuda_graph import codegen, launch
from dicp.vendor.cuda_graph.assemble import DeviceRunner, emit_all
from dicp.vendor.cuda_graph.templates.product import Tiling, kernels

SM80, SM90, _ = TARGETS
MEMORY = re.compile(r"griddepcontrol\.\w+|(?:ld|st|red|atom)\.global|cp\.async\.\w+|tensormap")


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache})


def order(source: Any, config: Config, target: Any = SM90) -> list[str]:
    """What a kernel's PTX does of these, in order."""
    compiled = launch.compile_for(source, launch.load(source, config), target)
    return MEMORY.findall(compiled.asm["ptx"])


def scaled(n: int) -> Any:
    return codegen.emit(pointwise(load("x", ix.of(Var("i", n))) * 3.0, n, {"x": torch.float32}))


def test_a_kernel_waits_before_it_touches_memory(config: Config) -> None:
    found = order(scaled(5000), config)
    assert found[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] and "ld.global" in found
    assert not any("griddep" in word for word in order(scaled(5000), config, SM80))


def test_many_programs_do_not(config: Config) -> None:
    size = launch.EARLY_PROGRAMS * 1024
    for n, waits in ((size, True), (size + 1, False)):
        assert launch.waits_itself(scaled(n), SM90) == waits
        assert ("griddepcontrol.wait" in order(scaled(n), config)) == waits


def test_a_kernel_of_varying_sizes_does_not(config: Config) -> None:
    n = Var("n", None, 1)
    kernel = pointwise(load("x", ix.of(Var("i", ix.of(n)))) * 3.0, ix.of(n), {"x": torch.float32})  # type: ignore[arg-type]
    source = codegen.emit(replace(kernel, sizes=(n,)))
    assert not launch.waits_itself(source, SM90)


def test_a_product_of_few_rows_reads_weights_first(config: Config) -> None:
    p, _, _ = product(2, 64, 256, torch.bfloat16, "none", bias=False, other=False)
    (made,) = kernels(p, Tiling("rows", 2, 4, 64), ())
    assert made.ahead == (1,) and made.operands[1] is p.b.view
    found = order(made.template, config)
    wait = found.index("griddepcontrol.wait")
    assert 0 < wait and set(found[:wait]) == {"ld.global"} and "ld.global" in found[wait:]
    (made,) = kernels(p, Tiling("tile", 16, 64, 64), ())
    assert made.ahead == () and order(made.template, config)[0] == "griddepcontrol.wait"


# -- when they may be read -----------------------------------------------------------------------------------


def launches(fn: Any, *inputs: torch.Tensor, cache: str) -> list[str]:
    """The first arguments of each launch, by what it launches, as a GPU's program has them."""
    seen: list[Compiled] = []
    options = {"interpret": True, "cache_dir": cache}
    torch._dynamo.reset()
    with observe(seen.append), torch.no_grad():
        torch.compile(fn, backend=dicp_cuda, options=options, fullgraph=True)(*inputs)
    program, config = seen[0].program, Config.make(options={"cache_dir": cache})
    sources = emit_all(program, config)
    runner = DeviceRunner(program, sources, dict.fromkeys(sources), config)
    runner.function()
    found = re.findall(r"(\w+)_(?:[0-9a-f]{8}){1,2}\(index, stream, ([^,]+),", runner.source)
    return [f"{name} {how}" for name, how in found]


def row_and_weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 256), torch.randn(64, 256), torch.randn(256, 64)


def test_the_first_kernel_of_a_program_reads_nothing_early(cuda_cache: str) -> None:
    """Weights may just have been written by what came before the program."""
    x, a, b = row_and_weights()
    found = launches(lambda x, a, b: F.linear(F.linear(x, a), b), x, a, b, cache=cuda_cache)
    assert found == ["linear (False) + 2", "linear False"]
    found = launches(lambda x, a, b: F.linear(x.cos(), a), x, a, b, cache=cuda_cache)
    assert found == ["cos False", "linear False"]


def test_a_kernel_without_programs_is_none_before(cuda_cache: str) -> None:
    x, a, _ = row_and_weights()
    found = launches(lambda x, a, e: (e.cos().sort(0)[0], F.linear(x, a)), x, a, torch.zeros(0, 5), cache=cuda_cache)
    assert found[-1] == "linear (False) + 2"


def test_weights_that_the_program_makes_are_not_read_early(cuda_cache: str) -> None:
    x, a, b = row_and_weights()
    found = launches(lambda x, a, b: F.linear(x.cos(), a.softmax(1)), x, a, b, cache=cuda_cache)
    assert found[-1] == "linear (False) + 2"


def test_weights_that_the_program_writes_are_not_read_early(cuda_cache: str) -> None:
    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.cos(), a)
        a.mul_(0.5)
        return y

    assert launches(step, *row_and_weights(), cache=cuda_cache)[1] == "linear (False) + 2"
