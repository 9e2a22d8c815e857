"""What follows a convolution inside oneDNN's call, what does not fit there, and patches, which are products."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims.common import channels_last, onednn_has


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("act", [torch.relu, torch.sigmoid, F.gelu])
def test_activation_of_a_sum(act: Callable[[torch.Tensor], torch.Tensor], freeze: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(4, 4, 3, padding=1)
    x, graphs = torch.randn(2, 4, 8, 8), []  # type: ignore[var-annotated]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return act(conv(x) + x)

    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(fn, backend="dicp_cpu", options={"freeze": freeze})(x)
        torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    assert isinstance(graph, Compiled) and len(graph.program.library_calls) == 1
    origins = [o for launch in graph.program.launches for o in launch.kernel.origins]
    inside = freeze and act is torch.relu  # by bounds of what is added (test_rectified.py)
    assert any(o.startswith(("relu", "sigmoid", "gelu")) for o in origins) != inside


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("act", [torch.relu, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.relu6])
def test_an_activation_keeps_nan(act: Callable[[torch.Tensor], torch.Tensor], freeze: bool) -> None:
    torch._dynamo.reset()
    a, b = (torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    c, d = (torch.nn.Linear(8, 8) for _ in range(2))
    x = torch.randn(2, 4, 8, 8)
    x[0, 0, 3, 3] = float("nan")

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return act(a(x)), act(b(x) + x), act(c(x)), act(d(x) + x)

    with torch.no_grad():
        got = torch.compile(fn, backend="dicp_cpu", options={"freeze": freeze})(x)
        for mine, theirs in zip(got, fn(x), strict=True):
            assert theirs.isnan().any() and torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("act", ["none", "relu"])
@torch.no_grad()
def test_what_is_added_is_written_over(act: str, freeze: bool) -> None:
    """Residuals of convolutions one behind the other; NaN goes through, and an input is never written."""
    torch.manual_seed(1)
    convs = [torch.nn.Conv2d(12, 12, 3, padding=1, stride=1, dilation=1, groups=3) for _ in range(4)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv in convs:
            y = torch.relu(conv(y.sin()) + y) if act == "relu" else conv(y.sin()) + y
        return y + 1

    torch._dynamo.reset()
    seen: list[Compiled] = []
    run = torch.compile(fn, backend="dicp_cpu", options={"freeze": freeze})
    x = torch.randn(2, 12, 9, 8).contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    with observe(seen.append):
        run(x)
    native = "".join(text for name, text in seen[-1].program.sources.items() if "segment" in name)
    assert "convolution_pointwise_binary_(" in native  # all but the first, which adds the input
    bad = x.clone()
    bad[1, 3, 4, 4] = float("nan")
    for image in (x, bad):
        torch.testing.assert_close(run(image), fn(image), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [d for d in (torch.float32, torch.bfloat16) if onednn_has(d)])
@pytest.mark.parametrize("how", ["inference", "freeze", "training"])
def test_patches_of_images_are_a_product(how: str, dtype: torch.dtype) -> None:
    """As vision transformers cut them; in bf16 the weight's gradient as well. Not of many channels."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    image = torch.nn.Conv2d(3, 40, 8, 8, dtype=dtype)
    down = torch.nn.Conv2d(40, 48, 2, 2, dtype=dtype)
    x, graphs = torch.randn(40, 3, 64, 64).to(dtype), []  # type: ignore[var-annotated]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return down(image(x))

    options = {"freeze": how == "freeze"}
    with torch.set_grad_enabled(how == "training"), observe(graphs.append):
        run = torch.compile(fn, backend="dicp_cpu", options=options)
        got, eager = run(x), fn(x)
        mine, theirs = [got], [eager]
        if how == "training":
            mine += torch.autograd.grad([got.float().sum()], list(image.parameters()))
            theirs += torch.autograd.grad([eager.float().sum()], list(image.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        unit = torch.finfo(dtype).eps * b.detach().abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=8 * unit)
    calls = [c.claim.name.split(":")[0] for g in graphs for c in g.program.library_calls]
    assert sum(c in ("conv", "convolution") for c in calls) == 1
    if how == "training":  # of the second layer's image, and in float32 of the two weights
        assert calls.count("convolution_backward") == (1 if dtype == torch.bfloat16 else 2)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    ("x", "window", "padding", "product"),
    [
        ((1, 6, 14, 14), (16, 6, 5, 5), 0, True),
        ((1, 32, 20, 20), (64, 32, 4, 4), 0, False),  # 289 positions, and few weights to bring into order
        ((1, 32, 11, 11), (64, 32, 4, 4), 0, True),
        ((1, 4, 32, 32), (16, 4, 5, 5), 0, True),  # a few colours
        ((1, 6, 32, 32), (16, 6, 5, 5), 0, False),
        ((1, 6, 14, 14), (16, 6, 5, 5), 2, False),  # row-major, with a border
    ],
)
def test_few_windows_are_gathered_for_a_product(
    x: tuple[int, ...], window: tuple[int, ...], padding: int, product: bool, freeze: bool
) -> None:
    """However the image lies, where what oneDNN's call costs besides multiplying is more; with a ReLU behind,
    which a convolution by a frozen weight would have inside."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    image, graphs = torch.randn(x), []  # type: ignore[var-annotated]
    conv = torch.nn.Conv2d(window[1], window[0], window[2], padding=padding)
    model = torch.nn.Sequential(conv, torch.nn.ReLU())
    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(model, backend="dicp_cpu", options={"freeze": freeze})(image)
        want = copy.deepcopy(model).double()(image.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert got.stride() == want.stride()
    (call,) = [c.claim.name.split(":")[0] for g in graphs for c in g.program.library_calls]
    assert (call not in ("conv", "convolution")) == product


def test_a_weight_that_is_packed_makes_images_channels_last() -> None:
    """Row-major it would be brought into oneDNN's order at each call. What is gathered keeps its own order."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    layers = (torch.nn.Conv2d(4, 16, 4, 4), torch.nn.ReLU(), torch.nn.Conv2d(16, 64, 5, 2), torch.nn.ReLU())
    model, x, graphs = torch.nn.Sequential(*layers), torch.randn(1, 4, 128, 128), []  # type: ignore[var-annotated]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean((2, 3))

    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(fn, backend="dicp_cpu", options={"freeze": True})(x)
        torch.testing.assert_close(got, fn(x))
    (graph,) = graphs
    assert [form for form in graph.folding.forms if form] == [graph.folding.forms[-1]]
    calls = [c.claim.name.split(":")[0] for c in graph.program.library_calls]
    assert len(calls) == 2 and calls.count("conv") == 1


