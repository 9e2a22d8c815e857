"""Through torch.compile, interpreted on CPU tensors: operators, gradients, sizes, mutation, two models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import compile_everywhere

import dicp
from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.vendor.cuda_graph import assemble as assembling

Fn = Callable[..., Any]
X, SPOT = (37, 53), torch.tensor([1, 1, 2, 36, 0])

OPERATORS: dict[str, Fn] = {
    "add": lambda x: x * 2 + 1,
    "softmax": lambda x: torch.softmax(x, -1),
    "sum0": lambda x: x.sum(0),
    "layer_norm": lambda x: F.layer_norm(x, (53,)),
    "var": lambda x: x.var(1),
    "std0": lambda x: x.std(0),
    "gelu": F.gelu,
    "transpose": lambda x: x.t().contiguous() + 1,
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "pad": lambda x: F.pad(x, (1, 2, 3, 4)) * 2,
    "mm": lambda x: torch.relu(x @ x.t() + 1),
    "cumsum": lambda x: x.cumsum(1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "amax": lambda x: x.amax(0),
    "gather": lambda x: x.gather(1, SPOT[:4].reshape(2, 2)),
    "embedding": lambda x: F.embedding(SPOT, x),
    "index_add": lambda x: torch.zeros(X).index_add(0, SPOT, x[:5]),
    "flip": lambda x: x.flip(0) + x,
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2) + 1,
    "avg_pool": lambda x: F.avg_pool2d(x[None, None], 3),
    "conv": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "roll": lambda x: x.roll(3, 1),
    "upsample": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "tanh": torch.tanh,
    "where": lambda x: torch.where(x > 0, x, x.exp()),
    "cross_entropy": lambda x: F.cross_entropy(x[:5], SPOT),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[None, None, :8], x[None, None, :8], x[None, None, :8]
    ),
    "sort": lambda x: x.sort(-1).values * 2,
    "prod": lambda x: (1 + x / 100).prod(-1),
    "logsumexp": lambda x: x.logsumexp(0),
}
INTEGERS: dict[str, Fn] = {
    "int8_wraps": lambda: torch.arange(-100, 100).to(torch.int8) * 3 + 7,
    "argmax": lambda: torch.randn(X).argmax(1),
    "any": lambda: (torch.arange(53) > 50).any(),
    "divide": lambda: torch.arange(-9, 9) // 4,
    "cummax": lambda: torch.cummax(torch.arange(30.0).sin(), 0),
    "numbers_compared": lambda: torch.logical_xor(torch.arange(40.0) % 3, torch.tensor(2.0)),
    "one_update": lambda: torch.ones(1).bfloat16().index_add(0, SPOT[:1] - 1, torch.ones(1).bfloat16()),
    "arange_of_fractions": lambda: torch.arange(0.1, -7.9, -4.0, dtype=torch.int64),
    "bits": lambda: torch.arange(40) & 12 | 3,
    "beyond_32_bits": lambda: (
        torch.arange(1 << 17) * 100000,
        torch.arange(1 << 17) * torch.arange(1 << 17) % 7,
        (torch.arange(9) + 2**40) // 3,
    ),
}


@pytest.fixture
def compiled(cuda_cache: str) -> Callable[..., Fn]:
    def make(fn: Fn, **how: Any) -> Fn:
        options = {"interpret": True, "cache_dir": cuda_cache}
        return torch.compile(fn, backend=dicp_cuda, options=options, fullgraph=True, **how)

    return make


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_and_its_gradient(name: str, compiled: Any) -> None:
    x, y = (torch.randn(X).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    want, got = OPERATORS[name](x), compiled(OPERATORS[name])(y)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for t in (want, got):
        t.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "sum0", "gelu", "transpose"])
def test_other_dtypes(name: str, dtype: torch.dtype, compiled: Any) -> None:
    x = torch.randn(X, dtype=dtype)
    torch.testing.assert_close(compiled(OPERATORS[name])(x), OPERATORS[name](x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, compiled: Any) -> None:
    torch.manual_seed(0)
    want = INTEGERS[name]()
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(INTEGERS[name])(), want)


def test_numbers_that_vary_may_be_negative_and_large(compiled: Any) -> None:
    def f(x: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        return x[k % 8], x[-1 if k < 0 else 1 :], torch.arange(8) * k, x * (k % 3) + k // 3

    fn, x = compiled(f, dynamic=True), torch.arange(8.0)
    for k in (-3, -5, 2, 10**12, -(10**12)):
        torch.testing.assert_close(fn(x, k), f(x, k))


@pytest.mark.parametrize(
    "of",
    [
        lambda x: ((y := x + 1), y.view(torch.int32)),
        lambda x: ((y := x.sort()[0]), y.view(torch.int32)[1:]),
        lambda x: ((y := torch.complex(x, x)), torch.view_as_real(y)[..., 0]),
    ],
)
def test_results_seen_as_another_dtype(of: Any, compiled: Any) -> None:
    x = torch.randn(8)
    for found, expected in zip(compiled(of)(x), of(x), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_a_saved_input_seen_as_another_dtype(compiled: Any) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(torch.view_as_real(x), (5, 2))

    x = torch.randn(3, 5, dtype=torch.complex64, requires_grad=True)
    (expected,) = torch.autograd.grad(norm(x)[..., 0].sum(), x)
    (found,) = torch.autograd.grad(compiled(norm)(x)[..., 0].sum(), x)
    torch.testing.assert_close(found, expected)


def test_factors_made_of_sizes(compiled: Any) -> None:
    """One for a library call, and one for a product."""

    def scaled(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.histc(x, 5, 0, 1 / x.shape[0]), torch.addmm(x, x, w, alpha=x.shape[1] ** -0.5)

    x, w = torch.rand(7, 9), torch.randn(9, 9)
    torch.testing.assert_close(compiled(scaled, dynamic=True)(x, w), scaled(x, w))


def test_sizes_that_change(compiled: Any) -> None:
    fn = compiled(lambda x: torch.softmax(x * 2, -1).sum(0), dynamic=True)
    for shape in ((5, 7), (9, 33), (2, 1500)):
        x = torch.randn(shape)
        torch.testing.assert_close(fn(x), torch.softmax(x * 2, -1).sum(0), rtol=1e-4, atol=1e-6)


def test_mutated_input_and_dead_rows(compiled: Any) -> None:
    def bump(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum(-1)

    x = torch.randn(X)
    y = x.clone()
    torch.testing.assert_close(compiled(bump)(x), bump(y))
    torch.testing.assert_close(x, y)
    assert compiled(lambda x: x.sum(-1))(torch.ones(0, 5)).shape == (0,)


def test_index_out_of_range_is_an_error_with_the_users_line(compiled: Any) -> None:
    fn = compiled(lambda x, i: x[i] * 2)
    assert fn(torch.ones(4), torch.tensor([3, -4])).tolist() == [2.0, 2.0]
    with pytest.raises(IndexError, match="out of range"):
        fn(torch.ones(4), torch.tensor([4]))


def test_integer_division_by_zero_is_an_error_on_the_cpu(compiled: Any) -> None:
    fn = compiled(lambda x, y: x // y + x % y)
    x, y = torch.arange(10, 16), torch.tensor([1, 2, -3, 4, 5, 6])
    assert torch.equal(fn(x, y), x // y + x % y)
    y[3] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fn(x, y)


LONG_ROWS = {
    "left pad": (lambda x: F.pad(x, (5, 0), value=7.0).log_softmax(-1), (3, 17000)),
    "position in a left pad": (lambda x: F.pad(x, (5, 0), value=100.0).argmax(-1), (3, 17000)),
    "outer pad": (lambda x: F.pad(x, (0, 0, 2, 0), value=1.0).softmax(-1), (12, 17003)),
    "left cat": (lambda x: torch.cat([x[:, :1] + 9, x], -1).softmax(-1), (12, 17004)),
    "gathered cat": (lambda x: torch.cat([x[0][x[1, :1].long()].expand(12, 1), x], -1).softmax(-1), (12, 17004)),
    "in place": (lambda x: x.sub_(x.logsumexp(-1, keepdim=True)), (5, 16391)),
    "behind a vector": (lambda x: x[1:].flatten()[: 3 * 17003].view(3, 17003).softmax(-1), (5, 17008)),
    "with flags": (lambda x: (x.softmax(-1), x > 0, (x * 5).to(torch.int8)), (3, 16397)),
}


@pytest.mark.parametrize("name", LONG_ROWS)
def test_long_rows_that_begin_anywhere(name: str, compiled: Any) -> None:
    fn, shape = LONG_ROWS[name]
    xs = [torch.linspace(-3, 3, shape[0] * shape[1]).sin().view(shape) for _ in range(2)]
    torch.testing.assert_close(compiled(fn)(xs[0]), fn(xs[1]))
    torch.testing.assert_close(*xs)


def test_seed_means_what_it_means_under_eager(compiled: Any) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    fn, x = compiled(noisy), torch.ones(X)
    torch.manual_seed(3)
    first, second = fn(x), fn(x)
    torch.manual_seed(3)
    assert torch.equal(fn(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_model(name: str, compiled: Any, cuda_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agrees with eager, and every kernel of it compiles for three generations of GPUs."""
    pytest.importorskip("transformers")
    from dicp.bench.models import CASES
    from dicp.bench.models.case import scores_of

    programs = []
    assemble = assembling.assemble
    monkeypatch.setattr(assembling, "assemble", lambda p, c: (programs.append(p), assemble(p, c))[1])
    case = CASES[name]
    model, inputs = case.build("small"), case.inputs("small", 0, torch.float32)
    with torch.no_grad():
        want, got = scores_of(model(**inputs)), scores_of(compiled(model)(**inputs))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    config = Config.make(options={"cache_dir": cuda_cache})
    sources = {s.name: s for p in programs for s in assembling.emit_all(p, config).values()}
    assert compile_everywhere(list(sources.values()), config) == 3 * len(sources) > 0
    assert not any(p.externs for p in programs)


