"""Linear layers of the same few rows as one kernel: interpreted, compiled, and in programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import compile_everywhere
from templates import run, view
from test_early_launches import order
from test_products import product
from torch import Tensor, nn

from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.ops.library import NARROW_WEIGHTS, linears
from dicp.schedule.kernels import Launch
from dicp.vendor.cuda_graph import CudaGraph, gpu
from dicp.vendor.cuda_graph.templates import Launched, Operand
from dicp.vendor.cuda_graph.templates.linears import Linears, kernels
from dicp.vendor.cuda_graph.templates.product import Tiling
from dicp.vendor.cuda_graph.templates.product import kernels as kernels_of_products

TILING = Tiling("rows", 4, 4, 32)


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache, "interpret": True})


def layers(
    m: int,
    k: int,
    columns: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    act: str = "none",
    *,
    gated: bool = False,
    norm: bool = True,
    bias: bool = False,
    scale: tuple[int, ...] | None = None,
) -> tuple[Linears, dict[str, Tensor], list[Tensor]]:
    """The layers, their tensors, and what they should come to in float64. scale: of weights stored as int8,
    () for one that all columns share, (0,) for one for each."""
    tensors = {"x": torch.randn(m, k).to(dtype)}
    tensors |= {"norm": torch.randn(k).to(dtype)} if norm else {}
    for i, n in enumerate(columns):
        stored = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        tensors[f"w{i}"] = torch.randn(n, k).to(dtype) if scale is None else stored
    if scale is not None:
        own = {f"scale{i}": torch.rand([n] if scale else []) / 64 for i, n in enumerate(columns)}
        tensors |= {name: t.to(dtype) for name, t in own.items()}
    tensors |= {f"bias{i}": torch.randn(n).to(dtype) for i, n in enumerate(columns) if bias}
    exact = {name: t.double() for name, t in tensors.items()}
    each = ([exact[name] for name in exact if name.startswith(stem)] for stem in ("w", "scale", "bias"))
    want = linears(exact["x"], exact.get("norm"), 1e-5, *each, act, gated)
    for i, y in enumerate(want):
        tensors[f"out{i}"] = torch.full(y.shape, float("nan")).to(dtype)

    def operands(stem: str, *strides: int) -> tuple[Operand, ...]:
        names = [name for name in tensors if name.startswith(stem)]
        return tuple(Operand(name, view(name, tensors[name]), strides) for name in names)

    (x,), (*norms,), factor = operands("x", k, 1), operands("norm", 1), (1 if scale else 0)
    several = operands("w", k, 1), operands("scale", factor), operands("bias", 1), operands("out", 1)
    return Linears(m, k, x, norms[0] if norm else None, 1e-5, *several, act, gated), tensors, want


def check(
    made: tuple[Linears, dict[str, Tensor], list[Tensor]], config: Config, tiling: Tiling = TILING, **how: Any
) -> list[Launched]:
    p, tensors, want = made
    launches = kernels(p, tiling, ())
    run(launches, tensors, config, **how)
    loose = 1e-5 if tensors["x"].dtype == torch.float32 else 2e-2
    for i, y in enumerate(want):
        torch.testing.assert_close(tensors[f"out{i}"].double(), y, rtol=loose, atol=loose * 4)
    return launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("columns", [(16,), (16, 16, 16), (32, 8, 8), (5, 7, 1, 4)])
def test_side_by_side(columns: tuple[int, ...], norm: bool, dtype: torch.dtype, config: Config) -> None:
    """A weight alone, several of equal and other numbers of columns, ends of no whole program."""
    (made,) = check(layers(2, 70, columns, dtype, norm=norm), config)
    assert made.template.grid == str(sum(-(-n // 4) for n in columns))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated(act: str, dtype: torch.dtype, config: Config) -> None:
    check(layers(1, 96, (18, 18), dtype, act, gated=True), config)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("m", [1, 3, 4])
def test_biases_and_rows(m: int, gated: bool, config: Config) -> None:
    act = "sigmoid" if gated else "tanh"
    check(layers(m, 64, (12, 12), act=act, gated=gated, bias=True, norm=m != 3), config)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scale", [(0,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_int8(dtype: torch.dtype, scale: tuple[int, ...], gated: bool, config: Config) -> None:
    act = "silu" if gated else "none"
    check(layers(2, 70, (9, 9), dtype, act, gated=gated, scale=scale, bias=True), config)


def test_64_bit_positions(config: Config) -> None:
    check(layers(2, 70, (9, 6)), config, wide=True)


def test_they_compile_for_every_gpu_and_read_weights_first(config: Config) -> None:
    tiling = Tiling("rows", 1, 4, 1024, stages=4)
    for columns, gated in (((4096, 1024, 1024), False), ((512, 512), True)):
        p, _, _ = layers(1, 4096, columns, torch.bfloat16, gated=gated)
        (made,) = kernels(p, tiling, ())
        assert compile_everywhere([made.template], config) == 3
        found = order(made.template, config)
        wait = found.index("griddepcontrol.wait")
        assert set(found[:wait]) == {"ld.global"} and [p.operands[k] for k in made.ahead] == list(p.w)


def test_products_of_int8_compile_for_every_gpu(config: Config) -> None:
    made = []
    for dtype, tiling in (
        (torch.bfloat16, Tiling("rows", 2, 4, 2048, stages=4)),
        (torch.bfloat16, Tiling("tile", 16, 64, 64, split=2)),
        (torch.float32, Tiling("tile", 32, 32, 32)),
    ):
        p, _, _ = product(2, 64, 4096, dtype, "silu", bias=False, other=False)
        w, scale = torch.zeros(1, 64, 4096, dtype=torch.int8), torch.zeros(64, dtype=dtype)
        b = Operand("b", view("b", w), (0, 1, 4096))
        made += kernels_of_products(
            replace(p, b=b, scale=Operand("scale", view("scale", scale), (0, 0, 1))), tiling, ()
        )
    sources = [launched.template for launched in made]
    assert compile_everywhere(sources, config) == 3 * len(sources)


# -- in programs ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a language model that decodes, without what lies between its products."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, width // 2, bias=bias) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.q(y) * torch.cat([self.k(y), self.v(y)], -1)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def programs(net: nn.Module, x: Tensor, cache: str, **options: Any) -> tuple[Tensor, list[str]]:
    """The result, and the claims of its calls."""
    seen = list[Compiled]()
    torch._dynamo.reset()
    with observe(seen.append), torch.no_grad():
        options |= {"interpret": True, "cache_dir": cache}
        y = torch.compile(net, backend=dicp_cuda, options=options, fullgraph=True)(x)
    return y, [str(c.claim.name) for s in seen for c in s.program.library_calls]


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("rows", [(1, 1), (2, 2)])
def test_a_block_is_three_products(
    rows: tuple[int, int], dtype: torch.dtype, bias: bool, cuda_cache: str
) -> None:
    torch.manual_seed(0)
    net, x = Block(64, bias).to(dtype), torch.randn(*rows, 64).to(dtype)
    got, calls = programs(net, x, cuda_cache)
    assert [name.partition(":")[0] for name in calls] == ["linears", "linears", "linear"], calls
    exact = net.double()(x.double())
    loose = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), exact, rtol=loose, atol=loose)


class Stored(nn.Module):
    """A linear layer of a weight in eight bits, as models write it."""

    def __init__(self, of: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        scales = of.weight.data.abs().amax(1) / 127
        self.register_buffer("weight", (of.weight.data / scales[:, None]).round().to(dtype))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (1, ["linears", "linears", "scaled_linear"]),
        (20, ["scaled_linear"] * 6),  # tiles, each for itself
        (80, ["mm"] * 6),  # of converted weights, by cuBLAS
    ],
)
@pytest.mark.parametrize("stored", NARROW_WEIGHTS)
def test_narrow_weights_are_read_as_stored(
    stored: torch.dtype, rows: int, want: list[str], dtype: torch.dtype, cuda_cache: str
) -> None:
    torch.manual_seed(0)
    net = Block(64, bias=False).to(dtype)
    for name in ("q", "k", "v", "gate", "up", "down"):
        setattr(net, name, Stored(getattr(net, name), stored))
    x = torch.randn(rows, 64).to(dtype)
    got, calls = programs(net, x, cuda_cache)
    assert [name.partition(":")[0] for name in calls] == want, calls
    loose = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), net.double()(x.double()), rtol=loose, atol=loose)


def steps_of_a_decoder(layers: int, cache: str) -> list[str]:
    """Kernels and calls of a LLaMA's program for one token, behind others in a static cache."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=40, max_position_embeddings=32,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).eval()
    kept = transformers.StaticCache(config=config, max_cache_len=16)
    kept.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    seen = list[Compiled]()
    torch._dynamo.reset()
    with observe(seen.append), torch.no_grad():
        options = {"interpret": True, "cache_dir": cache}
        call = torch.compile(net, backend=dicp_cuda, options=options, fullgraph=True)
        call(input_ids=torch.tensor([[3]]), past_key_values=kept, use_cache=True)
    (program,) = (s.program for s in seen)
    return [
        item.kernel.name if isinstance(item, Launch) else str(item.claim.name).partition(":")[0]
        for item in program.items
    ]


