"""Products of groups as a template: each axis that groups may lie along, interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from kernels import compile_everywhere
from templates import run, view

from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.index import Var
from dicp.vendor.cuda_graph.templates import Operand
from dicp.vendor.cuda_graph.templates.grouped import Axis, Grouped, kernels
from dicp.vendor.cuda_graph.templates.product import Tiling

TILING = Tiling("tile", 16, 16, 32)
ENDS = {
    "even": [32, 64, 96],
    "uneven": [5, 70, 96],
    "empty ones": [0, 0, 50, 50, 96],
    "rest behind the last": [33, 40],
    "one": [96],
}
AXES: tuple[Axis, ...] = ("m", "n", "k")


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache, "interpret": True})


def problem(
    axis: Axis, ends: list[int], dtype: torch.dtype, symbolic: bool = False
) -> tuple[Grouped, dict[str, torch.Tensor], torch.Tensor]:
    """96 elements along the grouped axis; what is expected in float64, NaN where nothing is to be written."""
    sizes = {"m": 24, "n": 40, "k": 72, axis: 96}
    m, n, k, groups = sizes["m"], sizes["n"], sizes["k"], len(ends)
    a = torch.randn(groups, m, k).to(dtype) if axis == "n" else torch.randn(k, m).t().to(dtype)
    b = torch.randn(groups, n, k).mT.to(dtype) if axis == "m" else torch.randn(k, n).to(dtype)
    shape = (groups, m, n) if axis == "k" else (m, n)
    out = torch.full(shape, float("nan")).to(dtype)
    want = torch.full(shape, float("nan"), dtype=torch.float64)
    x, y = a.double(), b.double()
    for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if axis == "m":
            want[begin:end] = x[begin:end] @ y[g]
        elif axis == "n":
            want[:, begin:end] = x[g] @ y[:, begin:end]
        else:
            want[g] = x[:, begin:end] @ y[begin:end]
    tensors = {"a": a, "b": b, "out": out, "offsets": torch.tensor(ends, dtype=torch.int32)}
    rows = ix.of(Var("s0", None, 1)) if symbolic else m
    given = {
        name: Operand(
            name,
            view(name, t, rows if symbolic and name in ("a", "out") else None),
            t.stride() if t.dim() != 2 else (0, *t.stride()),
        )
        for name, t in tensors.items()
    }
    return Grouped("test", groups, rows, n, k, axis=axis, **given), tensors, want


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("axis", AXES)
def test_groups_of_every_size(axis: Axis, ends: str, config: Config) -> None:
    made, tensors, want = problem(axis, ENDS[ends], torch.float32)
    run(kernels(made, TILING, ()), tensors, config)
    torch.testing.assert_close(tensors["out"].double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("axis", AXES)
def test_low_precision_and_64_bit_positions(axis: Axis, config: Config) -> None:
    made, tensors, want = problem(axis, ENDS["uneven"], torch.bfloat16)
    run(kernels(made, TILING, ()), tensors, config, wide=True)
    torch.testing.assert_close(tensors["out"].double(), want, rtol=2e-2, atol=0.1)


def test_rows_that_vary(config: Config) -> None:
    made, tensors, want = problem("m", ENDS["uneven"], torch.float32, symbolic=True)
    run(kernels(made, TILING, ()), tensors, config, sizes=(96,))
    torch.testing.assert_close(tensors["out"].double(), want, rtol=1e-5, atol=1e-4)


def test_offsets_beyond_the_end_write_nothing_there(config: Config) -> None:
    made, tensors, _ = problem("m", [40, 96], torch.float32)
    room = torch.full((120, tensors["out"].shape[1]), float("nan"))
    tensors |= {"out": room[:96], "offsets": torch.tensor([40, 120], dtype=torch.int32)}
    run(kernels(made, TILING, ()), tensors, config)
    assert room[96:].isnan().all() and not room[:96].isnan().any()


def test_they_compile_for_every_gpu(config: Config) -> None:
    made = [problem(axis, ENDS["uneven"], torch.bfloat16)[0] for axis in AXES]
    made.append(problem("m", ENDS["even"], torch.float16, symbolic=True)[0])
    sources = [one.template for p in made for one in kernels(p, Tiling("tile", 64, 64, 64), ())]
    assert compile_everywhere(sources, config) == 3 * len(sources)


def test_a_mixture_of_experts_and_its_gradients(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and both gradients are products of groups; without a GPU the template comes first."""
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    x = torch.randn(40, 16, dtype=torch.bfloat16)
    w = torch.randn(3, 16, 24, dtype=torch.bfloat16)
    ends = torch.tensor([7, 7, 40], dtype=torch.int32)

    def experts(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch._grouped_mm(x, w, ends))

    seen: list[Compiled] = []
    results = []
    for f in (torch.compile(experts, backend="dicp_cuda", fullgraph=True), experts):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with observe(seen.append):
            y = f(a, b, ends)
            y.backward(torch.ones_like(y))
        results.append((y, a.grad, b.grad))
    calls = [c.claim.name for s in seen for c in s.program.library_calls]
    assert len(calls) == 3 and all(name.startswith("_grouped_mm: Triton") for name in calls), calls
    torch.testing.assert_close(*results, rtol=2e-2, atol=0.1)
