"""Axes along which two values lie in turn, which vectors take by pairs."""

from __future__ import annotations

import pytest
import torch
from bridge.checks import check
from expecttest import TestCase
from lowered import compiled

from dicp.ir.kernel import show
from dicp.vendor.cpu_graph.codegen import emit
from dicp.vendor.cpu_graph.interleaving import split_pairs


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    torch._dynamo.reset()


def last(fn, *shapes):
    return compiled(fn, *shapes).launches[-1].kernel


def in_turn(a, b):
    return torch.stack((-b, a), -1).flatten(-2)


class TestText(TestCase):
    maxDiff = None

    def test_parts_that_are_joined(self) -> None:
        kernel = last(in_turn, (3, 16), (3, 16))
        self.assertExpectedInline(show(split_pairs(kernel, 16), notes=False), """\
kernel view(arg0_1: f32, arg1_1: f32, buf2: f32*)
  for i0 < 3, i1 < 16
  v0: f32 = arg0_1[16*i0 + i1]
  v1: f32 = neg(v0)
  buf2[32*i0 + 2*i1] = v1
  v2: f32 = arg1_1[16*i0 + i1]
  buf2[1 + 32*i0 + 2*i1] = v2""")


def test_they_are_stored_in_turn() -> None:
    text = emit(last(in_turn, (3, 32), (3, 32)), "f", 16)
    assert "store_pairs(" in text and "splat<vbool>" not in text


@pytest.mark.parametrize(
    "fn",
    [lambda a, b: torch.stack((a, b), 0), lambda a, b: torch.stack((a, b, a), -1), lambda a, b: a + b],
    ids=["rows", "triples", "no parts"],
)
def test_others_stay(fn) -> None:
    kernel = last(fn, (4, 16), (4, 16))
    assert split_pairs(kernel, 16) is kernel


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64])
@pytest.mark.parametrize("n", [1, 7, 16, 40])
def test_as_eager(n: int, dtype: torch.dtype) -> None:
    a, b = (torch.randn(3, n).mul(50).to(dtype) for _ in range(2))
    check(lambda a, b: torch.stack((a, b + 1), -1), a, b, calls=1)
    x = torch.randn(3, 2 * n).mul(50).to(dtype)
    check(lambda x: in_turn(x[:, ::2], x[:, 1::2]) + x, x, calls=1)


def test_a_pair_is_read_before_it_is_written_over() -> None:
    check(lambda x: x.copy_(in_turn(x[:, ::2], x[:, 1::2])), torch.randn(3, 64))
