"""Products of few rows: against float64, under the rule of all tests (no further from it than twice eager), over
rows, sizes, layouts and what follows the product; and which products the template serves."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import products
import pytest
import torch
import torch.nn.functional as F
from products import ACTIVATIONS, Fn

from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.ops.library import NARROW_WEIGHTS
from dicp.vendor.cpu_graph.claims import candidates, gemv, matmul
from dicp.vendor.cpu_graph.claims.common import multiplies
from dicp.vendor.cpu_graph.toolchain import cpu_flags

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
check = functools.partial(products.check, claim="few rows")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_rows_and_tails(rows: int, dtype: torch.dtype) -> None:
    """Depths and columns that are no multiple of a vector, of a unit or of a thread's share."""
    x, w = torch.randn(rows, 301, dtype=dtype), torch.randn(517, 301, dtype=dtype)
    check(lambda x, w: F.linear(x, w), x, w)


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="of bf16 up to 8 rows there")
def test_more_rows_of_bf16() -> None:
    x, w = torch.randn(13, 301, dtype=torch.bfloat16), torch.randn(517, 301, dtype=torch.bfloat16)
    check(lambda x, w: F.linear(x, w), x, w)
    torch._dynamo.reset()
    library = "BLAS" if multiplies(torch.bfloat16) else "tiles"
    check(lambda x, w: x[:5] @ w.view(301, 517), x, w, claim=library)


