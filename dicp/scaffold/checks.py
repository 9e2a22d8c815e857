"""Does what toy compiles do what eager does, and does it refuse what it must?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.scaffold import toy

DEVICE = toy.vendor.device


def put(x, i, y):
    x[i] = y
    return x * 2


def block(x, w, b):
    return x + F.linear(F.gelu(F.layer_norm(x, (8,))), w, b).softmax(-1)


CASES: dict[str, tuple[Any, ...]] = {
    "pointwise": (lambda x, y: torch.relu(x * y + 1) - y.exp(), (3, 7), (7,)),
    "rows": (lambda x: (x.softmax(1), x.sum(1), x.argmax(1)), (4, 9)),
    "columns": (lambda x: (x.mean(0), x.amax(0)), (4, 9)),
    "scans": (lambda x: x.cumsum(1), (4, 9)),
    "views": (lambda x, y: torch.cat([x, F.pad(y, (1, 1))], 1).roll(2, 1).t() + 1, (4, 5), (4, 2)),
    "libraries": (block, (4, 8), (8, 8), (8,)),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).relu(), (2, 3, 5, 5), (4, 3, 3, 3)),
    "mutation": (lambda x, y: put(x, torch.tensor([2, 0], device=x.device), y), (9, 5), (2, 5)),
    "an op that nobody takes": (lambda x: torch.linalg.svdvals(x.exp()) + 1, (4, 4)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str, dynamic: bool) -> None:
    fn, *shapes = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="toy", dynamic=dynamic, fullgraph=True)
    for _ in range(2):
        mine = [torch.randn(shape, device=DEVICE) for shape in shapes]
        theirs = [x.clone() for x in mine]
        torch.testing.assert_close(compiled(*mine), fn(*theirs), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, theirs)


def test_trains_as_eager_does() -> None:
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).to(DEVICE)
    x, y = torch.randn(5, 6, device=DEVICE), torch.tensor([0, 2, 1, 1, 0], device=DEVICE)

    def gradients(forward: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.testing.assert_close(
        gradients(torch.compile(model, backend="toy")), gradients(model), rtol=1e-4, atol=1e-5
    )


def test_an_index_out_of_range_raises() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda w, i: F.embedding(i, w) + 1, backend="toy")
    w, i = torch.randn(9, 5, device=DEVICE), torch.tensor([1, 8], device=DEVICE)
    torch.testing.assert_close(compiled(w, i), w[i] + 1)
    with pytest.raises(IndexError):
        compiled(w, i + 1)