def test_without_gpu_the_error_points_to_the_cpu_backend() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match="dicp_cpu.*DICP_CUDA_INTERPRET"):
        torch.compile(lambda x: x + 1, backend=dicp_cuda)(torch.ones(2))


def test_triton_is_left_as_it_was(compiled: Any) -> None:
    import triton
    import triton.language as tl

    before = (triton.knobs.runtime.interpret, tl.load, tl.reduce, tl.tensor.__dict__.get("__bool__"))
    compiled(lambda x: x.sum(-1) + 1)(torch.ones(3, 4))
    assert before == (triton.knobs.runtime.interpret, tl.load, tl.reduce, tl.tensor.__dict__.get("__bool__"))


CORE = ["compiler.py", "errors.py", "ir", "ops", "passes", "schedule", "runtime"]


def test_core_names_no_vendor() -> None:
    """Only comments of the kind "for example" may say what a vendor is called, and there are none."""
    root = Path(dicp.__file__).parent
    files = [
        f
        for part in CORE
        for f in ([root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py")))
    ]
    named = [
        f"{f.relative_to(root)}:{k}"
        for f in files
        for k, line in enumerate(f.read_text().splitlines(), 1)
        if "cpu_graph" in line or "cuda_graph" in line or "triton" in line.lower()
    ]
    assert not named, named


def test_gpu_check_without_gpu_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = Path(dicp.__file__).parent.parent / "scripts" / "gpu_check.sh"
    done = subprocess.run(
        ["bash", str(script)],
        capture_output=True,
        text=True,
        env={"PYTHON": sys.executable, "PATH": "/bin:/usr/bin"},
    )
    assert done.returncode == 3
    assert "no CUDA GPU" in done.stderr
