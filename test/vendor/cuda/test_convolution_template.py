"""Convolutions as a template: windows, orders in memory, dtypes and what follows, interpreted and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernels import compile_everywhere
from templates import run

from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ops.library import ACTIVATIONS, conv
from dicp.schedule.defs import Buffer, View
from dicp.vendor.cuda_graph import products
from dicp.vendor.cuda_graph.convolution import padded_channels
from dicp.vendor.cuda_graph.convolution import precision as convolution_precision
from dicp.vendor.cuda_graph.templates.convolution import Convolution, convolution, image, kernels
from dicp.vendor.cuda_graph.templates.product import Tiling

TILING = Tiling("tile", 32, 32, 32)
WINDOWS = {  # (window, stride, padding, dilation)
    "1x1": ((1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, every other": ((1, 1), (2, 2), (0, 0), (1, 1)),
    "3x3": ((3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3, no padding": ((3, 3), (1, 1), (0, 0), (1, 1)),
    "3x2, uneven": ((3, 2), (2, 1), (0, 1), (1, 3)),
    "7x7": ((7, 7), (2, 2), (3, 3), (1, 1)),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache, "interpret": True})


def problem(
    window: str = "3x3",
    dtype: torch.dtype = torch.float32,
    act: str = "none",
    *,
    order: torch.memory_format = torch.channels_last,
    channels: int = 5,
    bias: bool = True,
    residual: bool = True,
    symbolic: bool = False,
) -> tuple[Convolution, Tensors, torch.Tensor]:
    """A convolution of two 9x11 images to 7 channels, its tensors, and what it should come to in float64."""
    (r, s), stride, padding, dilation = WINDOWS[window]
    x = torch.randn(2, channels, 9, 11).to(dtype).to(memory_format=order)
    w = torch.randn(7, channels, r, s).to(dtype)
    exact = F.conv2d(x.double(), w.double(), None, stride, padding, dilation)
    tensors = {"x": x, "w": w, "out": torch.full_like(exact, float("nan")).to(dtype).to(memory_format=order)}
    if bias:
        tensors["bias"] = torch.randn(7).to(dtype)
    if residual:
        tensors["residual"] = torch.randn(exact.shape).to(dtype)
    images: Index = ix.of(Var("s0", None, 1)) if symbolic else 2

    def view(name: str) -> View | None:
        if (t := tensors.get(name)) is None:
            return None
        shape = (images, *t.shape[1:]) if name in ("x", "out", "residual") else tuple(t.shape)
        return View(Buffer(name, shape, t.dtype, t.stride()), shape, t.stride())

    made = convolution(
        *(view(name) for name in ("x", "w", "bias", "residual", "out")),  # type: ignore[arg-type]
        stride,
        padding,
        dilation,
        act,
        "ieee",
    )
    wide = [None if (t := tensors.get(n)) is None else t.double() for n in ("x", "w", "bias", "residual")]
    return made, tensors, conv(*wide, stride, padding, dilation, 1, act)  # type: ignore[arg-type]


def check(made: Convolution, tensors: Tensors, want: torch.Tensor, config: Config, **how: object) -> None:
    run(kernels(made, TILING, ()), tensors, config, **how)  # type: ignore[arg-type]
    loose = 1e-5 if tensors["out"].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(tensors["out"].double(), want, rtol=loose, atol=loose * 10)


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_and_orders_in_memory(window: str, order: torch.memory_format, config: Config) -> None:
    check(*problem(window, order=order), config)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_what_follows(act: str, config: Config) -> None:
    """The residual is added before the activation."""
    check(*problem("1x1", act=act), config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, config: Config) -> None:
    check(*problem(dtype=dtype, channels=8, bias=False, residual=False), config)


def test_images_that_vary_and_64_bit_positions(config: Config) -> None:
    check(*problem(symbolic=True), config, sizes=(2,))
    check(*problem(residual=False), config, wide=True)


@pytest.mark.parametrize("alike", [(0,), (3,), (2, 3), (1,), (0, 2, 3), (0, 1, 2, 3)])
def test_residuals_that_are_spread_out(alike: tuple[int, ...], config: Config) -> None:
    """What is the same for some pixels is read under the mask of pixels all the same."""
    made, tensors, _ = problem("1x1", residual=False)
    shape = [1 if d in alike else n for d, n in enumerate(tensors["out"].shape)]
    spread = torch.randn(shape).expand(tensors["out"].shape)
    window = View(Buffer("residual", tuple(shape), spread.dtype, spread.stride()), spread.shape, spread.stride())
    at = image("residual", window)
    assert (at.strides[1] == 0) is ({0, 2, 3} <= set(alike))  # else it is not read under the mask of rows
    want = F.conv2d(tensors["x"], tensors["w"], tensors["bias"]) + spread
    check(replace(made, residual=at), tensors | {"residual": spread}, want.double(), config)


def test_many_channels(config: Config) -> None:
    """Sums of several steps, in which the place in the window changes."""
    check(*problem(channels=40), config)


def test_they_compile_for_every_gpu(config: Config) -> None:
    made = [problem(w, torch.bfloat16, "relu", channels=64)[0] for w in ("1x1", "3x3")]
    made.append(problem("7x7", torch.float32, "silu", order=torch.contiguous_format, symbolic=True)[0])
    sources = [one.template for p in made for one in kernels(p, Tiling("tile", 64, 64, 32), ())]
    assert compile_everywhere(sources, config) == 3 * len(sources)


class Bottleneck(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Conv2d(16, 8, 1)
        self.wide = torch.nn.Conv2d(8, 16, 1, bias=False)
        self.deep = torch.nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.narrow(x))
        return F.relu(self.deep(F.relu(self.wide(y) + x)))


def test_only_short_sums_leave_the_library(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    model, x = Bottleneck().eval(), torch.randn(2, 16, 6, 6)
    seen: list[Compiled] = []
    with torch.no_grad(), observe(seen.append):
        got = torch.compile(model, backend="dicp_cuda")(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    served = [c.claim.name.partition(" tile")[0] for c in seen[0].program.library_calls]
    assert served == ["convolution: Triton", "convolution: Triton", "convolution: cuDNN"], served


def test_tf32_is_as_torch_allows_it_to_convolutions() -> None:
    of_convolutions, of_products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = of_convolutions.fp32_precision, of_products.fp32_precision
    try:
        for mine, other in (("tf32", "ieee"), ("ieee", "tf32")):
            of_convolutions.fp32_precision, of_products.fp32_precision = mine, other
            assert (convolution_precision(), products.precision()) == (mine, other)
    finally:
        of_convolutions.fp32_precision, of_products.fp32_precision = before


def padded(channels: int, window: int) -> int | None:
    """To how many channels a convolution with ReLU is filled up."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = torch.empty(8, channels, 224, 224, dtype=torch.bfloat16, device="meta")
    w.meta["val"] = torch.empty(64, channels, window, window, dtype=torch.bfloat16, device="meta")
    half = window // 2
    node = graph.call_function(
        torch.ops.dicp.conv.default, (x, w, None, None, [1, 1], [half, half], [1, 1], 1, "relu")
    )
    node.meta["val"] = torch.empty(8, 64, 224, 224, dtype=torch.bfloat16, device="meta")
    return padded_channels(node)


