"""Products by tiles: against float64, under the rule of all tests (no further from it than twice eager), over sizes
that are no multiple of a tile, layouts, dtypes and what follows the product; and which products they serve."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import products
import pytest
import torch
import torch.nn.functional as F
from products import ACTIVATIONS

from dicp.compiler import Compiled, observe
from dicp.ops.library import NARROW_WEIGHTS
from dicp.runtime.arena import Arena, Block
from dicp.vendor.cpu_graph.claims import gemv, matmul
from dicp.vendor.cpu_graph.claims.common import multiplies
from dicp.vendor.cpu_graph.claims.gemm import gemm
from dicp.vendor.cpu_graph.microkernels import available

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
check = functools.partial(products.check, claim="tiles")
pytestmark = pytest.mark.skipif(not available(torch.float32), reason="no micro-kernels for this processor")


@pytest.fixture(autouse=True)
def _preferred(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles before any library, on whatever processor the test runs."""
    if "chosen" not in request.keywords:
        monkeypatch.setattr(matmul, "prefers_tiles", lambda node: gemm("product", node) is not None)
        monkeypatch.setattr(gemv, "are_few", lambda rows, *_: rows <= gemv.FEW_ROWS)
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, depth, columns",
    [
        (17, 301, 517),
        (641, 140, 130),
        (128, 128, 128),
        (1100, 17, 33),
        (100, 700, 60),
        (150, 900, 513),
        (32, 128, 128),
        (139, 270, 1040),
        (147, 520, 24),
    ],
)
def test_sizes_and_tails(rows: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, depth, dtype=dtype), torch.randn(columns, depth, dtype=dtype)
    check(F.linear, x, w)


