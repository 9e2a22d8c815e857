"""3x3 convolutions by Winograd's algorithm: against float64 under the rule of all tests (no further from it than twice eager),
what is not finite, and which convolutions it serves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import winograd
from dicp.vendor.cpu_graph.claims.common import onednn_has
from dicp.vendor.cpu_graph.microkernels import available

pytestmark = pytest.mark.skipif(not available(torch.float32), reason="no micro-kernels here")
INF = float("inf")
DTYPES = [torch.float32, *([torch.bfloat16] if onednn_has(torch.bfloat16) else [])]
ACTIVATIONS: dict[str, Any] = {"none": lambda x: x, "relu": torch.relu, "relu6": F.relu6}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes are small here: serve them all the same."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    monkeypatch.setattr(winograd, "pays", lambda window: True)
    yield


def close(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    unit = 4 * torch.finfo(got.dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit, f"{mine:.2e} from float64, eager {theirs:.2e}"


def compiled(fn: Any, *args: Any, freeze: bool = False, **how: Any) -> tuple[Any, list[str]]:
    """The function, and the names of the calls in what its first call compiled."""
    seen: list[Compiled] = []
    run = torch.compile(fn, backend="dicp_cpu", options={"freeze": freeze}, **how)
    with observe(seen.append):
        run(*args)
    return run, [c.claim.name for s in seen for c in s.program.library_calls]


def conv_of(channels: int, results: int, padding: Any, bias: bool = True) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(channels, results, 3, padding=padding, bias=bias)


CASES: dict[str, tuple[tuple[int, int, int, int], int, Any, str]] = {
    # x: batch, channels, height, width; results; padding; what x holds
    "even": ((2, 32, 12, 16), 64, 1, "normal"),
    "odd sizes": ((3, 17, 9, 7), 70, 1, "normal"),
    "no padding": ((1, 16, 11, 6), 16, 0, "normal"),
    "wide padding": ((2, 20, 13, 12), 33, (0, 2), "normal"),  # so many positions that no product takes its gradients
    "one tile": ((1, 3, 2, 2), 5, 1, "normal"),
    "two positions": ((1, 8, 3, 4), 3, 0, "normal"),  # a window of a whole image is a product
    "several blocks": ((1, 140, 24, 23), 200, 1, "normal"),
    "many tiles": ((1, 40, 50, 47), 72, 1, "normal"),
    "many tiles, slices of results": ((2, 300, 37, 34), 200, 1, "normal"),
    "behind ReLU": ((1, 128, 14, 14), 128, 1, "relu"),
    "nearly equal": ((1, 512, 8, 8), 96, 1, "smooth"),
    "of one sign": ((1, 256, 14, 14), 64, 1, "positive"),  # where sums that are too long show
}


def image(shape: tuple[int, ...], kind: str = "normal") -> torch.Tensor:
    x = torch.randn(shape)
    if kind == "positive":
        x = x.abs()
    if kind == "smooth":
        x = torch.rand(shape[0], shape[1], 1, 1) + 1 + 0.01 * x
    return (x.relu() if kind == "relu" else x).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("freeze", [False, True])
@torch.no_grad()
def test_values(freeze: bool, dtype: torch.dtype) -> None:
    """With few tiles, which are spread at once, and with many; in bf16 rounded once, which bounds the error."""
    convs, images, added = [], [], []
    for shape, results, padding, kind in CASES.values():
        convs.append(conv_of(shape[1], results, padding, bias=results != 64))
        images.append(image(shape, kind).to(dtype))
        if kind in ("smooth", "positive"):
            convs[-1].weight.abs_()
        convs[-1].to(dtype)
        added.append(torch.randn_like(convs[-1](images[-1])))

    def fn(images: list[torch.Tensor], added: list[torch.Tensor]) -> list[torch.Tensor]:
        return [conv(x) + other for conv, x, other in zip(convs, images, added, strict=True)]

    run, calls = compiled(fn, images, added, freeze=freeze)
    assert calls == ["conv: Winograd"] * len(CASES)
    results = zip(run(images, added), fn(images, added), strict=True)
    for (got, eager), conv, x, other in zip(results, convs, images, added, strict=True):
        exact = F.conv2d(x.double(), conv.weight.double(), None, padding=conv.padding)  # type: ignore[arg-type]
        exact += other if conv.bias is None else other + conv.bias.double()[:, None, None]
        close(got, conv(x.contiguous()) + other, exact)  # eager's, nearer to the truth where rows are dense
        if dtype == torch.bfloat16:
            largest = exact.abs().max().item()
            assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 2e-5 * largest).all()
        assert got.stride() == eager.stride()


@pytest.mark.parametrize("threads, results, size", [(1, 24, 14), (1, 24, 10), (2, 48, 14), (4, 96, 14), (1, 40, 6)])
@torch.no_grad()
def test_an_odd_number_of_tiles_and_vectors_of_results(threads: int, results: int, size: int) -> None:
    """A thread's results are no multiple of 16 with vectors of 8: the last of a place lay where the next begins."""
    conv, x = conv_of(64, results, 1), image((1, 64, size, size))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run, calls = compiled(conv, x)
        assert calls == ["conv: Winograd"]
        got = run(x)
    finally:
        torch.set_num_threads(before)
    eager = conv(x.contiguous())
    close(got, eager, conv.double()(x.double()))


