"""What follows a convolution inside oneDNN's call, and what does not fit there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe


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
