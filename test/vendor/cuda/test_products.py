"""Products as templates: every form, dtype, order in memory and epilogue, interpreted and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import compile_everywhere
from templates import run, view

from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.ir import index as ix
from dicp.ir.index import Var
from dicp.ops.library import ACTIVATIONS
from dicp.vendor.cuda_graph import products, vendor
from dicp.vendor.cuda_graph.templates import Launched, Operand
from dicp.vendor.cuda_graph.templates.product import Product, Tiling, kernels

TILE, SPLIT = Tiling("tile", 32, 32, 32), Tiling("tile", 32, 32, 32, split=2)
ROWS, ROWS_SPLIT = Tiling("rows", 4, 16, 32), Tiling("rows", 4, 16, 32, split=4)
PLANS = {"tile": TILE, "split": SPLIT, "rows": ROWS, "rows_split": ROWS_SPLIT}


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache, "interpret": True})


def product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    act: str,
    *,
    transposed: bool = True,
    batch: int = 1,
    symbolic: bool = False,
    bias: bool = True,
    other: bool = True,
    alpha: float = 1,
    beta: float = 1,
) -> tuple[Product, dict[str, torch.Tensor], torch.Tensor]:
    """A product, its tensors, and what it should come to in float64."""
    a = torch.randn(batch, m, k).to(dtype)
    b = (torch.randn(batch, n, k).transpose(1, 2) if transposed else torch.randn(batch, k, n)).to(dtype)
    tensors = {"a": a, "b": b, "out": torch.full((batch, m, n), float("nan")).to(dtype)}
    if bias:
        tensors["bias"] = torch.randn(n).to(dtype)
    if other:
        tensors["other"] = torch.randn(batch, m, n).to(dtype)
    rows: Any = ix.of(Var("s0", None, 1)) if symbolic else m
    given = {
        name: Operand(
            name,
            view(name, t, rows if symbolic and name in ("a", "other", "out") else None),
            (0, 0, 1) if name == "bias" else t.stride(),
        )
        for name, t in tensors.items()
    }
    made = Product("test", batch, rows, n, k, alpha=alpha, beta=beta, act=act, **given)
    want = a.double() @ b.double() * alpha
    want = ACTIVATIONS[act](want + tensors["bias"].double() * beta if bias else want)
    return made, tensors, want + tensors["other"].double() if other else want


def check(
    made: Product,
    tensors: dict[str, torch.Tensor],
    want: torch.Tensor,
    tiling: Tiling,
    config: Config,
    **how: Any,
) -> list[Launched]:
    launches = kernels(made, tiling, ())
    run(launches, tensors, config, **how)
    loose = 1e-5 if tensors["out"].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(tensors["out"].double(), want, rtol=loose, atol=loose * 2)
    return launches


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("tiling", PLANS)
def test_forms_and_activations(tiling: str, act: str, config: Config) -> None:
    check(*product(3, 37, 70, torch.float32, act), PLANS[tiling], config)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tiling", PLANS)
def test_dtypes_and_orders_in_memory(tiling: str, dtype: torch.dtype, transposed: bool, config: Config) -> None:
    made = product(2, 40, 64, dtype, "none", transposed=transposed, bias=False, alpha=0.5)
    check(*made, PLANS[tiling], config)


@pytest.mark.parametrize("tiling", PLANS)
def test_batches_and_factors(tiling: str, config: Config) -> None:
    check(*product(3, 17, 33, torch.float32, "none", batch=3, alpha=-2, beta=0.25), PLANS[tiling], config)


@pytest.mark.parametrize("tiling", ["tile", "split"])
@pytest.mark.parametrize("m", [1, 70])
def test_rows_that_vary(tiling: str, m: int, config: Config) -> None:
    check(*product(m, 37, 70, torch.float32, "gelu", symbolic=True), PLANS[tiling], config, sizes=(m,))


def test_groups_of_tiles_cover_the_result(config: Config) -> None:
    """Nine rows of tiles and more: a whole group, and one that is cut short."""
    check(*product(17 * 16, 40, 16, torch.float32, "none"), Tiling("tile", 16, 16, 16), config)


def test_operands_that_are_spread_out(config: Config) -> None:
    """Stride 0 along rows, and along what is summed over."""
    made, tensors, _ = product(20, 40, 70, torch.float32, "none", bias=False, other=False)
    tensors["a"] = torch.randn(20).reshape(1, 20, 1).expand(1, 20, 70)
    tensors["b"] = torch.randn(70).reshape(1, 70, 1).expand(1, 70, 40)
    spread = {n: Operand(n, view(n, tensors[n]), (0, *tensors[n].stride()[1:])) for n in ("a", "b")}
    want = tensors["a"].double() @ tensors["b"].double()
    check(dataclasses.replace(made, **spread), tensors, want, SPLIT, config)


def test_64_bit_positions(config: Config) -> None:
    check(*product(3, 37, 70, torch.float32, "relu"), SPLIT, config, wide=True)


def test_they_compile_for_every_gpu(config: Config) -> None:
    made = []
    for dtype, tiling in ((torch.bfloat16, TILE), (torch.float32, SPLIT), (torch.float16, ROWS_SPLIT)):
        made += kernels(product(4, 72, 64, dtype, "gelu_tanh")[0], tiling, ())
    made += kernels(
        product(50, 72, 70, torch.bfloat16, "silu", symbolic=True)[0], Tiling("tile", 64, 64, 64), ()
    )
    sources = [launched.template for launched in made]
    assert compile_everywhere(sources, config) == 3 * len(sources)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [(1, 4096, 4096), (4, 1024, 4096), (8, 4096, 1024), (48, 768, 768), (2048, 3072, 768)]
)
def test_every_plan_compiles_for_every_gpu(
    sizes: tuple[int, int, int], dtype: torch.dtype, config: Config
) -> None:
    m, n, k = sizes
    made = product(m, n, k, dtype, "gelu")[0]
    tilings = products.tilings(m, n, k, 1, dtype, True, True)
    sources = [launched.template for tiling in tilings for launched in kernels(made, tiling, ())]
    assert compile_everywhere(sources, config) == 3 * len(sources)


def test_tf32_where_torch_allows_it(config: Config) -> None:
    made, _, _ = product(20, 32, 32, torch.float32, "none")
    assert '"ieee")' in kernels(made, TILE, ())[0].template.text
    for setting, on, off in (("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")):
        before = torch.backends.cuda.matmul.fp32_precision
        try:
            for value, word in ((on, "tf32"), (off, "ieee")):
                setattr(torch.backends.cuda.matmul, setting, value)
                assert products.precision() == word and f"('{word}'" in vendor.fingerprint(config)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def test_kernels_add_biases_in_float32(cuda_cache: str) -> None:
    """Where cuBLAS is slower with one: not in half precision, nor by TF32, nor for few rows; nor does it then
    compute GELU."""
    from dicp import compiler

    before = torch.backends.cuda.matmul.fp32_precision

    def served(dtype: torch.dtype, rows: int = 256) -> set[str]:
        x, w, b = (torch.randn(s).to(dtype) for s in ((rows, 48), (64, 48), (64,)))
        seen: list[Any] = []
        options = {"interpret": True, "cache_dir": cuda_cache}

        def fn(x: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.linear(x, w, b), approximate="tanh") + 1

        torch._dynamo.reset()
        with compiler.observe(seen.append):
            got = torch.compile(fn, backend=dicp_cuda, options=options)(x)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got, fn(x), rtol=tolerance, atol=tolerance)
        lines = [line.partition("#")[0].split() for line in seen[0].program.sources["call.py"].splitlines()]
        return {words[0].partition("(")[0] for words in lines if words}

    try:
        assert "mm_out" in served(torch.float32)
        assert "linear_into" in served(torch.bfloat16)
        assert "mm_out" not in served(torch.float32, rows=16)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert "linear_into" in served(torch.float32)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# -- through torch.compile -----------------------------------------------------------------------------------


MODELS = {
    "linear_gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), 5),
    "decode_residual": (lambda x, w, b: F.linear(x, w) + b, 1),
    "decode_matrix": (lambda x, w, b: x @ w.t(), 2),
    "large_mm": (lambda x, w, b: x @ w.t() + 1, 40),
}
SERVED = {
    "linear_gelu": "linear_gelu_",
    "decode_residual": "linear_",
    "decode_matrix": "linear_",
    "large_mm": "",
}


@pytest.mark.parametrize("name", MODELS)
def test_who_serves_a_product(name: str, cuda_cache: str) -> None:
    """A template where it fuses or rows are few; cuBLAS for the rest."""
    from dicp import compiler

    fn, m = MODELS[name]
    x, w, b = torch.randn(m, 48), torch.randn(40, 48), torch.randn(40)
    seen: list[Any] = []
    with compiler.observe(seen.append):
        got = torch.compile(fn, backend=dicp_cuda, options={"interpret": True, "cache_dir": cuda_cache})(
            x, w, b
        )
    torch.testing.assert_close(got, fn(x, w, b), rtol=1e-5, atol=1e-5)
    text = seen[0].program.sources["call.py"]
    assert SERVED[name] in text and ("_out(" in text) == (name == "large_mm")


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that fewer tiles fill: the interpreter takes a third of a second for each."""
    monkeypatch.setattr(products, "multiprocessors", lambda: 6)


