"""Combinations of operations that kernels compute in a shorter way: which are found, and how exact they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from lowered import compiled
from torch import Tensor

from dicp.config import Config
from dicp.vendor.cpu_graph.assemble import kernel_units

FAR = [0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 3e5, -3e5, 1e30, -1e30, math.inf, -math.inf, math.nan]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def source(
    f: Callable[[Tensor], Tensor], numerics: Literal["fast", "eager"] = "fast", shape: tuple[int, ...] = (40,)
) -> str:
    """The C++ of a function's kernels, without comments: they quote the lines of this file."""
    program = compiled(f, shape, numerics=numerics)
    units = kernel_units(program, Config(numerics=numerics))
    return re.sub("//.*", "", "\n".join(unit.source for unit in units))


@pytest.mark.parametrize("word", ["erf", "tanh"])
def test_one_and_an_odd_function(word: str) -> None:
    odd = getattr(torch, word)
    short = f"one_plus_{word}("
    assert short in source(lambda x: 1 + odd(x)) and short in source(lambda x: odd(x * 3) + 1.0)
    assert short not in source(lambda x: 2 + odd(x)) and short not in source(lambda x: 1 - odd(x))
    assert short not in source(lambda x: 1 + odd(x), "eager")


@pytest.mark.parametrize(
    ("f", "most"),
    [(lambda x: 1 + torch.erf(x), 4e-7), (lambda x: 1 + torch.tanh(x), 2e-7)],
    ids=["erf", "tanh"],
)
def test_error_from_end_to_end(f: Callable[[Tensor], Tensor], most: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.randn(10_001), torch.tensor(FAR)])
    error = (torch.compile(f, backend="dicp_cpu")(x).double() - f(x.double())).abs()
    assert error[~x.isnan()].max() <= most and error[x.isnan()].isnan().all()


@pytest.mark.parametrize(("approximate", "most"), [("none", 2.3e-7), ("tanh", 1.5e-7)])
def test_gelu_is_exact(approximate: str, most: float) -> None:
    """To two units in the last place of x, or of 1 near 0; far from 0 wholly."""

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate=approximate)

    x, far = torch.linspace(-6, 6, 300_001), torch.tensor(FAR)
    error = (torch.compile(gelu, backend="dicp_cpu")(x).double() - gelu(x.double())).abs()
    assert (error / x.double().abs().clamp_min(1)).max() <= most
    # eager makes NaN of infinity on some processors
    torch.testing.assert_close(torch.compile(gelu, backend="dicp_cpu")(far), gelu(far.double()).float(), equal_nan=True,
                               rtol=2e-7, atol=0)


def test_a_number_alone() -> None:
    """What does not differ between the lanes of a vector is a float."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + torch.erf(x.sum())) * (1 + torch.tanh(x.sum()))

    x, y = torch.randn(3), torch.randn(100)
    torch.testing.assert_close(torch.compile(f, backend="dicp_cpu")(x, y), f(x, y))


def test_softmax() -> None:
    assert "exp_normal(" in source(lambda x: x.softmax(0))
    assert "exp_normal(" not in source(lambda x: x.softmax(0), "eager")
    assert "exp_normal(" not in source(lambda x: torch.exp(x - x.sum()))


def test_parts_of_a_softmax() -> None:
    """Of rows whose parts underflow, or are masked; NaN where eager has it."""
    x = torch.randn(6, 300) * 30
    x[0, :299], x[1, 5], x[2, :], x[3, 7], x[4, ::2] = -math.inf, math.nan, -math.inf, math.inf, -2e38
    x[5, 0], x[5, 1:] = 0.0, torch.linspace(-110, -80, 299)
    found = torch.compile(lambda x: x.softmax(-1), backend="dicp_cpu")(x)
    torch.testing.assert_close(found, x.softmax(-1), rtol=1e-6, atol=2**-126, equal_nan=True)


@pytest.mark.parametrize("f", [torch.sigmoid, F.silu], ids=["sigmoid", "silu"])
def test_sigmoid_from_end_to_end(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([torch.linspace(-120, 120, 20_001), torch.tensor(FAR)])
    found = torch.compile(lambda x: f(x), backend="dicp_cpu")(x)
    torch.testing.assert_close(found, f(x), rtol=4e-7, atol=2**-120, equal_nan=True)


def test_what_costs_much_is_kept_between_the_passes_of_a_row() -> None:
    """And the maximum of a long row is taken in parts, since a comparison waits for the one before it."""
    code = source(lambda x: x.softmax(-1), shape=(2, 4096))
    assert code.count("exp_normal(") == 1 and "largest(" in code


@pytest.mark.parametrize("word", ["amax", "amin", "sum"])
def test_extremes_of_long_rows(word: str) -> None:
    x = torch.randn(7, 4096)
    x[2, 4095], x[3, 77], x[4, 0] = math.nan, math.inf, -math.inf
    f = getattr(torch, word)
    found = torch.compile(lambda x: f(x, -1), backend="dicp_cpu")(x)
    torch.testing.assert_close(found, f(x, -1), equal_nan=True)


@pytest.mark.parametrize("isa", ["auto", "avx2", "portable"])
def test_no_part_of_a_softmax_is_subnormal(isa: str) -> None:
    """What is multiplied by such a float takes Intel's processors some 150 cycles; all of what follows a masked
    softmax would."""
    x = torch.linspace(-105, 0, 4099)
    parts = torch.compile(lambda x: (x - 0.0).softmax(0), backend="dicp_cpu", options={"isa": isa})(x)
    tiny = torch.finfo(torch.float32).tiny
    assert bool(((parts == 0) | (parts >= tiny / 128)).all()) and bool((parts[:500] == 0).all())
    exact = x.double().softmax(0)
    torch.testing.assert_close(parts.double(), exact, rtol=1e-6, atol=2 * tiny)
