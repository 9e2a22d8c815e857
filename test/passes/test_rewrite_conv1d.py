"""rewrite_conv1d: convolutions of rows become those of images of one line, and what lies between goes along."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.meta_keys import ROUNDED
from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_conv1d import rewrite_conv1d

T = torch.Tensor


def two(x: T, w: T, b: T, scale: T, u: T) -> T:
    return F.conv1d(torch.relu(F.conv1d(x, w, b, stride=2, padding=1) * scale) + 1, u)


def normalised(x: T, w: T, mean: T, var: T) -> T:
    return F.silu(F.batch_norm(F.conv_transpose1d(x, w, stride=2), mean, var)) + x.mean()


class TestRewriteConv1d(TestCase, CheckPass):
    def test_what_lies_between_goes_along(self) -> None:
        g = canonicalize(graph_of(two, (2, 3, 16), (6, 3, 3), (6,), (6, 1), (4, 6, 2)))
        self.assertExpectedInline(
            show(self.check(rewrite_conv1d, g, claims())),
            """\
graph(arg0_1: f32[2,3,16], arg1_1: f32[6,3,3], arg2_1: f32[6], arg3_1: f32[6,1], arg4_1: f32[4,6,2]):
  v0: f32[2,3,1,16] = unsqueeze(arg0_1, 2)
  v1: f32[6,3,1,3] = unsqueeze(arg1_1, 2)
  v2: f32[2,6,1,8] = convolution(v0, v1, arg2_1, [1,2], [0,1], [1,1], False, [0,0], 1)
  v3: f32[6,1,1] = unsqueeze(arg3_1, 1)
  v4: f32[2,6,1,8] = mul(v2, v3)
  v5: f32[2,6,1,8] = relu(v4)
  v6: f32[2,6,1,8] = add(v5, 1)
  v7: f32[4,6,1,2] = unsqueeze(arg4_1, 2)
  v8: f32[2,4,1,7] = convolution(v6, v7, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v9: f32[2,4,7] = squeeze.dim(v8, 2)
  return v9
""",
        )

    def test_norms_too(self) -> None:
        g = canonicalize(graph_of(normalised, (2, 3, 16), (3, 6, 4), (6,), (6,)))
        self.assertExpectedInline(
            show(self.check(rewrite_conv1d, g, claims())),
            """\
graph(arg0_1: f32[2,3,16], arg1_1: f32[3,6,4], arg2_1: f32[6], arg3_1: f32[6]):
  v0: f32[2,3,1,16] = unsqueeze(arg0_1, 2)
  v1: f32[3,6,1,4] = unsqueeze(arg1_1, 2)
  v2: f32[2,6,1,34] = convolution(v0, v1, None, [1,2], [0,0], [1,1], True, [0,0], 1)
  v3: (f32[2,6,1,34], f32[0], f32[0]) = _native_batch_norm_legit_no_training(v2, None, None, arg2_1, arg3_1, 0.1, 1e-05)
  v4: f32[2,6,1,34] = v3[0]
  v5: f32[2,6,1,34] = sigmoid(v4)
  v6: f32[2,6,1,34] = mul(v4, v5)
  v7: f32[] = mean(arg0_1)
  v8: f32[2,6,1,34] = add(v6, v7)
  v9: f32[2,6,34] = squeeze.dim(v8, 2)
  return v9
""",
        )

    def test_gradients(self) -> None:
        x, w = (torch.randn(s, requires_grad=True) for s in ((2, 3, 16), (6, 3, 3)))
        graphs = graphs_of(lambda x, w: F.conv1d(x, w, padding=1).sin().sum(), x, w, train=True)
        text = show(self.check(rewrite_conv1d, canonicalize(graphs["backward"]), claims()))
        self.assertIn("convolution_backward", text)
        self.assertIn("[1,1], [0,1], [1,1]", text)

    def test_symbolic_sizes(self) -> None:
        g = canonicalize(graph_of(lambda x, w: F.conv1d(x, w).relu(), (2, 3, 16), (6, 3, 3), dynamic=True))
        self.assertIn("[1,1], [0,0], [1,1]", show(self.check(rewrite_conv1d, g, claims())))

    def test_other_strides_are_copied(self) -> None:
        """Rows whose channels are dense make images that are channels-last, as is what comes of them."""
        dense: Any = torch.randn(2, 16, 3).transpose(1, 2)
        g = canonicalize(graph_of(lambda x, w: F.conv1d(x, w).relu(), dense, (6, 3, 3)))
        self.assertExpectedInline(
            show(self.check(rewrite_conv1d, g, claims())),
            """\
graph(arg0_1: f32[2,3,16], arg1_1: f32[6,3,3]):
  v0: f32[2,3,1,16] = unsqueeze(arg0_1, 2)
  v1: f32[6,3,1,3] = unsqueeze(arg1_1, 2)
  v2: f32[2,6,1,14] = convolution(v0, v1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v3: f32[2,6,1,14] = relu(v2)
  v4: f32[2,6,14] = squeeze.dim(v3, 2)
  v5: f32[2,6,14] = clone(v4, memory_format=contiguous_format)
  return v5
""",
        )

    def test_gradients_of_rows_whose_channels_are_dense(self) -> None:
        dense: Any = torch.randn(2, 16, 3).transpose(1, 2)

        def f(grad: T, x: T, w: T) -> Any:
            gradients = torch.ops.aten.convolution_backward.default
            return gradients(grad, x, w, [6], [1], [0], [1], False, [0], 1, [True, True, True])

        g = canonicalize(graph_of(f, (2, 6, 14), dense, (6, 3, 3)))
        text = show(self.check(rewrite_conv1d, g, claims()))
        self.assertIn("(f32[2,3,1,16], f32[6,3,1,3], f32[6]) = convolution_backward(", text)

    def test_what_is_noted_of_rows_is_so_of_the_images(self) -> None:
        g = canonicalize(graph_of(lambda x, w: (F.conv1d(x, w) * 3).floor(), (2, 3, 16), (6, 3, 3)))
        for node in g.graph.nodes:
            if node.op == "call_function":
                node.meta[ROUNDED] = True
        rewrite_conv1d(g, claims())
        images = [n for n in g.graph.nodes if n.op == "call_function" and n.meta["val"].shape == (2, 6, 1, 14)]
        self.assertEqual([n.meta.get(ROUNDED) for n in images], [True] * 3)

    def test_norms_of_matrices_are_no_images(self) -> None:
        """What is read as an image because of broadcasting is none for who normalises it."""

        def f(x: T, w: T, h: T, mean: T, var: T) -> tuple[T, T]:
            return F.conv1d(x, w) + h, F.batch_norm(h, mean, var)

        g = canonicalize(graph_of(f, (2, 3, 16), (6, 3, 1), (6, 16), (16,), (16,)))
        text = show(self.check(rewrite_conv1d, g, claims()))
        self.assertIn("(f32[6,16], f32[0], f32[0]) = _native_batch_norm", text)

    def test_all_results_or_none(self) -> None:
        x = torch.randn(2, 16, 3, requires_grad=True)
        w, b = (torch.randn(s, requires_grad=True) for s in ((6, 3, 3), (6,)))
        fn = lambda x, w, b: F.conv1d(x.transpose(1, 2), w, b).sin().sum()  # noqa: E731
        graphs = graphs_of(fn, x, w, b, train=True)
        text = show(self.check(rewrite_conv1d, canonicalize(graphs["backward"]), claims()))
        self.assertEqual(text.count("= convolution_backward("), 1)