def test_gradients_of_what_lies_half_channels_last() -> None:
    """What comes back to the first convolution is channels-last, its image row-major."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Conv2d(4, 32, 8, 4), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 4, 2))
    layers = layers.to(memory_format=torch.channels_last)
    x, graphs = torch.rand(32, 4, 52, 52), []  # type: ignore[var-annotated]

    def fn(x: torch.Tensor, layers: torch.nn.Module) -> torch.Tensor:
        return layers(x).square().mean()

    with observe(graphs.append):
        loss = torch.compile(fn, backend="dicp_cpu")(x, layers)
        got = torch.autograd.grad(loss, list(layers.parameters()))
    exact = copy.deepcopy(layers).double()
    want = torch.autograd.grad(fn(x.double(), exact), list(exact.parameters()))
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    calls = graphs[-1].program.library_calls
    gradients = [c for c in calls if c.claim.name.startswith("convolution_backward")]
    assert len(gradients) == 2
    assert all(channels_last(operand) for c in gradients for operand in c.args[:2])


@pytest.mark.parametrize("why", ["the weight's order", "the bias's dtype"])
def test_patches_that_cannot_be_a_product_are_packed(why: str) -> None:
    """A frozen weight is packed for the convolution that stays one."""
    torch._dynamo.reset()
    if why == "the bias's dtype":
        if not onednn_has(torch.bfloat16):
            pytest.skip("no bf16 in oneDNN on this processor")
        conv: torch.nn.Module = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 8, 8), torch.nn.BatchNorm2d(32))
        conv, x = conv.eval().to(torch.bfloat16), torch.randn(2, 3, 32, 32).to(torch.bfloat16)
    else:
        conv = torch.nn.Conv2d(3, 32, 8, 8).to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 32, 32)
    x = x.contiguous(memory_format=torch.channels_last)  # else none is packed
    graphs: list[Compiled] = []
    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(conv, backend="dicp_cpu", options={"freeze": True})(x)
        torch.testing.assert_close(got, conv(x), rtol=2e-2, atol=2e-2)
    (graph,) = graphs
    assert [c.claim.name.split(":")[0] for c in graph.program.library_calls] == ["conv"]
    assert graph.folding is not None and any(f for f in graph.folding.forms if f and "conv" in f)


@pytest.mark.parametrize(
    "channels, of_image, numerics", [(3, False, "fast"), (15, True, "fast"), (15, True, "eager"), (16, True, "fast")]
)
def test_a_strided_point_of_few_channels_is_no_gradient_of_onednn(
    channels: int, of_image: bool, numerics: str
) -> None:
    """Which would write past its memory or never end (uxlfoundation/oneDNN#6035), as eager does with this
    layout. Looked at before it runs."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    conv = torch.nn.Conv2d(channels, 24, 1, 2).to(memory_format=torch.channels_last)
    x = torch.randn(2, channels, 64, 62).contiguous(memory_format=torch.channels_last)
    x.requires_grad_(of_image)
    given = [conv.weight, conv.bias, *[x] * of_image]
    seen = []

    def look(graph: Compiled) -> None:
        calls = [c for c in graph.program.library_calls if c.claim.name.startswith("convolution_backward")]
        of_weight = [c for c in calls if c.args[10][1]]
        seen.extend(channels_last(c.args[1]) and list(c.args[4]) != [1, 1] for c in of_weight)
        assert not any(seen) or channels == 16

    with observe(look):
        run = torch.compile(conv, backend="dicp_cpu", options={"numerics": numerics})
        got = torch.autograd.grad(run(x).square().mean(), given)
    assert seen == [channels == 16]
    loss = conv.double()(x.double()).square().mean()
    exact = torch.autograd.grad(loss, given)
    for mine, true in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), true.double(), rtol=1e-4, atol=1e-6)
