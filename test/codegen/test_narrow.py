"""Small integers that differ between lanes are of 32 bits; others stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lowered import compiled

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Store, show
from dicp.vendor.cpu_graph import codegen
from dicp.vendor.cpu_graph.loops import choose_shape
from dicp.vendor.cpu_graph.narrow import narrowed


def shown(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    kernel = compiled(fn, *shapes).launches[-1].kernel
    along = choose_shape(kernel, 8).vector
    assert along is not None
    return show(narrowed(kernel, along.var), notes=False)


class TestText(TestCase):
    maxDiff = None

    def test_reflection(self) -> None:
        """A position that is found at run time, of the vector's axis alone."""
        self.assertExpectedInline(shown(lambda x: F.pad(x, (2, 1), mode="reflect"), (3, 40)), """\
kernel reflection_pad1d(arg0_1: f32, buf1: f32*)
  for i0 < 3, i1 < 43
  v0: i32 = [-2 + i1]
  v1: i32 = abs(v0)
  v2: i32 = sub(39:i32, v1)
  v3: i32 = abs(v2)
  v4: i32 = sub(39:i32, v3)
  v5: f32 = arg0_1[<v4> + 40*i0]
  buf1[43*i0 + i1] = v5""")


def cpp(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    return "\n".join(codegen.emit(x.kernel, "f", 8) for x in compiled(fn, *shapes).launches)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x: F.pad(x, (2, 1), mode="reflect"), [(3, 40)]),
        (lambda x: x.masked_fill(torch.arange(40) > 7, 0), [(3, 40)]),
        (lambda x: x.tril(), [(40, 40)]),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [(1, 2, 40, 40)]),
    ],
)
def test_no_lane_has_64_bits(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    assert "vi64" not in cpp(fn, *shapes)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x: (torch.arange(40) * (1 << 40) > 3) & (x > 0), [(3, 40)]),  # beyond 32 bits
        (lambda x: x + torch.arange(40), [(3, 40)]),  # is cast alone
        (lambda x: x > torch.arange(1 << 32, (1 << 32) + 40), [(3, 40)]),
    ],
)
def test_large_integers(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    x = torch.randn(*shapes[0])
    torch.testing.assert_close(torch.compile(fn, backend="dicp_cpu")(x), fn(x), rtol=0, atol=0)


@pytest.mark.parametrize(("n", "narrow"), [(1 << 20, True), (1 << 22, False)])
def test_numerators_that_a_float_cannot_hold_stay_wide(n: int, narrow: bool) -> None:
    i = Var("i0", n)
    third = Expr("index", (ix.floordiv(ix.of(i), 3),), torch.int64)
    store = Store("y", ix.of(i), Expr("lt", (third, ex.const(9, torch.int64)), torch.bool))
    kernel = Kernel("thirds", (Axis(i),), (Param("y", torch.bool, True, False),), (), (store,))
    assert ("i32" in show(narrowed(kernel, i))) == narrow