@torch.no_grad()
def test_one_unit_serves_no_activation_and_those_that_are_limits() -> None:
    convs = [conv_of(16, 16, 1) for _ in ACTIVATIONS]
    x = image((1, 16, 12, 12))

    def fn(x: torch.Tensor) -> torch.Tensor:
        for conv, act in zip(convs, ACTIVATIONS.values(), strict=True):
            x = act(conv(x))
        return x

    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu")(x)
    assert [name for name in seen[0].program.sources if "winograd" in name] == ["winograd_float.cpp"]
    torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("where", ["x", "weight"])
@torch.no_grad()
def test_not_finite(where: str, freeze: bool, dtype: torch.dtype, act: str) -> None:
    """What is not finite, or overflows on the way, stays in its own window; all else is as ever."""
    conv, x = conv_of(8, 8, 1).to(dtype), image((1, 8, 12, 12)).to(dtype)
    other = image((1, 8, 12, 12)).to(dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[act](conv(x) + other)

    run, calls = compiled(fn, x, freeze=freeze)
    assert calls == ["conv: Winograd"]
    rtol = atol = 1e-5 if dtype == torch.float32 else 3e-2
    for value in (INF, -INF, float("nan"), torch.finfo(dtype).max):
        bad, kept = x.clone(), conv.weight.clone()
        (bad[0, 2] if where == "x" else conv.weight[3, 2])[1, 1] = value
        got, eager = run(bad), fn(bad)
        torch.testing.assert_close(got, eager, rtol=rtol, atol=atol, equal_nan=True)
        assert not conv(bad).isfinite().all() or math.isfinite(value)
        conv.weight.copy_(kept)
    torch.testing.assert_close(run(x), fn(x), rtol=rtol, atol=atol)


@torch.no_grad()
def test_images_that_lie_elsewhere() -> None:
    """Channels of a larger image, and weights in another order."""
    x = torch.randn(2, 40, 10, 9).contiguous(memory_format=torch.channels_last)
    wide = torch.randn(24, 3, 3, 48)
    weights = [wide[..., 8:40].permute(0, 3, 1, 2), torch.randn(32, 24, 3, 3).transpose(0, 1)]

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x[:, 4:36], weight, padding=1)

    for weight in weights:
        run, calls = compiled(fn, x, weight)
        assert calls == ["conv: Winograd"]
        exact = fn(x.double(), weight.double())
        close(run(x, weight), fn(x.contiguous(), weight.contiguous()), exact)


@torch.no_grad()
def test_sizes_that_vary() -> None:
    conv = conv_of(16, 24, 1)
    run, calls = compiled(conv, image((2, 16, 12, 10)), dynamic=True)
    assert calls == ["conv: Winograd"]
    for shape in ((3, 16, 9, 17), (5, 16, 6, 31), (4, 16, 40, 41)):  # few tiles, and many
        x = image(shape)
        close(run(x), conv(x), conv.double()(x.double()))
        conv.float()


def test_an_empty_batch() -> None:
    conv, x = conv_of(16, 16, 1), image((0, 16, 12, 12)).requires_grad_()
    run = torch.compile(conv, backend="dicp_cpu")
    y = run(x)
    assert y.shape == conv(x).shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("how", [dict(stride=2), dict(dilation=2), dict(groups=2), dict(padding=3)])
@torch.no_grad()
def test_others_are_the_librarys(how: dict[str, int]) -> None:
    conv, x = torch.nn.Conv2d(16, 16, 3, **how), image((1, 16, 12, 12))  # type: ignore[arg-type]
    assert "conv: Winograd" not in compiled(conv, x)[1]


