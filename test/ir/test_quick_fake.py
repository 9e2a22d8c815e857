"""The short way to the results of views and products is torch's own, by a shorter road."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dicp.compat import quick_fake, shares_memory
from dicp.ir.verify import same_meta

aten = torch.ops.aten

CALLS = [
    (aten.view.default, (2, 6, 4), ((12, -1),)),
    (aten.view.default, (2, 6, 4), ((2, 2, 3, 4),)),
    (aten.permute.default, (2, 6, 4), ((2, 0, 1),)),
    (aten.transpose.int, (2, 6, 4), (0, -1)),
    (aten.slice.Tensor, (2, 6, 4), (1, 1, 9, 2)),
    (aten.select.int, (2, 6, 4), (1, -1)),
    (aten.squeeze.dim, (2, 1, 4), (1,)),
    (aten.unsqueeze.default, (2, 6, 4), (0,)),
    (aten.expand.default, (2, 1, 4), ((3, 2, 6, 4),)),
    (aten.as_strided.default, (2, 6, 4), ((3, 2), (8, 1), 5)),
    (aten.unbind.int, (2, 6, 4), (1,)),
    (aten.split.Tensor, (2, 6, 4), (4, 1)),
    (aten.split_with_sizes.default, (2, 6, 4), ((1, 5), 1)),
    (aten.unfold.default, (2, 6, 4), (1, 3, 2)),
    (aten.diagonal.default, (2, 6, 4), (0, 1, 2)),
    (aten.mm.default, (6, 4), (torch.empty(4, 5),)),
    (aten.mm.default, (6, 4), (torch.empty(5, 4).t(),)),
    (aten.bmm.default, (2, 6, 4), (torch.empty(2, 4, 3),)),
    (aten.addmm.default, (5,), (torch.empty(6, 4), torch.empty(4, 5))),
]


def fakes(mode: FakeTensorMode, args: tuple[Any, ...]) -> list[Any]:
    return [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "shape", "rest"), CALLS, ids=[f"{call[0]}-{k}" for k, call in enumerate(CALLS)])
def test_results_are_those_of_fake_dispatch(
    op: Any, shape: tuple[int, ...], rest: tuple[Any, ...], dtype: torch.dtype
) -> None:
    mode = FakeTensorMode()
    for x in (
        torch.empty(shape, dtype=dtype),
        torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1]),
    ):
        args = fakes(mode, (x, *(r.to(dtype) if isinstance(r, torch.Tensor) else r for r in rest)))
        try:
            with mode:
                expected = op(*args)
        except (RuntimeError, ValueError):
            with pytest.raises(RuntimeError):
                quick_fake(op, args, {})
            continue
        found = quick_fake(op, args, {})
        assert isinstance(found, type(expected))
        parts = zip(*((r if isinstance(r, (list, tuple)) else [r]) for r in (found, expected)), strict=True)
        for part, due in parts:
            assert same_meta(part, due) and part.storage_offset() == due.storage_offset()
            assert shares_memory(part, args[0]) == shares_memory(due, args[0])
            assert part.fake_mode is mode and part.device == due.device


def test_other_calls_are_left_to_it() -> None:
    symbolic = FakeTensorMode(shape_env=ShapeEnv())
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.empty(4, 4))
    assert quick_fake(aten.add.Tensor, (x, x), {}) is None
    assert quick_fake(aten.view.default, (torch.empty(4, 4), [16]), {}) is None
    assert quick_fake(aten.mm.default, (x, torch.empty(4, 4)), {}) is None
    varying = symbolic.from_tensor(torch.empty(4, 6), static_shapes=False)
    assert quick_fake(aten.permute.default, (varying, [1, 0]), {}) is None
    marked = mode.from_tensor(torch.empty(4, dtype=torch.complex64)).conj()
    assert quick_fake(aten.view.default, (marked, [2, 2]), {}) is None
