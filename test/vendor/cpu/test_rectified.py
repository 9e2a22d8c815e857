"""ReLU inside oneDNN's convolutions, and outside where sums may be NaN."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import conv_products
from dicp.vendor.cpu_graph.claims.common import onednn_has

DTYPES = [d for d in (torch.float32, torch.bfloat16) if onednn_has(d)]


class Bottleneck(torch.nn.Module):
    """A 1x1, a depthwise and another 1x1 convolution with norms, around which the image goes; the second dilated,
    so that they are calls of their own."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.wide = torch.nn.Conv2d(channels, 24, 1, bias=False)
        self.deep = torch.nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=24, bias=False)
        self.narrow = torch.nn.Conv2d(24, channels, 1)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(n) for n in (24, 24, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu6(self.norms[0](self.wide(x)))
        y = F.relu6(self.norms[1](self.deep(y)))
        y = self.norms[2](self.narrow(y))
        return F.relu(self.narrow(F.relu(self.wide(y))) + x)


def model(dtype: torch.dtype) -> Bottleneck:
    """One whose norms have statistics."""
    torch.manual_seed(0)
    m = Bottleneck()
    for _ in range(3):
        m(torch.randn(4, 8, 12, 12) + 1)
    return m.eval().requires_grad_(False).to(dtype)


def image(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Two images; the second has something out of the ordinary in one place, or everywhere."""
    x = torch.randn(2, 8, 12, 12)
    if kind == "large":
        x[1] *= 1e36
    elif kind != "ordinary":
        x[1, :, 5, 5] = float(kind)  # of weights of both signs
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def native(graphs: list[Compiled]) -> str:
    """The C++ of a frozen model's main program."""
    return "".join(s for name, s in graphs[-1].program.sources.items() if "segment" in name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ordinary", "nan", "inf", "-inf", "large"])
def test_nan_goes_through(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(conv_products, "halved_by_mkl", lambda: False)  # where it is, the sum's is a product
    m, graphs = model(dtype), []  # type: ignore[var-annotated]
    with torch.no_grad(), observe(graphs.append):
        compiled = torch.compile(m, backend="dicp_cpu", options={"freeze": True})
        compiled(image("ordinary", dtype))
        x = image(kind, dtype)
        got, eager, exact = compiled(x), m(x), copy.deepcopy(m).double()(x.double())
    assert '"hardtanh"' in native(graphs) and native(graphs).count('"relu"') == 2
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    assert eager.isnan().any() == (kind in ("nan", "inf", "-inf"))
    size = exact[exact.isfinite()].abs().max()
    wrong, theirs = ((y.double() - exact).nan_to_num(0, 0, 0).abs().max() for y in (got, eager))
    assert wrong <= 2 * theirs + 4 * torch.finfo(dtype).eps * size


def test_weights_that_are_not_finite() -> None:
    """Each of the three in its turn: what the next convolutions read has no bound."""
    for name in ("wide", "deep", "narrow"):
        torch._dynamo.reset()
        m = model(torch.float32)
        getattr(m, name).weight[2, 0, 0, 0] = math.inf
        getattr(m, name).weight[2, -1, 0, 0] = -math.inf
        x = image("ordinary", torch.float32)
        got = torch.compile(m, backend="dicp_cpu", options={"freeze": True})(x)
        torch.testing.assert_close(got, m(x), rtol=1e-4, atol=1e-4, equal_nan=True)
        assert not m(x).isfinite().all(), name


def test_bounds_that_grow_are_measured_again() -> None:
    """Forty layers of weights whose magnitudes add up to a thousand, and images that stay small."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 1, bias=False) for _ in range(40))
            for layer in self.layers:
                layer.weight.copy_(torch.eye(8)[:, :, None, None])
                layer.weight[0, 1] = 999.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    torch._dynamo.reset()
    with torch.no_grad():
        m, x = Deep(), image("ordinary", torch.float32)
        x[:, 1] = 0  # which would be read a thousand times
        got = torch.compile(m, backend="dicp_cpu", options={"freeze": True})(x)
        assert torch.equal(got, m(x)) and got.max() < 10


def test_inputs_that_are_written_between_calls() -> None:
    """What was measured of an input does not hold for what is written to it."""
    a, b = (torch.nn.Conv2d(8, 8, 1).requires_grad_(False) for _ in range(2))

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.relu(a(x))
        x.copy_((x - x.amin()) / (x - x.amin()))  # NaN in one place
        return first, torch.relu(b(x))

    torch._dynamo.reset()
    with torch.no_grad():
        x, y = (image("ordinary", torch.float32) for _ in range(2))
        x.copy_(y)
        got = torch.compile(f, backend="dicp_cpu", options={"freeze": True})(x)
        for mine, theirs in zip(got, f(y), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert got[1].isnan().any()


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="oneDNN has no bfloat16 on this processor")
@pytest.mark.parametrize("freeze", [False, True])
def test_norms_folded_in_low_precision_are_as_exact_as_eager(freeze: bool) -> None:
    """Their bias stays float32: it is large where means are large beside deviations."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(16, 16, 1, bias=False), torch.nn.BatchNorm2d(16)]
    m = torch.nn.Sequential(*layers)
    with torch.no_grad():
        layers[1].running_mean.normal_(0, 20)  # type: ignore[union-attr, operator]
        layers[1].running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
        m = m.eval().requires_grad_(False).bfloat16()
        errors = torch.zeros(2)
        compiled = torch.compile(m, backend="dicp_cpu", options={"freeze": freeze})
        for seed in range(8):
            x = torch.randn(2, 16, 20, 20, generator=torch.Generator().manual_seed(seed)).bfloat16()
            x = x.contiguous(memory_format=torch.channels_last)
            exact = copy.deepcopy(m).double()(x.double())
            errors += torch.stack([(f(x).double() - exact).norm() for f in (compiled, m)]).float()
    assert errors[0] < 1.05 * errors[1]  # 1.00; with a rounded bias 1.12
