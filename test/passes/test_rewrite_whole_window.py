"""rewrite_whole_window: a convolution whose window is the whole image is a product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_whole_window import rewrite_whole_window


class TestRewriteWholeWindow(TestCase, CheckPass):
    def test_product_and_bias(self) -> None:
        g = canonicalize(graph_of(lambda x, w, b: F.conv2d(x, w, b).relu(), (5, 3, 4, 4), (6, 3, 4, 4), (6,)))
        self.assertExpectedInline(
            show(self.check(rewrite_whole_window, g, claims())),
            """\
graph(arg0_1: f32[5,3,4,4], arg1_1: f32[6,3,4,4], arg2_1: f32[6]):
  v0: f32[5,48] = view(arg0_1, [5,48])
  v1: f32[6,48] = view(arg1_1, [6,48])
  v2: f32[48,6] = permute(v1, [1,0])
  v3: f32[5,6] = addmm(arg2_1, v0, v2)
  v4: f32[5,6,1,1] = view(v3, [5,6,1,1])
  v5: f32[5,6,1,1] = relu(v4)
  return v5
""",
        )

    def test_channels_last(self) -> None:
        x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        g = canonicalize(graph_of(lambda x, w: F.conv2d(x, w, stride=2), x, (6, 3, 4, 4)))
        text = show(self.check(rewrite_whole_window, g, claims()))
        self.assertIn("clone(arg0_1", text)
        self.assertIn("mm(", text)

    def test_symbolic_images_stay(self) -> None:
        g = canonicalize(graph_of(lambda x, w: F.conv2d(x, w), (5, 3, 4, 4), (6, 3, 4, 4), dynamic=True))
        self.assertIn("convolution(", show(self.check(rewrite_whole_window, g, claims())))

    def test_what_stays(self) -> None:
        """Windows that move, groups, gaps, and weights that lie otherwise."""
        turned = torch.randn(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        for fn, w in (
            (lambda x, w: F.conv2d(x, w, padding=1), (6, 3, 4, 4)),
            (lambda x, w: F.conv2d(x, w), (6, 3, 3, 3)),
            (lambda x, w: F.conv2d(x, w, groups=3), (6, 1, 4, 4)),
            (lambda x, w: F.conv_transpose2d(x, w), (3, 6, 4, 4)),
            (lambda x, w: F.conv2d(x, w), turned),
        ):
            g = canonicalize(graph_of(fn, (5, 3, 4, 4), w))
            text = show(g)
            self.assertEqual(show(self.check(rewrite_whole_window, g, claims())), text)
