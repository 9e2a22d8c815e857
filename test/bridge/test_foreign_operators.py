"""Operators of the user, and of torch that do not tell all: where their operands lie, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

X = torch.randn(8, 16)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    with torch.library._scoped_library("dicp_test_foreign", "DEF") as lib:
        lib.define("strides(Tensor x) -> Tensor")
        lib.impl("strides", lambda x: torch.tensor(x.stride()), "CompositeExplicitAutograd")
        fake = torch.library.register_fake
        fake("dicp_test_foreign::strides", lambda x: x.new_empty(x.dim(), dtype=torch.int64), lib=lib)
        lib.define("copy(Tensor x) -> Tensor")
        lib.impl("copy", lambda x: x.as_strided(x.shape, x.stride()).contiguous(), "CompositeExplicitAutograd")
        fake("dicp_test_foreign::copy", lambda x: x.new_empty(x.shape), lib=lib)
        yield


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: (x * 2)[:, 1:3],
    "column": lambda x: (x * 2)[::2, 3],
    "expanded": lambda x: (x + 1).expand(3, 8, 16),
    "overlapping": lambda x: (x * 2).unfold(0, 3, 1),
    "transposed": lambda x: (x * 2).t()[1:],
    "bfloat16": lambda x: (x * 2).bfloat16()[:, ::2],
    "product": lambda x: (x @ x.t())[2:, ::3],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", ["strides", "copy"])
@pytest.mark.parametrize("name", VIEWS)
def test_operands_have_the_strides_that_were_traced(name: str, op: str, dynamic: bool) -> None:
    """The user's code may read them; elements it finds by them are those of the view."""

    def f(x: Tensor) -> Tensor:
        return getattr(torch.ops.dicp_test_foreign, op)(VIEWS[name](x))

    mine = torch.compile(f, backend="dicp_cpu", dynamic=dynamic)(X)
    torch.testing.assert_close(mine, f(X))


def test_a_result_that_is_the_operand_is_not_written_again() -> None:
    """dequantize of float32 returns its operand, which its schema does not say."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.dequantize((x @ x.t()).sin())
        later = ((x.cos() @ x.t()).tanh() @ x).tanh() @ x.t()
        return y, torch.linalg.inv(torch.eye(8) * 9 + later.sin()), later.cumsum(0)

    compiled = torch.compile(f, backend="dicp_cpu")
    first = compiled(X)
    kept = first[0].clone()
    torch.testing.assert_close(first, f(X))
    compiled(X * 2)
    assert torch.equal(first[0], kept)
