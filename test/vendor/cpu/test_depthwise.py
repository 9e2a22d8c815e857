"""Depthwise convolutions and their gradients by the templates: against float64 under the rule of all tests (no further
from it than twice eager), what is not finite, and which of them they serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims.common import onednn_has
from dicp.vendor.cpu_graph.toolchain import cpu_flags

DTYPES = [d for d in (torch.float32, torch.bfloat16) if onednn_has(d)]
OWN, LIBRARY = "convolution_backward: depthwise", "convolution_backward: oneDNN"
FORWARD, FORWARD_LIBRARY = "conv: depthwise", "conv: oneDNN"
WIDE = "avx512f" in cpu_flags()  # elsewhere the library is asked for what slides


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield


# channels, height, width, window, stride, padding, dilation
CASES: dict[str, tuple[int, int, int, Any, Any, Any, Any]] = {
    "3x3": (32, 9, 12, 3, 1, 1, 1),
    "3x3 with stride": (32, 12, 9, 3, 2, 1, 1),
    "7x7": (48, 14, 13, 7, 1, 3, 1),
    "7x7 larger than the image": (16, 5, 4, 7, 1, 3, 1),
    "odd channels": (37, 9, 9, 5, 1, 2, 1),
    "more channels than a task has": (150, 8, 8, 3, 2, 1, 1),
    "wide": (16, 8, 30, (1, 17), 1, (0, 8), 1),
    "groups of channels": (300, 6, 15, 7, 1, 3, 1),
    "columns that are no multiple": (32, 5, 23, 3, 1, 1, 1),
    "two columns": (32, 7, 2, 3, 1, 1, 1),
    "even window": (16, 10, 10, (4, 2), (2, 1), (2, 0), 1),
    "dilated": (16, 17, 15, 3, 1, 2, 2),
    "dilated with stride": (16, 17, 15, 3, (2, 3), (4, 2), (4, 2)),
    "no padding": (16, 11, 11, 5, 1, 0, 1),
    "padding wider than the window": (16, 5, 5, 3, 2, 4, 1),
    "stride wider than the window": (16, 13, 13, 2, 3, 0, 1),
}


def conv_of(case: str, dtype: torch.dtype = torch.float32) -> torch.nn.Conv2d:
    channels, _, _, *how = CASES[case]
    return torch.nn.Conv2d(channels, channels, *how, groups=channels, dtype=dtype)


def image(case: str, dtype: torch.dtype = torch.float32, batch: int = 3) -> torch.Tensor:
    x = torch.randn(batch, *CASES[case][:3]).to(dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def gradients(conv: Any, x: torch.Tensor, grad: torch.Tensor, run: Any = None) -> list[torch.Tensor]:
    """Of the image, the weight and the bias."""
    return list(torch.autograd.grad([(conv if run is None else run)(x)], [x, *conv.parameters()], [grad]))


def compiled(conv: Any, x: torch.Tensor, grad: torch.Tensor, **how: Any) -> tuple[Any, list[str]]:
    """The convolution, and the names of the calls in what its gradients compiled."""
    seen: list[Compiled] = []
    run = torch.compile(conv, backend="dicp_cpu", **how)
    with observe(seen.append):
        gradients(conv, x, grad, run)
    return run, [c.claim.name for s in seen for c in s.program.library_calls if "backward" in c.claim.name]


def close(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.dtype == eager.dtype and got.shape == eager.shape
    unit = 4 * torch.finfo(got.dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit, f"{mine:.2e} from float64, eager {theirs:.2e}"


def check(conv: Any, x: torch.Tensor, grad: torch.Tensor, run: Any) -> None:
    wide = copy.deepcopy(conv).double()
    exact = gradients(wide, x.detach().double().requires_grad_(), grad.double())
    for found in zip(gradients(conv, x, grad, run), gradients(conv, x, grad), exact, strict=True):
        close(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, dtype: torch.dtype) -> None:
    conv, x = conv_of(case, dtype), image(case, dtype)
    grad = torch.randn_like(conv(x))
    run, calls = compiled(conv, x, grad)
    assert sorted(calls) == sorted([OWN, OWN if max(conv.stride) > 1 or WIDE and slides(conv) else LIBRARY])
    check(conv, x, grad, run)


def slides(conv: torch.nn.Conv2d) -> bool:
    """Whether the template of the convolution itself serves it."""
    return {*conv.stride, *conv.dilation} == {1}


def forward(fn: Any, *args: torch.Tensor, **how: Any) -> tuple[torch.Tensor, list[str]]:
    """What fn gives compiled, and the names of its calls of convolutions."""
    seen: list[Compiled] = []
    with observe(seen.append), torch.no_grad():
        got = torch.compile(fn, backend="dicp_cpu", **how)(*args)
    return got, [c.claim.name for s in seen for c in s.program.library_calls if c.claim.name.startswith("conv")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_forward(case: str, dtype: torch.dtype) -> None:
    conv, x = conv_of(case, dtype), image(case, dtype).detach()
    got, calls = forward(conv, x)
    assert calls == [FORWARD if WIDE and slides(conv) else FORWARD_LIBRARY]
    with torch.no_grad():
        close(got, conv(x), copy.deepcopy(conv).double()(x.double()))


ACTS: dict[str, Any] = {
    "relu": torch.relu,
    "relu6": torch.nn.functional.relu6,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "hardswish": torch.nn.functional.hardswish,  # a kernel behind the call
}


@pytest.mark.skipif(not WIDE, reason="the library is asked where vectors are not of 512 bits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_what_follows_the_sums(act: str, dtype: torch.dtype) -> None:
    """A norm, folded into weights and a bias that is float32, and an activation."""
    conv, x = conv_of("odd channels", dtype), image("odd channels", dtype).detach()
    norm = torch.nn.BatchNorm2d(37, dtype=dtype).eval()
    with torch.no_grad():
        for v in (norm.weight, norm.bias, norm.running_mean):
            v.copy_(torch.randn_like(v))
    model = torch.nn.Sequential(conv, norm).eval()
    got, calls = forward(lambda x: ACTS[act](model(x)), x)
    assert calls == [FORWARD]
    with torch.no_grad():
        eager, exact = ACTS[act](model(x)), ACTS[act](copy.deepcopy(model).double()(x.double()))
    close(got, eager, exact)
    x[0, 0, 0, 0] = float("nan")
    torch._dynamo.reset()
    assert (forward(lambda x: ACTS[act](model(x)), x)[0].isnan() == ACTS[act](model(x)).isnan()).all()


@pytest.mark.skipif(not WIDE, reason="the library is asked where vectors are not of 512 bits")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual(dtype: torch.dtype) -> None:
    """Of other strides, and with columns that are computed twice."""
    conv, x = conv_of("columns that are no multiple", dtype), image("columns that are no multiple", dtype).detach()
    other = torch.randn(3, 5, 23, 64).to(dtype)[..., 16:48].permute(0, 3, 1, 2)

    def fn(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.relu(conv(x) + other)

    got, calls = forward(fn, x, other)
    assert calls == [FORWARD]
    eager = fn(x, other)
    conv.double()
    close(got, eager, fn(x.double(), other.double()))


@pytest.mark.skipif(not WIDE, reason="the library is asked where vectors are not of 512 bits")
def test_frozen_weights_stay_as_they_are() -> None:
    conv, x = conv_of("7x7").eval(), image("7x7").detach()
    got, calls = forward(conv, x, options={"freeze": True})
    assert calls == [FORWARD]
    with torch.no_grad():
        close(got, conv(x), copy.deepcopy(conv).double()(x.double()))


def test_a_weight_that_lies_otherwise() -> None:
    """Every second element of larger windows, whose rows are not dense."""
    x, weights = image("3x3").detach(), torch.randn(32, 1, 6, 6)

    def fn(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, weights[:, :, ::2, ::2], padding=1, groups=32)

    got, calls = forward(fn, x, weights)
    assert calls == [FORWARD if WIDE else FORWARD_LIBRARY]
    close(got, fn(x, weights), fn(x.double(), weights.double()))


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa: str) -> None:
    for case in ("7x7", "3x3 with stride", "odd channels"):
        torch._dynamo.reset()
        conv, x = conv_of(case), image(case)
        grad = torch.randn_like(conv(x))
        run, calls = compiled(conv, x, grad, options={"isa": isa})
        assert OWN in calls
        check(conv, x, grad, run)
        got, calls = forward(conv, x.detach(), options={"isa": isa})
        assert calls == [FORWARD if WIDE and slides(conv) else FORWARD_LIBRARY]  # by what the processor has
        with torch.no_grad():
            close(got, conv(x), copy.deepcopy(conv).double()(x.double()))


@pytest.mark.parametrize("asked", [(True, False), (False, True)])
def test_one_gradient_alone(asked: tuple[bool, bool]) -> None:
    conv, x = conv_of("3x3 with stride"), image("3x3 with stride")
    grad = torch.randn_like(conv(x))

    def fn(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
        how = ([2, 2], [1, 1], [1, 1], False, [0, 0], 32, [*asked, False])
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *how)[asked.index(True)]

    seen: list[Compiled] = []
    with torch.no_grad(), observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu")(x, conv.weight, grad)
        assert [c.claim.name for s in seen for c in s.program.library_calls] == [OWN]
        eager = fn(x, conv.weight, grad)
        close(got, eager, fn(x.double(), conv.weight.double(), grad.double()))
        assert got.stride() == eager.stride()


@pytest.mark.parametrize("case", ["stride wider than the window", "7x7 larger than the image"])
def test_what_is_not_finite_stays_in_its_window(case: str) -> None:
    """At an edge, in the middle, and in what no result has read."""
    conv, x = conv_of(case), image(case)
    grad = torch.randn_like(conv(x))
    run, calls = compiled(conv, x, grad)
    assert calls.count(OWN) == (2 if WIDE or not slides(conv) else 1)
    for value in (float("inf"), float("nan")):
        for at in ((0, 0, 0, 0), (1, 3, 2, 2), (2, 15, 3, 1)):
            bad_x, bad_grad = x.detach().clone(), grad.clone()
            bad_x[at] = bad_grad[at] = value
            bad_x.requires_grad_()
            for xs, gs in ((bad_x, grad), (x, bad_grad)):
                results = gradients(conv, xs, gs, run), gradients(conv, xs, gs), without(conv, x, grad, xs, gs)
                for got, eager, (clean, meets) in zip(*results, strict=True):
                    # some of oneDNN's kernels multiply it by padding, too
                    padded = ~eager.isfinite() & ~meets
                    expected = torch.where(padded, torch.where(got.isfinite(), clean, eager), eager)
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def without(
    conv: Any, x: torch.Tensor, grad: torch.Tensor, bad_x: torch.Tensor, bad_grad: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients without the element that is not finite, and which of their elements it takes part in."""
    clean = [t.detach().nan_to_num(0, 0, 0) for t in (bad_x, bad_grad)]
    marks = [
        torch.ones_like(t) if b.isfinite().all() else (~b.isfinite()).float()
        for t, b in ((x, bad_x), (grad, bad_grad))
    ]
    parts = (gradients(conv, xs.detach().requires_grad_(), gs) for xs, gs in (clean, marks))
    return [(c, m != 0) for c, m in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", ["3x3 with stride", "3x3"])
def test_sizes_that_vary(case: str) -> None:
    conv = conv_of(case)
    x = image(case)
    run, calls = compiled(conv, x, torch.randn_like(conv(x)), dynamic=True)
    assert calls.count(OWN) == (2 if WIDE or not slides(conv) else 1)
    for shape in ((5, 32, 20, 7), (2, 32, 3, 31), (1, 32, 2, 2)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_()
        check(conv, x, torch.randn_like(conv(x)), run)


def test_images_that_lie_elsewhere() -> None:
    """Channels of a larger image, and its every second row."""
    conv = conv_of("3x3 with stride")
    wide = torch.randn(3, 24, 9, 64)

    def fn(wide: torch.Tensor) -> torch.Tensor:
        return conv(wide[:, ::2, :, 16:48].permute(0, 3, 1, 2))

    grad, seen = torch.randn_like(fn(wide)), []  # type: ignore[var-annotated]
    with observe(seen.append):
        run = torch.compile(fn, backend="dicp_cpu")
        (got,) = torch.autograd.grad([run(wide)], [conv.weight], [grad])
    assert OWN in [c.claim.name for s in seen for c in s.program.library_calls]
    (eager,) = torch.autograd.grad([fn(wide)], [conv.weight], [grad])
    conv.double()
    (exact,) = torch.autograd.grad([fn(wide.double())], [conv.weight], [grad.double()])
    close(got, eager, exact)


def test_who_is_asked_otherwise() -> None:
    """The library: for eager's numerics, and for groups of several channels."""
    for groups, options in ((32, {"numerics": "eager"}), (16, {})):
        torch._dynamo.reset()
        conv, x = torch.nn.Conv2d(32, 32, 3, 2, groups=groups), image("3x3 with stride")
        assert set(compiled(conv, x, torch.randn_like(conv(x)), options=options)[1]) == {LIBRARY}
