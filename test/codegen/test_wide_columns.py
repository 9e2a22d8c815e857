"""Kernels that reduce along columns compute several vectors of them at a time, through all their passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lowered import compiled
from torch import Tensor

from dicp.vendor.cpu_graph.codegen import emit

BACKWARD = torch.ops.aten._softmax_backward_data.default
CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "softmax": (lambda x: x.softmax(0), ((300, 1024),)),
    "its gradient": (lambda g, y: BACKWARD(g, y, 0, torch.float32), ((300, 1024), (300, 1024))),
    "log_softmax over channels": (lambda x: x.log_softmax(1), ((2, 70, 32, 32),)),
    "layer norm over channels": (
        lambda x: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1e-6),
        ((2, 70, 32, 32),),
    ),
    "with a factor for each column": (lambda x, w: (x - x.mean(0)) * w.exp(), ((300, 1024), (1024,))),
    "arguments": (lambda x: x - x.argmax(0) + x.amin(0), ((300, 1024),)),
    "integers": (lambda x: x // (1 + x.sum(0).abs()), ((300, 1024),)),
    "under a condition": (lambda x: F.pad(x, (0, 0, 3, 2)).softmax(0), ((300, 1024),)),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    f, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    if name == "integers":
        inputs = [torch.randint(-99, 99, shape, dtype=torch.int32) for shape in shapes]
    found, exact = torch.compile(f, backend="dicp_cpu")(*inputs), f(*(x.double() for x in inputs))
    assert (found.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def source(f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> str:
    return "\n".join(emit(launch.kernel, "f", 8) for launch in compiled(f, *shapes).launches)


@pytest.mark.parametrize(
    ("shape", "at_once"),
    [((300, 1024), 8), ((300, 1056), 4), ((300, 1032), 0), ((300, 512), 4), ((300, 256), 0), ((30, 1024), 0)],
    ids=["lines", "fewer", "not whole", "few blocks", "fewest", "few rows"],
)
def test_how_many(shape: tuple[int, int], at_once: int) -> None:
    code = source(lambda x: x.softmax(0), shape)
    assert code.count(f"block += {at_once} * LANES") == bool(at_once)


def test_what_is_of_a_column_is_computed_once() -> None:
    code = source(lambda x: x.log_softmax(0), (300, 1024))
    last_pass = code[code.rindex("for (int64_t i1") :]
    assert "log(" in code and "log(" not in last_pass