@pytest.mark.parametrize("rows", [9, 23, 37, 64])
def test_more_rows_on_intel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of five and less, sums of all of them at once."""
    monkeypatch.setattr(gemv, "cpu_maker", lambda: "intel")
    monkeypatch.setattr(gemv, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    x, w, b = torch.randn(rows, 301), torch.randn(517, 301), torch.randn(517)
    check(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    torch._dynamo.reset()
    check(lambda x, w, b: torch.addmm(b, x, w), x, w.t().contiguous(), b)


def test_more_rows_on_intel_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "cpu_maker", lambda: "intel")
    monkeypatch.setattr(gemv, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    x, w, seen = torch.randn(100, 301), torch.randn(517, 301), list[Compiled]()
    varying = torch.compile(lambda x, w: F.silu(F.linear(x, w)), backend="dicp_cpu", dynamic=True)
    for rows in (37, 3, 64, 65, 23, 100):
        with observe(seen.append):
            got = varying(x[:rows], w)
        exact = F.silu(F.linear(x[:rows].double(), w.double()))
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    (program,) = (one.program for one in seen)
    assert "<= 64" in next(text for name, text in program.sources.items() if "segments" in name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_weights_by_columns(rows: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, 259, dtype=dtype), torch.randn(259, 1037, dtype=dtype)
    b = torch.randn(1037, dtype=dtype)
    check(lambda x, w, b: torch.addmm(b, x, w), x, w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 100_003), (200_003, 2), (5, 70_000), (5000, 33)])
def test_long_and_thin(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    columns, depth = sizes
    x, w = torch.randn(2, depth, dtype=dtype), torch.randn(columns, depth, dtype=dtype)
    check(lambda x, w: x @ w.t(), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_bias_activation_and_residual(act: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(1, 3, 257, dtype=dtype), torch.randn(521, 257, dtype=dtype) / 16
    b, r = torch.randn(521, dtype=dtype), torch.randn(1, 3, 521, dtype=dtype)
    check(lambda x, w, b, r: r + ACTIVATIONS[act](F.linear(x, w, b)), x, w, b, r)


def test_relu_is_given_to_nothing_that_loses_nan() -> None:
    x, w, graphs = torch.randn(2, 512), torch.randn(512, 512), []  # type: ignore[var-annotated]
    x[1, 7] = float("nan")
    with observe(graphs.append):
        got = torch.compile(lambda x, w: F.relu(F.linear(x, w)), backend="dicp_cpu")(x, w)
    assert got[1].isnan().all() and not got[0].isnan().any()
    (call,) = graphs[0].program.library_calls
    assert "linear: oneDNN" not in [c.name for c in candidates(call.node, Config.make())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches(dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 2, 67, dtype=dtype), torch.randn(6, 67, 331, dtype=dtype)
    check(torch.bmm, x, w)
    torch._dynamo.reset()
    turned = torch.randn(6, 331, 67, dtype=dtype)
    check(lambda x, w: torch.bmm(x, w.transpose(1, 2)), x, turned)


def test_operands_may_lie_anywhere() -> None:
    x, w = torch.randn(301, 6).t()[::2], torch.randn(517, 640)
    check(lambda x, w: x @ w[:, 10:311].t(), x, w)
    torch._dynamo.reset()
    check(lambda x, w: x[:, 1::2] @ w[:, 1:301:2].t(), x, w)
    torch._dynamo.reset()
    check(lambda x, w: x[1].expand(3, 301) @ w[0:1, :301].expand(517, 301).t(), x, w)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_instruction_sets(dtype: torch.dtype, isa: str) -> None:
    x, w, v = (torch.randn(*sizes, dtype=dtype) for sizes in ((3, 301), (517, 301), (301, 523)))
    check(lambda x, w: F.silu(x @ w.t()), x, w, isa=isa)
    torch._dynamo.reset()
    check(lambda x, v: x @ v, x, v, isa=isa)


VARYING: dict[str, Fn] = {  # x: [M, K], w: [N, K]
    "linear": lambda x, w: F.linear(x, w),
    "linear, residual": lambda x, w: F.silu(F.linear(x, w, w[:, 0])) + x[:, :1],
    "weights by columns": lambda x, w: x @ w.reshape(w.shape[1], -1),
    "batches": lambda x, w: torch.bmm(x.expand(2, -1, -1), torch.stack([w, -w]).mT),
    "int8 weights": lambda x, w: F.linear(x, w.mul(16).to(torch.int8).to(x.dtype)) * w[:, 0],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", VARYING)
def test_rows_that_vary(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows gives the bits of a compile for it alone: few by the template, many by the library; but
    for SiLU and a bias, where the library of many has none, or is slow with it: then a kernel computes them for
    all, and adds the bias to a sum that is rounded."""
    monkeypatch.setattr(matmul, "_reads_as_stored", lambda node: False)  # tiles serve some rows, if alone
    monkeypatch.setattr(gemv, "FEW_ROWS_OF_INTEL", 0)  # and so does the template
    monkeypatch.setattr(gemv, "FEW_ROWS_OF_SLOW_PAIRS", 0)
    w = torch.randn(1032, 301, dtype=dtype) / 4
    varying = torch.compile(VARYING[form], backend="dicp_cpu", dynamic=True)
    seen: list[Compiled] = []
    sizes = (3, 40, 8, 17, 4)
    if form == "int8 weights" and dtype == torch.bfloat16 and multiplies(dtype):
        sizes = (3, 8, 4)  # alone, oneDNN is given a copy in bf16 of weights that meet more rows
    for rows in sizes:
        x = torch.randn(rows, 301, dtype=dtype)
        with observe(seen.append):
            got = varying(x, w)
        alone = torch.compile(lambda x, w: VARYING[form](x, w), backend="dicp_cpu", dynamic=False)
        (call,) = seen[0].program.library_calls
        apart = form == "linear, residual" and call.claim.name.startswith(("addmm", "mm"))
        near = 2 * torch.finfo(dtype).eps if apart else 0
        torch.testing.assert_close(got, alone(x, w), rtol=0, atol=near * got.abs().max().item())
    assert ": few rows, or " in call.claim.name and len(seen) == 1


def test_nan_and_infinity_spread_as_in_eager() -> None:
    x, w = torch.randn(2, 300), torch.randn(512, 300)
    w[5, 7], w[8, 9], x[1, 299] = float("nan"), float("inf"), float("-inf")
    got = torch.compile(lambda x, w: x @ w.t(), backend="dicp_cpu")(x, w)
    torch.testing.assert_close(got, x @ w.t(), equal_nan=True)


