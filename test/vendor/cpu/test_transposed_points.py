"""Elements that are stored along another axis than most are loaded along: tiles of them are transposed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dicp.compiler import Compiled, observe
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Store
from dicp.vendor.cpu_graph.loops import choose_shape
from dicp.vendor.cpu_graph.transposed import Transposed, find_transposed

Fn = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


def compiled(fn: Fn, *inputs: torch.Tensor, **how: Any) -> tuple[Any, str]:
    """(results, the generated C++)"""
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu", **how)(*inputs)
    return got, "\n".join(seen[0].program.sources.values())


def by_columns(*size: int) -> torch.Tensor:
    return torch.randn(*size[:-2], size[-1], size[-2]).mT


def turn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a * b * (1 - c * c)).contiguous()


@pytest.mark.parametrize("rows, columns", [(64, 64), (83, 100), (37, 83)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_result_turned_from_several_operands(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Whole tiles, and tails of one axis and of both."""
    x = [by_columns(3, rows, columns).to(dtype) for _ in range(3)]
    got, text = compiled(turn, *x)
    assert len(re.findall(r"tile\w*\.store\(", text)) == 1 and "store_strided(" not in text
    assert "tile.load(" not in text  # the operands lie along the vectors
    want = turn(*(t.double() for t in x)).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype, run", [(torch.float32, 128), (torch.bfloat16, 256)])
def test_runs_of_several_cache_lines(dtype: torch.dtype, run: int) -> None:
    """With a last run of fewer blocks, a last block of fewer columns, and a tail of the vectors."""
    x = [by_columns(3, 83, 300).to(dtype) for _ in range(3)]
    got, text = compiled(turn, *x)
    assert re.search(rf"first\d* \+= {run}\)", text)
    want = turn(*(t.double() for t in x)).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)


def test_results_of_both_orders() -> None:
    """Of other dtypes, and with an operand of the other order."""

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Tensors:
        y = a * b
        return y, (y + c).contiguous(), (y > 0).contiguous(), (a + 1)

    x = (by_columns(4, 70, 48), by_columns(4, 70, 48), torch.randn(4, 70, 48))
    got, text = compiled(fn, *x)
    assert text.count("TransposedTile<") == 3 and "store_strided(" not in text
    for mine, want in zip(got, fn(*x), strict=True):
        assert mine.stride() == want.stride()
        torch.testing.assert_close(mine, want)


def test_sizes_that_vary() -> None:
    compiled_turn = torch.compile(turn, backend="dicp_cpu", dynamic=True)
    for rows, columns in ((83, 100), (16, 16), (5, 70), (70, 5), (1, 30)):
        x = [by_columns(3, rows, columns) for _ in range(3)]
        torch.testing.assert_close(compiled_turn(*x), turn(*x))


def points_of(value: Expr, buffer: str = "out", mode: str = "set") -> Transposed | None:
    """What lies transposed in a kernel of vectors along i that stores a value along j."""
    i, j = Var("i", 83), Var("j", 64)
    store = Store(buffer, ix.of(i) * 64 + ix.of(j), value, mode)
    params = tuple(Param(n, torch.float32, n == buffer) for n in ("x", "y", "z", "out"))
    kernel = Kernel("points", (Axis(j), Axis(i)), params, (), (store,))
    shape = choose_shape(kernel, 16)
    assert shape.vector is not None and shape.vector.var == i
    return find_transposed(kernel, shape, 16)


def test_stores_that_stay() -> None:
    """What is read of the result may be of another element of the tile; and what is added may be read."""
    i, j = Var("i", 83), Var("j", 64)
    x, y, z = (Expr("load", (n, ix.of(j) * 83 + ix.of(i)), torch.float32) for n in "xyz")
    total = Expr("add", (Expr("add", (x, y), torch.float32), z), torch.float32)
    found = points_of(total)
    assert found is not None and len(found.stores) == 1 and not found.loads
    assert points_of(total, buffer="x") is None
    assert points_of(total, mode="add") is None
