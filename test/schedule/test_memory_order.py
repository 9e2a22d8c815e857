"""order_of: which dims lie outermost, and where those of size 1 are counted."""

from __future__ import annotations

import pytest
import torch

from dicp.ir.memory_order import order_of

LAST = (0, 2, 3, 1)


def turned(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (turned(2, 3, 4, 5), LAST),
        (turned(1, 3, 4, 5), LAST),
        (turned(2, 3, 1, 5), LAST),  # between dims that lie the other way about
        (turned(2, 3, 4, 1), LAST),
        (turned(1, 3, 1, 5), LAST),
        (turned(2, 3, 1, 1), (0, 1, 2, 3)),  # row-major as well
        (turned(2, 1, 4, 5), (0, 1, 2, 3)),
        (torch.empty(2, 5, 1, 3).transpose(1, 3), (0, 2, 3, 1)),
        (torch.empty(5, 1, 4).transpose(0, 2), (1, 2, 0)),
        (torch.empty(1, 1, 1), (0, 1, 2)),
        (torch.empty(()), ()),
    ],
)
def test_order(value: torch.Tensor, order: tuple[int, ...]) -> None:
    assert order_of(value) == order