def test_a_layer_that_decodes(cuda_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values with their norm; their rotation and what goes to the cache; attention (in two
    launches where it is split); its product; gate and up with their norm; down."""
    monkeypatch.setattr(CudaGraph, "machine", lambda self, config: gpu(32))
    found = [Counter(steps_of_a_decoder(n, cuda_cache)) for n in (2, 3)]
    layer = found[1] - found[0]
    calls = {"linears": 2, "linear": 2, "attention": 1}
    assert {name: layer[name] for name in calls} == calls and layer.total() == 6, layer


def test_many_rows_and_eagers_numerics_have_calls_of_their_own(cuda_cache: str) -> None:
    net = Block(64, False)
    for x, options in ((torch.randn(5, 64), {}), (torch.randn(1, 64), {"numerics": "eager"})):
        got, calls = programs(net, x, cuda_cache, **options)
        assert not any("linears" in name for name in calls)
        torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)


def test_weights_that_lie_otherwise(cuda_cache: str) -> None:
    """By columns: a call for each."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(32, 16)) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.a.t()) + 1, F.linear(x, self.b.t()).cos()

    net, x = Turned(), torch.randn(1, 32)
    got, calls = programs(net, x, cuda_cache)
    assert not any("linears" in name for name in calls)
    torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)


def test_a_joined_result_is_the_bias_of_joined_layers(cuda_cache: str) -> None:
    """Of another x: theirs stand behind what they read."""

    def fn(x: Tensor, z: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        gate, other = F.silu(F.linear(x, w[0])), F.linear(z, w[2], b)
        made = gate * F.linear(x, w[1])
        return other, F.linear(z, w[3], made.view(32))

    args = torch.randn(1, 32), torch.randn(2, 32), torch.randn(4, 32, 32), torch.randn(32)
    with torch.no_grad():
        f = torch.compile(fn, backend=dicp_cuda, options={"interpret": True, "cache_dir": cuda_cache})
        torch.testing.assert_close(f(*args), fn(*args), rtol=1e-4, atol=1e-4)
