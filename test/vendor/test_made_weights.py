"""Products of one row with weights that kernels make: of few bits, packed as models pack them. Against float64, no
further from it than twice eager; and without a weight in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.dynamo_bridge.backend import dicp_cpu, dicp_cuda
from dicp.schedule.kernels import Launch

ROWS, DEPTH, GROUP = 96, 256, 64
BACKENDS = {"cpu": (dicp_cpu, {}), "cuda": (dicp_cuda, {"interpret": True})}
Fn = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def halves(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two rows of four bits in each byte: one of the upper half of all groups, one of the lower half."""
    count = ROWS * DEPTH // GROUP
    w = torch.randint(0, 256, (count // 2, GROUP), dtype=torch.uint8)
    return w, 16 * torch.rand(count, 1).to(dtype), torch.rand(count, 1).to(dtype)


def product_of_halves(x: torch.Tensor, w: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(2 * w.shape[0], w.shape[1], dtype=torch.uint8)
    whole[: w.shape[0]] = (w & 0xF0) >> 4
    whole[w.shape[0] :] = w & 0x0F
    return x @ ((whole.to(x.dtype) - zero) * scale).reshape(ROWS, DEPTH).t()


def words(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Eight numbers of four bits along the depth in each word of 32 bits."""
    w = torch.randint(-(2**31), 2**31, (DEPTH // 8, ROWS), dtype=torch.int32)
    zero = torch.randint(0, 16, (DEPTH // GROUP, 1, ROWS), dtype=torch.int32)
    return w, zero, torch.rand(DEPTH // GROUP, 1, ROWS).to(dtype)


def product_of_words(x: torch.Tensor, w: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    bits = (w.unsqueeze(1) >> torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1)) & 15
    return x @ ((bits.reshape(-1, GROUP, ROWS) - zero) * scale).reshape(DEPTH, ROWS)


def corrected(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    w, change = (torch.randn(ROWS, DEPTH).to(dtype) for _ in range(2))
    return w, change, torch.randn(ROWS).to(dtype)


def product_corrected(x: torch.Tensor, w: torch.Tensor, change: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w + 0.25 * change, bias))


CASES: dict[str, tuple[Any, Fn]] = {
    "halves": (halves, product_of_halves),
    "words": (words, product_of_words),
    "corrected": (corrected, product_corrected),
}


@pytest.mark.parametrize("vendor", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_one_row(case: str, dtype: torch.dtype, vendor: str) -> None:
    make, fn = CASES[case]
    x = torch.randn(1, DEPTH).to(dtype)
    operands = make(dtype)
    backend, options = BACKENDS[vendor]
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend=backend, options=options)(x, *operands)
    (program,) = (s.program for s in seen)
    assert len(program.items) == 1 and isinstance(program.items[0], Launch)
    eager = fn(x, *operands)
    exact = fn(*(t.double() if t.is_floating_point() else t for t in (x, *operands)))
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    mine, theirs = ((t.double() - exact).norm() / exact.norm() for t in (got, eager))
    assert mine <= 2 * theirs + torch.finfo(torch.float32).eps, f"{mine:.2e}, eager {theirs:.2e}"


def test_one_row_as_eager_rounds() -> None:
    x = torch.randn(1, DEPTH).to(torch.bfloat16)
    operands = halves(x.dtype)
    got = torch.compile(product_of_halves, backend="dicp_cpu", options={"numerics": "eager"})(x, *operands)
    assert torch.equal(got, product_of_halves(x, *operands))
