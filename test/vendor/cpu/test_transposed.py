"""What is read or stored along another axis than a kernel's vectors: it is transposed, in blocks of rows that are
reduced, in tiles of points."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered import threads

from dicp.compiler import Compiled, observe
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Store
from dicp.vendor.cpu_graph.loops import choose_shape
from dicp.vendor.cpu_graph.transposed import Transposed, find_transposed, find_transposed_rows

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    with threads(2):  # of more, these sizes give some too little
        yield


def compiled(fn: Fn, *inputs: torch.Tensor, **how: Any) -> tuple[Any, str]:
    """(results, the generated C++)"""
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu", **how)(*inputs)
    return got, "\n".join(seen[0].program.sources.values())


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]).transpose(1, 2).contiguous()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    eps = torch.finfo(dtype).eps
    return {"rtol": 8 * eps, "atol": 8 * eps}


@pytest.mark.parametrize("columns", [64, 100, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_whose_result_is_wanted_turned(dtype: torch.dtype, columns: int) -> None:
    """Whole blocks of rows and a last one of fewer; columns that fill vectors, and a tail of them."""
    x = torch.randn(3, 83, columns).to(dtype)
    got, text = compiled(norm, x)
    assert "store_transposed(" in text and "store_strided(" not in text
    torch.testing.assert_close(got.double(), norm(x.double()), **tolerance(dtype))


def test_other_reductions_and_results() -> None:
    """Two results stored transposed, of other dtypes, one as it lies, and one of a row alone."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x, -1)
        return y.permute(0, 2, 1).contiguous(), (y > 0.02).mT.contiguous(), y * 2, x.amax(-1)

    x = torch.randn(2, 70, 48)
    got, text = compiled(fn, x)
    assert text.count("store_transposed(") == 2
    for a, b in zip(got, fn(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("columns", [64, 100, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_transposed_operands(dtype: torch.dtype, columns: int) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + y.mT, (columns,))

    x, y = torch.randn(3, 83, columns).to(dtype), torch.randn(3, columns, 83).to(dtype)
    got, text = compiled(fn, x, y)
    assert text.count("load_transposed(") == 1 and "load_strided(" not in text
    torch.testing.assert_close(got.double(), fn(x.double(), y.double()), **tolerance(dtype))


def rows_of(value: Expr, buffer: str = "out", transposed: bool = False) -> Transposed | None:
    """What lies transposed in a kernel that sums rows of x and adds the sum to them, with a value that may,
    or the store where `transposed`."""
    i, r = Var("i", 83), Var("r", 64)
    x, total = load("x", ix.of(i) * 64 + ix.of(r)), Expr("ref", ("total",), torch.float32)
    both = Expr("add", (Expr("add", (x, value), torch.float32), total), torch.float32)
    at = ix.of(r) * 83 + ix.of(i) if transposed else ix.of(i) * 64 + ix.of(r)
    body = (Reduce(("total",), "sum", x), Store(buffer, at, both))
    params = tuple(Param(n, torch.float32, n == buffer) for n in ("x", "y", "out"))
    kernel = Kernel("rows", (Axis(i), Axis(r, reduced=True)), params, (), body)
    return find_transposed_rows(kernel, choose_shape(kernel, 16), 16)


def load(name: str, at: ix.Index) -> Expr:
    return Expr("load", (name, at), torch.float32)


def test_loads_and_stores_that_stay() -> None:
    """Under a condition there may be nothing to load; and what the kernel writes may be written by another
    row of the block."""
    i, r = Var("i", 83), Var("r", 64)
    transposed = load("y", ix.of(r) * 83 + ix.of(i))
    found = rows_of(transposed)
    assert found is not None and found.loads == (transposed,) and not found.stores
    limit, zero = Expr("const", (60,), torch.int64), Expr("const", (0.0,), torch.float32)
    exists = Expr("lt", (Expr("index", (ix.of(r),), torch.int64), limit), torch.bool)
    assert rows_of(Expr("masked", (exists, transposed, zero), torch.float32)) is None
    assert rows_of(transposed, buffer="y") is None
    stored = rows_of(zero, transposed=True)
    assert stored is not None and len(stored.stores) == 1 and not stored.loads
    assert rows_of(zero, buffer="x", transposed=True) is None  # rows of other blocks are read from there yet


def test_rows_of_a_symbolic_number() -> None:
    fn = torch.compile(norm, backend="dicp_cpu", dynamic=True)
    seen: list[Compiled] = []
    for rows in (83, 16, 3, 50):
        x = torch.randn(2, rows, 64)
        torch._dynamo.mark_static(x, 2)
        with observe(seen.append):
            torch.testing.assert_close(fn(x), norm(x))
    assert len(seen) == 1 and "store_transposed(" in "".join(seen[0].program.sources.values())


@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 83, 5), (1, 16, 64), (2, 40, 40_000)])
def test_too_few_or_too_long_rows_are_stored_one_by_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    got, text = compiled(norm, x)
    assert "store_transposed(" not in text
    torch.testing.assert_close(got, norm(x))


@pytest.mark.parametrize(("rows", "columns"), [(64, 1024), (83, 1024), (83, 64), (40, 37), (3, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_columns_that_are_summed_and_in_part_lie_along_the_rows(
    dtype: torch.dtype, rows: int, columns: int
) -> None:
    """As of a batch norm whose gradient comes row-major; whole blocks of rows and a last one of fewer. Of rows
    that fill no vector no tile is made."""

    def fn(x: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x * turned.transpose(1, 2)
        return product - product.sum((0, 1)), x * 2

    x, turned = torch.randn(3, rows, columns).to(dtype), torch.randn(3, columns, rows).to(dtype)
    got, text = compiled(fn, x, turned)
    assert ("TransposedTile<" in re.sub(r"//.*", "", text)) == (rows > 3)
    for mine, exact in zip(got, fn(x.double(), turned.double()), strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps * scale)


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
    assert not re.search(r"tile\w*\.load\(", text)  # the operands lie along the vectors
    torch.testing.assert_close(got.double(), turn(*(t.double() for t in x)), **tolerance(dtype))


@pytest.mark.parametrize("dtype, run", [(torch.float32, 128), (torch.bfloat16, 256)])
def test_runs_of_several_cache_lines(dtype: torch.dtype, run: int) -> None:
    """With a last run of fewer blocks, a last block of fewer columns, and a tail of the vectors."""
    x = [by_columns(3, 83, 300).to(dtype) for _ in range(3)]
    got, text = compiled(turn, *x)
    assert re.search(rf"first\d* \+= {run}\)", text)
    torch.testing.assert_close(got.double(), turn(*(t.double() for t in x)), **tolerance(dtype))


def test_results_of_both_orders() -> None:
    """Of other dtypes, and with an operand of the other order."""

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
    x, y, z = (load(n, ix.of(j) * 83 + ix.of(i)) for n in "xyz")
    total = Expr("add", (Expr("add", (x, y), torch.float32), z), torch.float32)
    found = points_of(total)
    assert found is not None and len(found.stores) == 1 and not found.loads
    assert points_of(total, buffer="x") is None
    assert points_of(total, mode="add") is None