@pytest.mark.usefixtures("few_multiprocessors")
def test_odd_vocabularies(cuda_cache: str) -> None:
    """The caller's rows are written by the template, its gradient is copied to aligned rows once for two
    products, of which cuBLAS computes what 8 divides apart from the rest."""
    from dicp import compiler

    x, w, g = (torch.randn(s).bfloat16() for s in ((256, 256), (329, 256), (256, 329)))
    x.requires_grad_(), w.requires_grad_()
    seen: list[Any] = []
    with compiler.observe(seen.append):
        run = torch.compile(F.linear, backend=dicp_cuda, options={"interpret": True, "cache_dir": cuda_cache})
        got = run(x, w)
        gradients = torch.autograd.grad(got, (x, w), g)
    want = F.linear(x, w)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1)
    for a, b in zip(gradients, torch.autograd.grad(want, (x, w), g), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-1)
    forward, backward = (s.program.sources["call.py"] for s in seen)
    assert "mm_out" not in forward and "multiply" not in forward and "336" not in forward
    assert backward.count("(336, 1, )") + backward.count("(1, 336, )") == 2
    assert backward.count("multiply(") == 2 and len(seen[1].program.launches) == 1


@pytest.mark.usefixtures("few_multiprocessors")
def test_odd_rows_that_others_read_are_aligned(cuda_cache: str) -> None:
    from dicp import compiler

    x, w = torch.randn(256, 256).bfloat16(), torch.randn(329, 256).bfloat16()
    seen: list[Any] = []
    with compiler.observe(seen.append):
        run = torch.compile(
            lambda x, w: torch.softmax(x @ w.t(), -1),
            backend=dicp_cuda,
            options={"interpret": True, "cache_dir": cuda_cache},
        )
        got = run(x, w)
    torch.testing.assert_close(got, torch.softmax(x @ w.t(), -1), rtol=5e-2, atol=2e-2)
    made = [t for name, t in seen[0].program.sources.items() if name.startswith("mm_")]
    assert len(made) == 1 and "* 336" in made[0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(37, 48, 61), (8, 16, 24), (5, 3, 2), (17, 16, 24), (16, 24, 17)])