@torch.no_grad()
def test_one_unit_serves_no_activation_and_relu() -> None:
    first, second = torch.randn(96, 140), torch.randn(130, 96)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, first)), second)

    seen: list[Compiled] = []
    x = torch.randn(70, 140)
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu")(x)
    assert [name for name in seen[0].program.sources if "gemm" in name] == ["gemm_float_limited.cpp"]
    torch.testing.assert_close(got, fn(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_may_lie_anywhere(dtype: torch.dtype) -> None:
    x, w = torch.randn(301, 140, dtype=dtype), torch.randn(301, 517, dtype=dtype)
    for fn in (
        lambda x, w: x.t() @ w,
        lambda x, w: x.t()[3:99] @ w[:, 5:200],
        lambda x, w: x.t().contiguous() @ w.t().contiguous().t(),
        lambda x, w: x[:, ::2].t() @ w[:, ::3],
        lambda x, w: x[:1].expand(140, 140) @ w[2, :140].expand(9, 140).t(),
    ):
        torch._dynamo.reset()
        check(fn, x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_bias_activation_and_residual(act: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 13, 257, dtype=dtype), torch.randn(521, 257, dtype=dtype) / 16
    b, r = torch.randn(521, dtype=dtype), torch.randn(2, 13, 521, dtype=dtype)
    check(lambda x, w, b, r: r + ACTIVATIONS[act](F.linear(x, w, b)), x, w, b, r)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_of_columns(dtype: torch.dtype) -> None:
    """x by columns, slices: what is turned, and what is read as it lies."""
    x, w, b = (torch.randn(s, dtype=dtype) for s in ((600, 90), (400, 700), (350,)))
    for fn in (
        lambda x, w, b: F.linear(x.t()[:31], w[:350, :600], b),
        lambda x, w, b: F.relu(F.linear(x.t()[5:80, 7:560], w[::2, 3:556])),
        lambda x, w, b: F.linear(x.t().contiguous()[:, :600:3], w[50:, :200], b),
    ):
        torch._dynamo.reset()
        check(fn, x, w, b, claim=("tiles", "tiles of pairs"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_nothing(dtype: torch.dtype) -> None:
    """A depth that only the data tells may be 0: results were what memory held."""

    def fn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i = keep.nonzero().squeeze(1)
        return a[:, i] @ b[i], F.linear(a[:, i], b[i].t(), bias).relu()

    a, b, bias = (torch.randn(shape).to(dtype) for shape in ((150, 90), (90, 140), (140,)))
    seen: list[Compiled] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), observe(seen.append):
        run = torch.compile(fn, backend="dicp_cpu", fullgraph=True)
        for many in (90, 7, 0):
            keep = torch.arange(90) < many
            tolerance = dict(rtol=2e-2, atol=0.2) if dtype != torch.float32 else dict(rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(run(a, b, bias, keep), fn(a, b, bias, keep), **tolerance)
    names = [c.claim.name for s in seen for c in s.program.library_calls]
    assert [name for name in names if "tiles" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_without_elements(dtype: torch.dtype) -> None:
    """Of no batch, no columns, no rows, as the data tells: they divided by how many there are."""

    def fn(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i = keep.nonzero().squeeze(1)
        return torch.bmm(a[i], b[i]), a[0] @ w[:, i], w[i] @ w

    args = [torch.randn(shape).to(dtype) for shape in ((90, 150, 90), (90, 90, 140), (90, 90))]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(fn, backend="dicp_cpu", fullgraph=True)
        for many in (5, 0):
            keep = torch.arange(90) < many
            torch.testing.assert_close(run(*args, keep), fn(*args, keep), rtol=3e-2, atol=0.3)


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
@pytest.mark.parametrize("rows, depth, columns", [(17, 302, 517), (128, 2050, 600), (49, 1024, 1100), (33, 1026, 333)])
def test_pairs_of_few_rows(rows: int, depth: int, columns: int) -> None:
    x, w, b = (torch.randn(s).bfloat16() for s in ((2, rows, depth + 3), (columns, depth), (columns,)))
    r = torch.randn(rows, columns).bfloat16()
    calls = (
        lambda x, w, b, r: F.linear(x[0, :, :depth].contiguous(), w),
        lambda x, w, b, r: r + F.silu(F.linear(x[1, :, 1 : depth + 1], w, b)),  # rows apart by an odd number
    )
    for fn in calls:
        torch._dynamo.reset()
        check(fn, x, w, b, r, claim="tiles of pairs")


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
def test_pairs_of_weights_too_far_apart_are_not() -> None:
    """The micro-kernels step from one to the next by 32 bits of bytes, over 128 at a time."""
    far = torch.empty(160, 1 << 22, dtype=torch.bfloat16)[:, :1024]  # nothing is in memory but what is written
    far.copy_(torch.randn(far.shape))
    check(F.linear, torch.randn(17, 1024, dtype=torch.bfloat16), far, claim="BLAS")


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
def test_pairs_of_a_weight_that_a_kernel_writes() -> None:
    """In the order that the claim was made for, not row by row."""
    x, w, s = (torch.randn(shape).bfloat16() for shape in ((32, 512), (600, 512), (600,)))
    for fn, weight in (
        (lambda x, w, s: x @ (w.t() * s), w),
        (lambda x, w, s: x @ w.t().to(x.dtype), w.float()),
        (lambda x, w, s: F.linear(x, (w.t() + 1).t(), s), w),
        (lambda x, w, s: F.linear(x, w.t().contiguous().t(), s), w),
    ):
        torch._dynamo.reset()
        check(fn, x, weight, s, claim=("tiles of pairs", "BLAS", "oneDNN"))


def test_a_weight_that_a_kernel_writes_lies_as_it_is_read() -> None:
    """Not column by column, where the product takes it turned."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w - w.mean((1, 2, 3), True), b)

    seen: list[Compiled] = []
    x, w, b = torch.randn(1, 384, 14, 14), torch.randn(1536, 384, 1, 1), torch.randn(1536)
    x = x.contiguous(memory_format=torch.channels_last)
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu")(x, w, b)
    torch.testing.assert_close(got, fn(x, w, b), rtol=1e-4, atol=1e-4)
    (call,) = seen[0].program.library_calls
    (weight,) = (v for v in call.args if v is not None and sorted(v.shape) == [384, 1536])
    assert "tiles" in call.claim.name
    assert (weight.shape, weight.strides) in {((384, 1536), (1, 384)), ((1536, 384), (384, 1))}


@pytest.mark.chosen
@pytest.mark.parametrize(
    "fn, sizes",
    [
        (F.linear, ((129, 600), (600, 600))),  # many rows
        (F.linear, ((40, 601), (600, 601))),  # half a pair
        (torch.mm, ((40, 600), (600, 600))),  # a weight by rows of columns
    ],
)
def test_other_products_of_bf16_are_not_of_pairs(fn: Any, sizes: Any) -> None:
    assert "pairs" not in chosen(fn, *(torch.randn(s).bfloat16() for s in sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_and_what_is_added(dtype: torch.dtype) -> None:
    x, w, c = (torch.randn(3, *s, dtype=dtype) for s in ((140, 67), (67, 331), (140, 331)))
    check(torch.bmm, x, w)
    torch._dynamo.reset()
    check(lambda x, w: torch.bmm(x.mT.contiguous().mT, w.mT.contiguous().mT), x, w)
    torch._dynamo.reset()
    check(torch.baddbmm, c, x, w)
    torch._dynamo.reset()
    check(torch.addmm, c[0], x[0], w[0])
    torch._dynamo.reset()
    check(lambda c, x, w: torch.addmm(c, x, w, beta=0.5), c[0], x[0], w[0], claim="BLAS")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", NARROW_WEIGHTS)
@pytest.mark.parametrize("rows", [40, 300])
def test_narrow_weights_are_read_as_stored(
    rows: int, stored: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "multiplies", lambda dtype: False)
    x, w = torch.randn(rows, 200, dtype=dtype), torch.randint(-127, 128, (333, 200)).to(stored)
    s = torch.rand(333, dtype=dtype) / 64
    check(lambda x, w, s: F.silu(F.linear(x, w.to(x.dtype)) * s), x, w, s)


def test_sizes_that_vary_are_served_by_one_program() -> None:
    compiled, seen = torch.compile(lambda x, w: x @ w.t(), backend="dicp_cpu", dynamic=True), []
    with observe(seen.append):
        for rows, depth, columns in ((9, 33, 57), (700, 300, 140), (129, 17, 600)):
            x, w = torch.randn(rows, depth), torch.randn(columns, depth)
            torch.testing.assert_close(compiled(x, w), x @ w.t(), rtol=1e-5, atol=1e-4)
    (only,) = seen
    assert [c.claim.name for c in only.program.library_calls] == ["linear: few rows, or linear: tiles"]


@pytest.mark.parametrize("shape", [(40, 6000), (2, 20, 6000)])
def test_few_rows_have_the_workspace_that_they_need(shape: tuple[int, ...]) -> None:
    """Without it a product goes the way of many rows, and nothing but its time tells."""
    seen: list[Compiled] = []
    with observe(seen.append):
        torch.compile(F.linear, backend="dicp_cpu")(torch.randn(shape), torch.randn(300, 6000))
    (call,) = seen[0].program.library_calls
    assert call.outputs[-1].shape[0] >= 4 * 48 * 6000  # x, turned, its rows whole cache lines


def test_what_lies_in_the_workspace_is_not_multiplied() -> None:
    """Floats below the normal ones, where x has no rows: on Intel a product of them took 30 times as long."""
    x, w = torch.randn(33, 700), torch.randn(900, 700)
    compiled = torch.compile(F.linear, backend="dicp_cpu")
    want, took = compiled(x, w), Arena.take
    seen: list[Block] = []

    def take(self: Arena, nbytes: int) -> Block:
        seen.append(took(self, nbytes))
        seen[-1].tensor.fill_(0xFF)  # NaN, of which all sums are
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "take", take)
        torch.testing.assert_close(compiled(x, w), want, rtol=0, atol=0)
    (block,) = seen
    floats = block.window(0, (block.nbytes // 4,), (1,), torch.float32)
    x_turned = floats[: 700 * 48].view(700, 48)
    torch.testing.assert_close(x_turned[:, :33], x.t(), rtol=0, atol=0)
    assert not x_turned[:, 33:].any()


def test_rows_that_vary_go_both_ways() -> None:
    """The workspace is for any rows, and for any depth that is known."""
    w = torch.randn(257, 1300)
    compiled, seen = torch.compile(lambda x, w: x @ w.t(), backend="dicp_cpu"), []
    with observe(seen.append):
        for rows in (40, 41, 107, 108, 500):
            x = torch.randn(rows, 1300)
            torch.testing.assert_close(compiled(x, w), x @ w.t(), rtol=1e-5, atol=2e-4)
    assert len(seen) == 2


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_instruction_sets(dtype: torch.dtype, isa: str) -> None:
    x, w = torch.randn(43, 301, dtype=dtype), torch.randn(517, 301, dtype=dtype)
    check(lambda x, w: F.silu(x @ w.t()), x, w, isa=isa)


@pytest.mark.parametrize("rows", [30, 300])
def test_fewer_and_more_threads_than_when_compiled(rows: int) -> None:
    """A program as it is called where it was not compiled: Dynamo would compile again."""
    x, w, seen = torch.randn(rows, 200), torch.randn(300, 200).t(), []
    with observe(seen.append):
        first, threads = torch.compile(torch.mm, backend="dicp_cpu")(x, w), torch.get_num_threads()
    try:
        for n in (1, 3 * threads):
            torch.set_num_threads(n)
            (again,) = seen[0].call([x, w])
            assert torch.equal(again, first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [20, 200])
def test_nan_and_infinity_spread_as_in_eager(rows: int) -> None:
    x, w = torch.randn(rows, 300), torch.randn(512, 300)
    w[5, 7], w[8, 9], x[1, 299] = float("nan"), float("inf"), float("-inf")
    got = torch.compile(lambda x, w: F.relu(x @ w.t()), backend="dicp_cpu")(x, w)
    torch.testing.assert_close(got, F.relu(x @ w.t()), rtol=1e-5, atol=1e-4, equal_nan=True)


def test_a_sum_errs_less_than_one_of_the_whole_depth() -> None:
    """Sums of 128 products are rounded into memory: they err as eager's sums of as many do, where sums of 256
    err a third more and one of all more than twice as much."""
    x, w = torch.randn(64, 4096), torch.randn(4096, 64)
    exact = x.double() @ w.double()
    mine = torch.compile(torch.mm, backend="dicp_cpu")(x, w)
    parts = sum(a @ b for a, b in zip(x.split(128, 1), w.split(128), strict=True))
    assert (mine - exact).norm() <= 1.1 * (parts - exact).norm()


@pytest.mark.chosen
@pytest.mark.parametrize(
    "maker, flags, by_rows, turned, batches",
    [
        ("amd", {"avx2", "fma"}, "mm: tiles", "mm: tiles", "bmm: tiles"),
        ("amd", {"avx2", "fma", "avx512f"}, "mm: tiles", "mm: tiles", "bmm: tiles"),
        ("intel", {"avx2", "fma"}, "mm: BLAS", "mm: BLAS", "bmm: BLAS"),
        ("intel", {"avx2", "fma", "avx512f"}, "mm: BLAS", "mm: BLAS", "bmm: BLAS"),
    ],
)
def test_which_products_they_serve(
    maker: str, flags: set[str], by_rows: str, turned: str, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "cpu_maker", lambda: maker)
    monkeypatch.setattr(matmul, "cpu_flags", lambda: flags)
    x, w = torch.randn(300, 300), torch.randn(300, 300)
    assert chosen(torch.mm, x, w) == by_rows
    assert chosen(lambda x, w: x.t() @ w, x, w) == turned
    assert chosen(torch.bmm, x.expand(2, 300, 300), w.expand(2, 300, 300)) == batches
    assert chosen(torch.mm, x[:20, :20], w[:20, :20]) != "mm: tiles"  # not worth a unit's compile
    deep = torch.randn(1100, 300)
    assert chosen(torch.mm, deep.t().contiguous(), deep) == ("mm: tiles" if maker == "amd" else "mm: BLAS")
    assert chosen(torch.mm, deep[:, :9].t().contiguous(), deep[:, :9]) == "mm: BLAS"


@pytest.mark.chosen
@pytest.mark.parametrize("rows, claim", [(64, "tiles"), (65, "oneDNN"), (129, "oneDNN")])
def test_many_rows_are_onednns_where_mkl_is_slow(
    rows: int, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights by rows, up to a depth, and a result for which memory is not mapped anew."""
    for module in (matmul, gemv):
        monkeypatch.setattr(module, "cpu_maker", lambda: "amd")
        monkeypatch.setattr(module, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    x, w = torch.randn(rows, 600), torch.randn(300, 600)
    assert chosen(F.linear, x, w) == f"linear: {claim}"
    assert chosen(lambda x, w: F.relu(F.linear(x, w)), x, w) == "linear: tiles"  # whose ReLU keeps NaN
    assert chosen(torch.mm, x, w.t().contiguous()) == "mm: tiles"
    size = "LARGE_RESULT" if rows > 128 else "EVEN_RESULT"
    monkeypatch.setattr(matmul, size, rows * 300 * 4)
    assert chosen(F.linear, x, w) == "linear: tiles"


@pytest.mark.chosen
@pytest.mark.parametrize("saved, claim", [(200 * 300 * 4, "tiles"), (200 * 300 * 4 + 1, "oneDNN")])
def test_large_results_that_a_forward_saves_are_written_where_they_are_kept(
    saved: int, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those of the same size that nothing saves, as the product behind it."""
    monkeypatch.setattr(matmul, "cpu_maker", lambda: "amd")
    monkeypatch.setattr(matmul, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    monkeypatch.setattr(matmul, "SAVED_RESULT", saved)
    x, w, v = (torch.randn(s).requires_grad_() for s in ((200, 400), (300, 400), (300, 300)))
    seen: list[Compiled] = []
    torch._dynamo.reset()
    with observe(seen.append):
        torch.compile(lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v), backend="dicp_cpu")(x, w, v)
    forward = [c.claim.name for c in seen[0].program.library_calls]
    assert forward == [f"linear: {claim}", "linear: oneDNN"]


@pytest.mark.one_in(2)
@pytest.mark.chosen
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
@torch.no_grad()
def test_an_activation_and_a_sum_behind_it(
    act: str, dtype: torch.dtype, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which oneDNN's call does one alone, whatever else is preferred."""
    monkeypatch.setattr(matmul, "cpu_maker", lambda: "amd")
    monkeypatch.setattr(matmul, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    layer = torch.nn.Linear(200, 300, dtype=dtype)
    exact = copy.deepcopy(layer).double()

    def fn(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[act]((exact if x.dtype == torch.float64 else layer)(x)) + other

    args = torch.randn(200, 200, dtype=dtype), torch.randn(200, 300, dtype=dtype)
    lacks = dtype == torch.float16 and multiplies(dtype)  # oneDNN's calls with an epilogue have no float16
    library = "BLAS" if lacks else "oneDNN"
    check(fn, *args, claim=("tiles", "packed tiles", library), freeze=frozen)


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LARGE_RESULT", 0)
    monkeypatch.setattr(matmul, "PANEL_DEPTH", 0)


def frozen(rows: int, depth: int, columns: int, act: str, bias: bool, **how: Any) -> None:
    layer = torch.nn.Linear(depth, columns, bias=bias, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()

    def fn(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = (exact if x.dtype == torch.float64 else layer)(x)
        return ACTIVATIONS[act](y) + other if act else y

    args = (torch.randn(size, dtype=torch.bfloat16) for size in ((rows, depth), (rows, columns)))
    check(fn, *args, claim="packed tiles", freeze=True, **how)


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
@pytest.mark.parametrize("act", ["", "gelu", "relu6"])
@pytest.mark.parametrize(
    "rows, depth, columns", [(20, 30, 600), (17, 512, 64), (257, 1026, 65), (700, 66, 130), (96, 800, 1000)]
)
@torch.no_grad()
def test_panels_of_a_constant_weight(rows: int, depth: int, columns: int, act: str, panels: None) -> None:
    """Rows of several blocks, depths of several sums, columns that end within a panel."""
    frozen(rows, depth, columns, act, bias=columns % 2 == 0)


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
@torch.no_grad()
def test_panels_serve_rows_that_vary(panels: None) -> None:
    layer = torch.nn.Linear(64, 200, dtype=torch.bfloat16)
    f = torch.compile(layer, backend="dicp_cpu", dynamic=True, options={"freeze": True})
    seen: list[Compiled] = []
    for rows in (40, 600, 2, 17):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        with observe(seen.append):
            got = f(x)
        torch.testing.assert_close(got, layer(x))
    assert [c.claim.name for s in seen for c in s.program.library_calls] == ["linear: packed tiles"]


@pytest.mark.chosen
@pytest.mark.skipif(not available(torch.bfloat16), reason="no products of bf16")
@pytest.mark.parametrize("rows, packed", [(100, "oneDNN"), (2000, "packed tiles")])
@torch.no_grad()
def test_panels_are_of_large_results(rows: int, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which oneDNN would allocate; of an odd depth there are none."""
    monkeypatch.setattr(matmul, "LARGE_RESULT", 8 << 20)
    seen: list[Compiled] = []
    for depth in (768, 769):
        torch._dynamo.reset()
        layer = torch.nn.Linear(depth, 2200, dtype=torch.bfloat16)
        with observe(seen.append):
            torch.compile(layer, backend="dicp_cpu", options={"freeze": True})(torch.randn(rows, depth).bfloat16())
    names = [c.claim.name for s in seen for c in s.program.library_calls]
    assert names == [f"linear: {packed}", "linear: oneDNN"]


@pytest.mark.chosen
@pytest.mark.parametrize(
    "rows, depth, columns", [(2, 1025, 4), (20, 1152, 9), (20, 1152, 300), (64, 2048, 64)]
)
def test_deep_sums_of_one_sign(rows: int, depth: int, columns: int) -> None:
    """One sum of all that many products errs more than twice as much as eager's."""
    x, w = torch.rand(rows, depth), torch.rand(columns, depth)
    check(lambda x, w: F.linear(x, w), x, w, claim=("BLAS", "tiles", "few rows"))


def chosen(fn: Any, *args: torch.Tensor) -> str:
    """The claim of the only call."""
    torch._dynamo.reset()
    seen: list[Compiled] = []
    with observe(seen.append):
        torch.compile(fn, backend="dicp_cpu")(*args)
    (call,) = (c for s in seen for c in s.program.library_calls)
    return call.claim.name


@pytest.mark.chosen  # a library asks for its operands in an order, tiles do not
def test_rows_of_a_softmax_keep_their_dims() -> None:
    """The product takes leading dims as one, what is added keeps them: all in the kernel of the softmax."""
    x, bias, v = torch.randn(6, 3, 20, 40), torch.randn(3, 20, 40), torch.randn(6, 3, 40, 8)
    seen: list[Compiled] = []
    with observe(seen.append):
        found = torch.compile(lambda x, bias, v: (x + bias).softmax(-1) @ v, backend="dicp_cpu")(x, bias, v)
    assert len(seen[0].program.launches) == 1
    exact = (x.double() + bias.double()).softmax(-1) @ v.double()
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.chosen
@pytest.mark.parametrize("rows", [9, 24, 25, 32, 33, 64, 65, 96, 97, 128, 129])
def test_few_rows_read_weights_as_they_lie_where_mkl_is_fast(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles where rows fill vectors, which they turn."""
    for module in (matmul, gemv):
        monkeypatch.setattr(module, "cpu_maker", lambda: "intel")
        monkeypatch.setattr(module, "cpu_flags", lambda: {"avx2", "fma", "avx512f"})
    claim = "tiles" if rows in (25, 32, 96, 128) else "few rows" if rows <= 64 else "BLAS"
    x, w = torch.randn(rows, 600), torch.randn(300, 600)
    assert chosen(F.linear, x, w).endswith(f": {claim}")
    assert chosen(torch.mm, x, w.t().contiguous()) == ("mm: few rows" if rows <= 64 else "mm: BLAS")
    assert chosen(torch.mm, x.t().contiguous().t(), w.t().contiguous()) == "mm: BLAS"  # x by columns
    deep = torch.randn(rows, 9000)
    assert chosen(F.linear, deep, torch.randn(20, 9000)).endswith("few rows") == (rows <= 200_000 // 9000)
    for module in (matmul, gemv):
        monkeypatch.setattr(module, "cpu_flags", lambda: {"avx2", "fma"})
    assert chosen(F.linear, x, w).endswith(": BLAS")