def test_which_images_are_filled_up() -> None:
    """Not where the sum would become too long for the template, nor where windows do not overlap."""
    assert padded(3, 7) == 4 and padded(3, 9) is None and padded(4, 7) is None and padded(3, 1) is None


def test_patches_are_a_product_and_windows_that_overlap_are_not(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    x, w, v = torch.randn(2, 3, 16, 16), torch.randn(8, 3, 4, 4), torch.randn(8, 3, 3, 3)
    seen: list[Compiled] = []
    with torch.no_grad(), observe(seen.append):
        for fn, weight in ((lambda x, w: F.conv2d(x, w, stride=4), w), (lambda x, w: F.conv2d(x, w), v)):
            torch.testing.assert_close(torch.compile(fn, backend="dicp_cuda")(x, weight), fn(x, weight))
    names = [[c.claim.name for c in s.program.library_calls] for s in seen]
    assert names == [["mm: cuBLAS"], ["convolution: cuDNN"]]


def test_gradients_of_channels_last_images_are_made_channels_last(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(16, 8, 3, 3, requires_grad=True)
    seen: list[Compiled] = []
    with observe(seen.append):
        torch.compile(lambda x, w: F.conv2d(x, w).sigmoid(), backend="dicp_cuda")(x, w).square().sum().backward()
    (call,) = (c for c in seen[1].program.library_calls if "backward" in str(c.node.target))
    assert call.args[0].strides[1] == 1


class Stem(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("large", [False, True])
def test_images_of_three_channels(large: bool, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up to four where the result is large enough for it to pay."""
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    monkeypatch.setattr("dicp.vendor.cuda_graph.convolution.FOLDED_BYTES", 1 << 10 if large else 1 << 22)
    model = Stem().eval().bfloat16()
    x = torch.randn(2, 3, 30, 26).bfloat16().contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    seen: list[Compiled] = []
    with torch.no_grad(), observe(seen.append):
        torch.testing.assert_close(torch.compile(model, backend="dicp_cuda")(x), model(x))
    sources = seen[0].program.sources
    assert any("constant_pad_nd" in name for name in sources) == large
    assert any("c = k % 4\n" in text for text in sources.values()) == large
