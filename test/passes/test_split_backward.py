"""split_backward: the gradients of a convolution as calls of their own."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.split_backward import split_backward

T = torch.Tensor


class Splits(claims):
    """A vendor that has an algorithm for each gradient."""

    def splits_gradients(self, node: Any) -> bool:
        return True


def gradients(g: T, x: T, w: T) -> tuple[T, T, T]:
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    return torch.ops.aten.convolution_backward.default(g, x, w, [6], *how)  # type: ignore[no-any-return]


SHAPES = ((2, 6, 5, 4), (2, 3, 5, 4), (6, 3, 3, 3))


class TestSplitBackward(TestCase, CheckPass):
    def test_each_gradient_has_a_call(self) -> None:
        g = canonicalize(graph_of(gradients, *SHAPES))
        self.assertExpectedInline(
            show(self.check(split_backward, g, Splits())),
            """\
graph(arg0_1: f32[2,6,5,4], arg1_1: f32[2,3,5,4], arg2_1: f32[6,3,3,3]):
  v0: (f32[2,3,5,4], ?, ?) = convolution_backward(arg0_1, arg1_1, arg2_1, [6], [1,1], [1,1], [1,1], False, [0,0], 1, [True,False,False])
  v1: (?, f32[6,3,3,3], ?) = convolution_backward(arg0_1, arg1_1, arg2_1, [6], [1,1], [1,1], [1,1], False, [0,0], 1, [False,True,False])
  v2: f32[6] = sum.dim_IntList(arg0_1, [0,2,3])
  v3: f32[2,3,5,4] = v0[0]
  v4: f32[6,3,3,3] = v1[1]
  return v3, v4, v2
""",
        )

    def test_a_vendor_without_a_say(self) -> None:
        g = canonicalize(graph_of(gradients, *SHAPES))
        text = show(g)
        self.assertEqual(show(self.check(split_backward, g, claims())), text)
