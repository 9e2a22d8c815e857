"""Operators over lists of tensors become kernels of their elements, as what optimizers do with them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._ops import OpOverload

from dicp.ops import foreach

OVERLOADS = sorted(foreach.decompositions(), key=str)
FACTORS = [2.0, 0.5, 3.0]


KNOWN = ("List[Tensor]", "List[number]", "Tensor", "number")


def argument(a: Any, dtype: torch.dtype) -> Any:
    """Something that every operator takes in this place: positive, below one."""
    tensors = [torch.rand(4, 4).mul(0.8).add(0.1).to(dtype) for _ in FACTORS]
    return {"List[Tensor]": tensors, "List[number]": FACTORS, "Tensor": tensors[0][0, 0], "number": 2}[str(a.type)]


def arguments(op: OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    known = [(a, argument(a, dtype)) for a in op._schema.arguments if str(a.type) in KNOWN]
    return [v for a, v in known if not a.kwarg_only], {a.name: v for a, v in known if a.kwarg_only}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_as_eager_and_nothing_is_called_from_python(part: int, dtype: torch.dtype) -> None:
    ops = OVERLOADS[part::4]
    given = [arguments(op, dtype) for op in ops]

    def calls(given: list[Any]) -> list[list[torch.Tensor]]:
        return [op(*plain, **named) for op, (plain, named) in zip(ops, given)]

    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(calls, backend="dicp_cpu", fullgraph=True, options={"numerics": "eager"})
    got, want = run(given), calls(given)
    assert counters["dicp"]["kernels"] and not counters["dicp"]["extern"], counters["dicp"]
    for op, mine, theirs in zip(ops, got, want):
        torch.testing.assert_close(mine, theirs, msg=lambda text, op=op: f"{op}: {text}")


def test_the_list_knows_all_of_torchs() -> None:
    """But factors in a tensor, whose values the call reads, and what torch has for DTensor alone."""
    names = [n for n in dir(torch) if n.startswith("_foreach_") and not n.endswith("_")]
    known = {str(op).split(".")[1] for op in OVERLOADS}
    assert len(names) > 40 and set(names) - known <= {"_foreach_powsum"}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_kernels(name: str) -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 3, 4)]
    gradients = [torch.randn_like(p) for p in start]

    def after(compiled: bool) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, g in zip(params, gradients):
            p.grad = g.clone()
        optimizer = OPTIMIZERS[name](params)
        step = torch.compile(lambda: optimizer.step(), backend="dicp_cpu") if compiled else optimizer.step
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    torch._dynamo.reset()
    counters.clear()
    mine = after(True)
    assert counters["dicp"]["kernels"] and not counters["dicp"]["extern"], counters["dicp"]
    torch.testing.assert_close(mine, after(False), rtol=1e-4, atol=1e-5)
