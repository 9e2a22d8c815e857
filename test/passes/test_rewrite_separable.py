"""rewrite_separable: a convolution, a depthwise one and a pointwise one as one call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of
from torch.fx import GraphModule

from dicp.ir.printer import show
from dicp.ops.library import register
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_conv import rewrite_conv
from dicp.passes.rewrite_separable import rewrite_separable

T = torch.Tensor
register()
ALL, CONVS = claims(), claims(lambda node: node.target is torch.ops.dicp.conv.default)
SHAPES = ((2, 4, 6, 5), (8, 4, 1, 1), (8, 1, 3, 3), (4, 8, 1, 1))


def convs_of(fn: Any, *shapes: Any) -> GraphModule:
    return rewrite_conv(canonicalize(graph_of(fn, *(shapes or SHAPES))), CONVS)


def block(x: T, w1: T, w2: T, w3: T) -> T:
    y = F.relu6(F.conv2d(x, w1))
    return F.conv2d(F.relu6(F.conv2d(y, w2, padding=1, groups=8)), w3)


class TestSeparable(TestCase, CheckPass):
    def test_inverted_residual(self) -> None:
        g = convs_of(lambda x, *w: block(x, *w) + x)
        self.assertExpectedInline(show(self.check(rewrite_separable, g, ALL)), """\
graph(arg0_1: f32[2,4,6,5], arg1_1: f32[8,4,1,1], arg2_1: f32[8,1,3,3], arg3_1: f32[4,8,1,1]):
  v0: f32[2,4,6,5] = dicp.separable(arg0_1, arg1_1, None, arg0_1, arg2_1, None, arg3_1, None, [1,1], [0,0], [1,1], [1,1], relu6, relu6)
  return v0
""")

    def test_first_convolutions_with_biases(self) -> None:
        def fn(x: T, w1: T, b1: T, w2: T, w3: T, b3: T) -> T:
            y = F.conv2d(x, w1, b1, stride=2, padding=1).relu()
            return F.conv2d(F.conv2d(y, w2, stride=(1, 2), groups=8), w3, b3)

        g = convs_of(fn, (2, 3, 9, 9), (8, 3, 3, 3), (8,), (8, 1, 3, 3), (4, 8, 1, 1), (4,))
        self.assertExpectedInline(show(self.check(rewrite_separable, g, ALL)), """\
graph(arg0_1: f32[2,3,9,9], arg1_1: f32[8,3,3,3], arg2_1: f32[8], arg3_1: f32[8,1,3,3], arg4_1: f32[4,8,1,1], arg5_1: f32[4]):
  v0: f32[2,4,3,2] = dicp.separable(arg0_1, arg1_1, arg2_1, None, arg3_1, None, arg4_1, arg5_1, [2,2], [1,1], [1,2], [0,0], relu, none)
  return v0
""")

    def test_biases_of_low_precision_become_float32(self) -> None:
        def fn(x: T, *w: T) -> T:
            y = F.conv2d(x, w[0], w[1])
            return F.conv2d(F.conv2d(y, w[2], w[3], groups=8), w[4], w[5])

        shapes = ((2, 4, 6, 5), (8, 4, 1, 1), (8,), (8, 1, 3, 3), (8,), (4, 8, 1, 1), (4,))
        self.rtol = self.atol = 0.05  # sums in bfloat16 or with a bias in float32
        g = convs_of(fn, *(torch.randn(s, dtype=torch.bfloat16) for s in shapes))
        text = show(self.check(rewrite_separable, g, ALL))
        self.assertEqual(text.count("convert_element_type"), 3)
        self.assertIn("dicp.separable", text)

    def unchanged(self, fn: Any, *shapes: Any, vendor: Any = ALL) -> None:
        g = convs_of(fn, *shapes)
        text = show(g)
        self.assertEqual(show(self.check(rewrite_separable, g, vendor)), text)

    def test_what_the_vendor_does_not_claim(self) -> None:
        self.unchanged(block, vendor=CONVS)

    def test_values_in_between_that_others_use(self) -> None:
        def first(x: T, w1: T, w2: T, w3: T) -> tuple[T, T]:
            y = F.conv2d(x, w1).relu()
            return F.conv2d(F.conv2d(y, w2, padding=1, groups=8), w3), y

        def second(x: T, w1: T, w2: T, w3: T) -> tuple[T, T]:
            y = F.conv2d(F.conv2d(x, w1).relu(), w2, padding=1, groups=8)
            return F.conv2d(y, w3), y

        self.unchanged(first)
        self.unchanged(second)

    def test_other_convolutions(self) -> None:
        def grouped(x: T, w1: T, w2: T, w3: T) -> T:  # 4 groups of 2
            return F.conv2d(F.conv2d(F.conv2d(x, w1), w2, groups=4), w3)

        def gathered(x: T, w1: T, w2: T, w3: T) -> T:
            return F.conv2d(F.conv2d(F.conv2d(x, w1), w2, groups=8), w3, padding=1)

        def strided(x: T, w1: T, w2: T, w3: T) -> T:
            return F.conv2d(F.conv2d(F.conv2d(x, w1), w2, groups=8), w3, stride=2)

        def first_in_groups(x: T, w1: T, w2: T, w3: T) -> T:
            return F.conv2d(F.conv2d(F.conv2d(x, w1, groups=2), w2, groups=8), w3)

        def activated(x: T, w1: T, w2: T, w3: T) -> T:  # of the sum with what is added
            return (F.conv2d(F.conv2d(F.conv2d(x, w1), w2, padding=1, groups=8), w3) + x).relu()

        image = SHAPES[0]
        self.unchanged(grouped, image, (8, 4, 1, 1), (8, 2, 3, 3), (4, 8, 1, 1))
        self.unchanged(gathered, image, (8, 4, 1, 1), (8, 1, 3, 3), (4, 8, 3, 3))
        self.unchanged(strided)
        self.unchanged(first_in_groups, image, (8, 2, 1, 1), (8, 1, 3, 3), (4, 8, 1, 1))
        self.unchanged(activated)
