"""Inputs of the cases in scripts/operator_cases.py, of the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROWS, COLUMNS = 512, 1024
IMAGE = (4, 32, 56, 56)
CL = torch.channels_last


@dataclass(frozen=True)
class Case:
    """fn: of the tensors that `inputs` makes. gradient: whether the backward is measured, too."""

    fn: Callable[..., Any]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    gradient: bool = False


def rows(*more: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(ROWS, COLUMNS, *more),)


def two() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)


def positive() -> tuple[torch.Tensor, ...]:
    return (torch.rand(ROWS, COLUMNS) * 4 + 0.1,)


def within() -> tuple[torch.Tensor, ...]:
    return (torch.rand(ROWS, COLUMNS) * 1.98 - 0.99,)


def integers(
    dtype: torch.dtype = torch.int64, least: int = -1000, most: int = 1000
) -> tuple[torch.Tensor, ...]:
    return torch.randint(least, most, (ROWS, COLUMNS), dtype=dtype), torch.randint(
        1, 9, (ROWS, COLUMNS), dtype=dtype
    )


def low(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS).to(dtype), torch.randn(ROWS, COLUMNS).to(dtype)


def complexes() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS, dtype=torch.complex64), torch.randn(
        ROWS, COLUMNS, dtype=torch.complex64
    )


def image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(IMAGE),)


def image_cl() -> tuple[torch.Tensor, ...]:
    return (torch.randn(IMAGE).contiguous(memory_format=CL),)


def volume() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 16, 16, 28, 28),)


def line() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 64, 2048),)


def positions(most: int = ROWS, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape or (ROWS,))


def with_positions() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS), positions()


def with_places() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS), positions(ROWS, ROWS, COLUMNS)


def with_columns() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, COLUMNS), positions(COLUMNS, ROWS, COLUMNS)


def classes(n: int = COLUMNS) -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, n), positions(n)


def square(n: int = 128, batch: int = 4) -> tuple[torch.Tensor, ...]:
    x = torch.randn(batch, n, n)
    return (x @ x.mT / n + torch.eye(n),)
