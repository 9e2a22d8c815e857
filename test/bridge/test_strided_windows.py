"""as_strided counts places in the memory of a tensor: of one that the program computes, there is only a part of
some arena."""

from __future__ import annotations

import pytest
import torch
from checks import check

from dicp.errors import UnsupportedOp

LINE, WINDOW = torch.randn(12), torch.randn(3)


def written(x, s):
    z = torch.zeros(12)
    z.as_strided((3,), (2,), 1).add_(s)
    return z + x


WINDOWS = {
    "computed": lambda x, s: (x * 2).as_strided((3,), (2,), 5) + s,
    "view": lambda x, s: (x * 2).view(4, -1)[1:, ::2].as_strided((3,), (2,), 5) + s,
    "view_from_where_it_begins": lambda x, s: (x * 2)[2:].as_strided((3,), (2,)) + s,
    "transposed": lambda x, s: (x * 2).view(4, -1).t().as_strided((2, 3), (1, 2), 1) + s,
    "product": lambda x, s: (x.view(4, 3) @ x.view(3, 4)).as_strided((2, 3), (1, 2), 1) + s,
    "scatter": lambda x, s: torch.as_strided_scatter(x * 2, s, (3,), (1,), 5),
    "scatter_over_a_constant": lambda x, s: torch.as_strided_scatter(torch.zeros(12), s, (3,), (2,), 1) + x,
    "written": written,
}
PARTS = {
    "scatter_between": lambda x, s: torch.as_strided_scatter((x * 2).view(-1, 3)[:, ::2], s, (3,), (2,), 0),
    "scatter_behind": lambda x, s: torch.as_strided_scatter((x * 2)[2:], s, (3,), (2,), 4),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_window(name: str, dynamic: bool) -> None:
    check(WINDOWS[name], LINE, WINDOW, dynamic=dynamic)


@pytest.mark.parametrize("name", PARTS)
def test_scatter_over_a_part(name: str) -> None:
    check(PARTS[name], LINE, WINDOW)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="of whose memory") as e:
        torch.compile(PARTS[name], backend="dicp_cpu", dynamic=True)(LINE, WINDOW)
    assert isinstance(e.value.inner_exception, UnsupportedOp)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("stride", [(1,), (1, 1), (2, 1)])
def test_gradient(stride: tuple[int, ...], dynamic: bool) -> None:
    size = (3, 4)[: len(stride)]

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(size, stride, 1).sin()

    mine, eager = (LINE.clone().requires_grad_() for _ in range(2))
    torch.compile(f, backend="dicp_cpu", dynamic=dynamic)(mine).sum().backward()
    f(eager).sum().backward()
    torch.testing.assert_close(mine.grad, eager.grad)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("copy", ["clone", "one", "cast"])
def test_copies_begin_their_memory(copy: str, dynamic: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        own = {"clone": x.clone, "one": lambda: x * 1, "cast": lambda: x.double().float()}[copy]()
        return own.as_strided((3,), (1,), 1) * 2

    compiled = torch.compile(f, backend="dicp_cpu", dynamic=dynamic)
    for x in (LINE[4:], LINE[:8], LINE[2:10]):
        torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_beyond_the_operand(dynamic: bool) -> None:
    """Not what the arena has there."""
    f = torch.compile(lambda x: (x * 2).as_strided((3,), (9,), 5) + 1, backend="dicp_cpu", dynamic=dynamic)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        f(LINE)
