"""The gradient of an embedding table in low precision: against float64, under the rule of all tests (no further
from it than twice eager)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compiler import Compiled, observe
from dicp.schedule.defs import View

LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


def gradient(table: Tensor, index: Tensor, grad: Tensor, backend: str | None, **how: Any) -> Tensor:
    """Of the table, in its dtype."""
    options = how.pop("options", None)
    dynamic = how.pop("dynamic", None)

    def look_up(w: Tensor, i: Tensor) -> Tensor:
        return F.embedding(i, w, **how)

    leaf = table.detach().clone().requires_grad_()
    if backend is not None:
        look_up = torch.compile(look_up, backend=backend, dynamic=dynamic, options=options)
    return torch.autograd.grad(look_up(leaf, index), leaf, grad)[0]


def check(
    rows: int, columns: int, shape: tuple[int, ...], dtype: torch.dtype, claims: int = 1, **how: Any
) -> None:
    table = torch.randn(rows, columns, dtype=dtype)
    index = torch.randint(0, rows, shape, dtype=how.pop("index", torch.int64))
    grad = torch.randn(*shape, columns, dtype=dtype)
    seen: list[Compiled] = []
    with observe(seen.append):
        got = gradient(table, index, grad, "dicp_cpu", **how)
    how = {k: v for k, v in how.items() if k not in ("options", "dynamic")}
    eager = gradient(table, index, grad, None, **how)
    exact = gradient(table.double(), index, grad.double(), None, **how)
    unit = torch.finfo(dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit
    calls = [c.claim.name for s in seen for c in s.program.library_calls]
    assert calls.count("embedding gradient") == claims


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", LOW)
def test_tails_and_rows_nobody_looks_up(dtype: torch.dtype, index: torch.dtype) -> None:
    check(50, 37, (4, 9), dtype, index=index)


@pytest.mark.parametrize("dtype", LOW)
def test_rows_that_many_look_up(dtype: torch.dtype) -> None:
    """Sums of hundreds stay exact to the last rounding: float32 inside."""
    check(5, 300, (500,), dtype)


def test_a_row_that_gets_nothing() -> None:
    check(12, 40, (64,), torch.bfloat16, padding_idx=3)
    index, grad = torch.full((6,), 3), torch.ones(6, 8, dtype=torch.bfloat16)
    table = torch.randn(12, 8, dtype=torch.bfloat16)
    assert gradient(table, index, grad, "dicp_cpu", padding_idx=3).count_nonzero() == 0


def test_symbolic_sizes() -> None:
    check(200, 33, (3, 7), torch.bfloat16, dynamic=True)


def test_where_generated_code_does_it() -> None:
    """float32 needs no copy; eager's numerics are not ours; frequencies are counted elsewhere."""
    check(20, 16, (30,), torch.float32, claims=0)
    torch._dynamo.reset()
    check(20, 16, (30,), torch.bfloat16, claims=0, options={"numerics": "eager"})
    torch._dynamo.reset()
    check(20, 16, (30,), torch.bfloat16, claims=0, scale_grad_by_freq=True)


def test_no_float32_table_is_planned() -> None:
    rows, columns = 4096, 64
    seen: list[Compiled] = []
    with observe(seen.append):
        table = torch.randn(rows, columns, dtype=torch.bfloat16)
        gradient(table, torch.arange(8), torch.ones(8, columns, dtype=torch.bfloat16), "dicp_cpu")
    backward = next(s for s in seen if s.role == "backward")
    assert int(backward.program.plan.size) < rows * columns  # bytes: a word per row and token


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_table_that_is_the_output_layer_as_well_has_one_gradient_in_place(
    padding: int | None, dynamic: bool, dtype: torch.dtype
) -> None:
    """Neither zeros of the table's size nor a sum over it: two look-ups add into what the product gave."""

    w = torch.randn(90, 16, dtype=dtype)
    i, j = torch.randint(0, 5, (7, 3)), torch.randint(0, 5, (7, 2))
    grad = torch.randn(7, 3, 90, dtype=dtype)
    seen: list[Compiled] = []

    def gradient_of(f: Any, exact: torch.dtype) -> Tensor:
        leaf = w.to(exact, copy=True).requires_grad_()
        return torch.autograd.grad(f(leaf, i, j), leaf, grad.to(exact))[0]

    def model(w: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return F.embedding(i, w, padding).tanh() @ w.t() + F.embedding(j, w, padding).sum((1, 2))[:, None, None]

    with observe(seen.append):
        got = gradient_of(torch.compile(model, backend="dicp_cpu", dynamic=dynamic), dtype)
    exact, eager = gradient_of(model, torch.float64), gradient_of(model, dtype)
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + torch.finfo(dtype).eps * exact.abs().max().item()
    backward = seen[-1].program
    table = {v.buffer.name for v in backward.lowered.outputs if isinstance(v, View)}
    owners = {backward.plan.find(name) for name in table}
    assert len(owners) == 1 and owners <= {c.outputs[0].name for c in backward.library_calls}


@pytest.mark.parametrize("turned", [False, True])
def test_rows_are_added_to_an_input_whatever_its_strides(turned: bool) -> None:
    def accumulate(total: Tensor, grad: Tensor, i: Tensor) -> None:
        total.add_(torch.ops.aten.embedding_dense_backward(grad, i, 30, 3, False))

    total = torch.randn(8, 30).bfloat16().t() if turned else torch.randn(30, 8).bfloat16()
    grad, i = torch.randn(5, 8).bfloat16(), torch.tensor([1, 3, 7, 29, 0])
    mine, eager = total.clone(), total.clone()
    assert mine.stride() == total.stride()
    torch.compile(accumulate, backend="dicp_cpu")(mine, grad, i)
    accumulate(eager, grad, i)
    assert torch.equal(mine, eager)