def test_what_stays_with_a_library() -> None:
    small, many = torch.randn(2, 16), torch.randn(70, 300)
    for x, options in ((small, {}), (many, {}), (many[:2].clone(), {"numerics": "eager"})):
        w = torch.randn(512, x.shape[1])
        torch._dynamo.reset()
        seen: list[Compiled] = []
        with observe(seen.append):
            torch.compile(lambda x, w: x @ w.t(), backend="dicp_cpu", options=options)(x, w)
        (call,) = (c for s in seen for c in s.program.library_calls)
        assert not call.claim.name.endswith("few rows")


def pack(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch._weight_int8pack_mm(x, w, s) if x.dtype != torch.float64 else F.linear(x, w.double()) * s


NARROW: dict[str, Fn] = {  # x: [M, K], w: of eight bits, [N, K], s: [N]
    "scaled after": lambda x, w, s, b: F.linear(x, w.to(x.dtype)) * s,
    "scaled after, bias": lambda x, w, s, b: F.silu(F.linear(x, w.to(x.dtype)) * s + b),
    "scaled before": lambda x, w, s, b: F.linear(x, w.to(x.dtype) * s[:, None], b),
    "scaled in float32": lambda x, w, s, b: F.linear(x, (w.to(s.dtype) * s.unsqueeze(1)).to(x.dtype)),
    "turned": lambda x, w, s, b: torch.mm(x, w.t().to(x.dtype)) * s,
    "one scale": lambda x, w, s, b: F.linear(x, 0.01 * w.to(x.dtype)) + x.sum(-1, keepdim=True),
    "a scale for all": lambda x, w, s, b: F.linear(x, w.to(x.dtype)) * s[3],
    "not scaled": lambda x, w, s, b: F.linear(x, w.to(x.dtype), b),
    "ATen's op": lambda x, w, s, b: pack(x, w, s),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("stored", NARROW_WEIGHTS)
def test_narrow_weights(stored: torch.dtype, form: str, rows: int, dtype: torch.dtype) -> None:
    """However a model writes it, the weight is read as it is stored."""
    if form == "ATen's op" and stored != torch.int8:
        pytest.skip("it is of int8 alone")
    x, w = torch.randn(rows, 320, dtype=dtype), torch.randint(-128, 128, (96, 320)).to(stored)
    check(NARROW[form], x, w, torch.rand(96, dtype=dtype) / 64, torch.randn(96, dtype=dtype))


@pytest.mark.parametrize("stored", NARROW_WEIGHTS)
def test_narrow_weights_by_columns(stored: torch.dtype) -> None:
    x, w = torch.randn(2, 131), torch.randint(-128, 128, (131, 259)).to(stored)
    s = torch.rand(259) / 64
    check(lambda x, w, s: x @ (w.to(x.dtype) * s), x, w, s)
    torch._dynamo.reset()
    of_rows = lambda x, w, s: x @ (w.to(x.dtype) * s[:131, None])  # noqa: E731 (as the other)
    check(of_rows, x, w, s, claim=("oneDNN", "BLAS"))


def test_an_infinite_weight_in_a_row_behind_the_last_four() -> None:
    """Rows that are not there were 0 times the first of theirs: NaN where that is infinite."""
    w, x = torch.randn(513, 1024), torch.rand(1, 513) + 0.1
    w[512, 5] = float("inf")
    got = torch.compile(lambda x, w: x @ w, backend="dicp_cpu")(x, w)
    torch.testing.assert_close(got, x @ w, rtol=1e-4, atol=1e-4)
    q, k, v = (torch.randn(1, 2, n, 64) for n in (1, 4097, 4097))
    v[..., 4096, 3] = float("inf")
    attend = F.scaled_dot_product_attention
    torch.testing.assert_close(torch.compile(attend, backend="dicp_cpu")(q, k, v), attend(q, k, v), rtol=1e-4, atol=1e-4)
