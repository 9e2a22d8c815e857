"""Products of few rows with weights that are scaled by groups along their depth: against float64, and which there are."""

from __future__ import annotations

import functools
from typing import Any

import products
import pytest
import torch
from bridge.checks import compiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
check = functools.partial(products.check, claim="few rows")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def weights(n: int, groups: int, size: int, dtype: torch.dtype, zeros: torch.dtype | None) -> tuple[Any, ...]:
    """w, scale and zero, of which the largest groups are a hundred times the smallest."""
    w = torch.randint(-128, 128, (n, groups * size), dtype=torch.int8)
    scale = (10 ** (torch.rand(n, groups) * 2 - 3)).to(dtype)
    zero = None if zeros is None else torch.randint(-9, 9, (n, groups)).to(zeros)
    return w, scale, zero


def product(x: Any, w: Any, scale: Any, zero: Any, bias: Any = None) -> Any:
    groups = w.view(*scale.shape, -1).to(x.dtype)
    groups = groups if zero is None else groups - zero.unsqueeze(-1).to(x.dtype)
    y = x @ (groups * scale.unsqueeze(-1)).view(w.shape).t()
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [None, torch.int8, torch.float32])
def test_rows_columns_and_groups(zeros: torch.dtype | None, dtype: torch.dtype) -> None:
    zeros = dtype if zeros == torch.float32 else zeros
    for rows, columns, groups, size in ((1, 5, 1, 16), (2, 7, 5, 32), (3, 70, 3, 48), (8, 333, 2, 128)):
        w, scale, zero = weights(columns, groups, size, dtype, zeros)
        with_none = functools.partial(product, zero=None) if zero is None else product
        given = (w, scale) if zero is None else (w, scale, zero)
        torch._dynamo.reset()
        check(with_none, torch.randn(rows, groups * size, dtype=dtype), *given)


def test_unsigned_weights_and_a_bias() -> None:
    w, scale, zero = weights(96, 4, 64, torch.float32, torch.int8)
    unsigned, zero = (w.int() + 128).to(torch.uint8), (zero.int() + 128).to(torch.uint8)
    check(product, torch.randn(1, 256), unsigned, scale, zero, torch.randn(96))


@pytest.mark.parametrize(("rows", "size"), [(9, 32), (1, 24)])
def test_other_rows_and_groups_are_products_of_floats(rows: int, size: int) -> None:
    w, scale, zero = weights(64, 4, size, torch.float32, torch.int8)
    with compiles() as seen:
        check(product, torch.randn(rows, 4 * size), w, scale, zero, claim=("few rows", "tiles", "BLAS", "oneDNN"))
    assert "group_scaled" not in "".join(str(c.node.target) for s in seen for c in s.program.library_calls)


def test_what_is_read_lies_anywhere() -> None:
    """Scales whose rows begin apart, x by columns, a part of a weight."""
    w, scale, zero = weights(64, 4, 32, torch.float32, torch.int8)
    wide, scales = torch.cat([w, w], 1), torch.cat([scale, scale], 1)
    check(
        lambda x, w, s, z: product(x.t(), w[:, 128:].contiguous(), s[:, 4:], z),
        torch.randn(128, 2),
        wide,
        scales,
        zero,
    )


def test_exact_numbers_stay_eagers() -> None:
    """Under numerics="eager" the weight is rounded as eager rounds it."""
    w, scale, zero = weights(64, 4, 32, torch.float32, torch.int8)
    x = torch.randn(1, 128)
    got = torch.compile(product, backend="dicp_cpu", options={"numerics": "eager"})(x, w, scale, zero)
    assert torch.equal(got, product(x, w, scale, zero))