def test_products_in_parts(sizes: tuple[int, int, int], transposed: bool) -> None:
    m, n, k = sizes
    a = torch.randn(k, m, dtype=torch.float64).t() if transposed else torch.randn(m, k, dtype=torch.float64)
    b, out = torch.randn(k, n, dtype=torch.float64), torch.full((m, n), float("nan"), dtype=torch.float64)
    products.multiply(a, b, out)
    torch.testing.assert_close(out, a @ b)


def test_products_in_parts_are_as_exact_as_whole_ones() -> None:
    a, b = torch.randn(256, 1007).bfloat16(), torch.randn(1007, 256).bfloat16()
    want, out = a.double() @ b.double(), torch.empty(256, 256).bfloat16()
    products.multiply(a, b, out)
    mine, whole = ((y.double() - want).square().mean() for y in (out, a @ b))
    assert mine < 1.1 * whole


@pytest.mark.parametrize(
    ("m", "n", "k", "first"),
    [
        (4096, 50257, 768, "128x256x64"),
        (256, 3072, 768, "64x64x64"),  # the fewest multiprocessors idle
        (128, 3072, 768, "64x64x64"),
        (401408, 64, 196, "128x64x64"),  # no wider than the result
    ],
)
def test_which_tile_comes_first(m: int, n: int, k: int, first: str) -> None:
    tiling = products.tilings(m, n, k, 1, torch.bfloat16, True, True)[0]
    assert str(tiling) == f"tile {first}"


def test_rows_that_are_aligned_stay_with_their_norm(cuda_cache: str) -> None:
    from dicp import compiler

    x, w = torch.randn(2, 128, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    seen: list[Any] = []
    with compiler.observe(seen.append):
        run = torch.compile(
            lambda x, w: ((h := x + 1), F.layer_norm(h, (256,)).view(-1, 256) @ w),
            backend=dicp_cuda,
            options={"interpret": True, "cache_dir": cuda_cache},
        )
        run(x, w)
    assert len(seen[0].program.launches) == 1


def test_candidates_name_themselves_apart(cuda_cache: str) -> None:
    import torch.fx as fx

    from dicp.vendor.cuda_graph import vendor

    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = torch.empty(512, 256), torch.empty(256, 512)
    node = graph.call_function(torch.ops.aten.mm.default, (a, b))
    node.meta["val"] = torch.empty(512, 512)
    for options in ({}, {"numerics": "eager"}):
        config = Config.make(options=options)
        names = [c.name for c in vendor.candidates(node, config)]
        assert names[0] == vendor.claim(node, config).name == "mm: cuBLAS"
        assert len(names) == len(set(names)) and (len(names) > 1) == (not options)


def test_measured_choice_is_right_too(cuda_cache: str) -> None:
    options = {"interpret": True, "cache_dir": cuda_cache, "max_autotune": True}
    x, w = torch.randn(3, 40), torch.randn(24, 40)
    got = torch.compile(lambda x, w: torch.relu(x @ w.t()), backend=dicp_cuda, options=options)(x, w)
    torch.testing.assert_close(got, torch.relu(x @ w.t()), rtol=1e-5, atol=1e-5)