@torch.no_grad()
def test_numerics_eager_calls_what_eager_calls() -> None:
    run = torch.compile(conv_of(16, 16, 1), backend="dicp_cpu", options={"numerics": "eager"})
    seen: list[Compiled] = []
    with observe(seen.append):
        run(image((1, 16, 12, 12)))
    assert [c.claim.name for c in seen[0].program.library_calls] == ["convolution: oneDNN"]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_constant_weights_stay_as_they_lie(dtype: torch.dtype) -> None:
    """They are transformed at each call, which reads less than what the transform makes."""
    conv, x = conv_of(16, 16, 1).to(dtype), image((1, 16, 12, 12)).to(dtype)
    seen: list[Compiled] = []
    run = torch.compile(conv, backend="dicp_cpu", options={"freeze": True})
    with observe(seen.append):
        run(x)
    (frozen,) = seen
    assert frozen.constants is None
    conv.weight.mul_(2)
    rtol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(run(x), conv(x), rtol=rtol, atol=rtol)


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="no bf16 here")
@torch.no_grad()
def test_a_bias_of_another_dtype() -> None:
    """That of a norm folded into bf16, which is float32; also where something is not finite."""
    layers = torch.nn.Sequential(conv_of(16, 24, 1, bias=False), torch.nn.BatchNorm2d(24)).eval().bfloat16()
    layers[1].running_mean.normal_()
    x = image((2, 16, 12, 12)).bfloat16()
    run, calls = compiled(layers, x, freeze=True)
    assert calls == ["conv: Winograd"]
    exact = layers.double()(x.double())
    layers.bfloat16()
    close(run(x), layers(x), exact)
    x[0, 3, 4, 5] = INF
    torch.testing.assert_close(run(x), layers(x), rtol=3e-2, atol=3e-2, equal_nan=True)


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="no bf16 of oneDNN here")
@torch.no_grad()
def test_one_unit_serves_all_biases() -> None:
    """In bf16: that of a folded norm, one of the images' dtype, none."""
    folded = torch.nn.Sequential(conv_of(16, 24, 1, bias=False), torch.nn.BatchNorm2d(24))
    folded[1].running_mean.normal_()
    layers = torch.nn.Sequential(folded, conv_of(24, 16, 1), conv_of(16, 16, 1, bias=False)).eval().bfloat16()
    x, seen = image((2, 16, 12, 12)).bfloat16(), []
    with observe(seen.append):
        got = torch.compile(layers, backend="dicp_cpu")(x)
    assert [name for name in seen[0].program.sources if "winograd" in name] == ["winograd_bf16.cpp"]
    close(got, layers(x), layers.double()(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["even", "odd sizes", "wide padding", "several blocks", "many tiles"])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    shape, results, padding, kind = CASES[name]
    conv, x = conv_of(shape[1], results, padding).to(dtype), image(shape, kind).to(dtype).requires_grad_()
    grad = image(tuple(conv(x).shape)).to(dtype)

    def step(conv: torch.nn.Module, run: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(run(x), [x, *conv.parameters()], grad))

    seen: list[Compiled] = []
    with observe(seen.append):
        got = step(conv, torch.compile(conv, backend="dicp_cpu"), x, grad)
    calls = [c.claim.name for s in seen for c in s.program.library_calls]
    assert "convolution_backward: Winograd" in calls
    eager = step(conv, conv, x, grad)
    rows = step(
        conv, conv, x.contiguous(), grad.contiguous()
    )  # other kernels, as near to the truth as eager is
    conv.double()
    for mine, theirs, other, exact in zip(
        got, eager, rows, step(conv, conv, x.double(), grad.double()), strict=True
    ):
        worst = max(theirs, other, key=lambda e: (e.double() - exact).abs().max().item())
        close(mine, worst, exact)
        assert mine.shape == theirs.shape and (mine.dim() == 1 or mine.stride()[1:] == theirs.stride()[1:])


def test_gradients_that_are_not_finite() -> None:
    conv, x = conv_of(8, 8, 1), image((1, 8, 12, 12)).requires_grad_()
    run = torch.compile(conv, backend="dicp_cpu")
    for value in (INF, float("nan"), torch.finfo(torch.float32).max):
        grad = image((1, 8, 12, 12))
        grad[0, 3, 4, 4] = value
        got, eager = (torch.autograd.grad(fn(x), x, grad)[0] for fn in (run, conv))
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
