"""rewrite_conv: convolutions become dicp.conv with the norm, residual and activation that follow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_conv import rewrite_conv

X, W, V = (2, 3, 8, 8), (4, 3, 3, 3), (4,)


def conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.conv2d(x, w, b, padding=1)


def norm(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, m, v, w, b)


EVERYTHING = claims()


class TestRewriteConv(TestCase, CheckPass):
    def run_on(self, g: torch.fx.GraphModule, vendor: Any = EVERYTHING) -> str:
        return show(self.check(rewrite_conv, canonicalize(g), vendor))

    def test_bias_residual_relu_become_one_call(self) -> None:
        g = graph_of(lambda x, w, b, r: torch.relu(conv(x, w, b) + r), X, W, V, (2, 4, 8, 8))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8,8], arg1_1: f32[4,3,3,3], arg2_1: f32[4], arg3_1: f32[2,4,8,8]):
  v0: f32[2,4,8,8] = dicp.conv(arg0_1, arg1_1, arg2_1, arg3_1, [1,1], [1,1], [1,1], 1, relu)
  return v0
""",
        )

    def test_channel_bias_goes_into_the_convolution(self) -> None:
        g = graph_of(lambda x, w, b: torch.relu(conv(x, w) + b.view(1, -1, 1, 1)), X, W, V)
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8,8], arg1_1: f32[4,3,3,3], arg2_1: f32[4]):
  v0: f32[2,4,8,8] = dicp.conv(arg0_1, arg1_1, arg2_1, None, [1,1], [1,1], [1,1], 1, relu)
  return v0
""",
        )

    def test_batch_norm_goes_into_the_weight(self) -> None:
        g = graph_of(lambda x, w, m, v: F.batch_norm(conv(x, w), m, v), X, W, V, V)
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8,8], arg1_1: f32[4,3,3,3], arg2_1: f32[4], arg3_1: f32[4]):
  v0: f32[4] = add(arg3_1, 1e-05)
  v1: f32[4] = rsqrt(v0)
  v2: f32[4] = neg(arg2_1)
  v3: f32[4] = mul(v2, v1)
  v4: f32[4,1,1,1] = view(v1, [-1,1,1,1])
  v5: f32[4,3,3,3] = mul(arg1_1, v4)
  v6: f32[2,4,8,8] = dicp.conv(arg0_1, v5, v3, None, [1,1], [1,1], [1,1], 1, none)
  return v6
""",
        )

    def test_batch_norm_with_weight_and_bias(self) -> None:
        text = self.run_on(graph_of(lambda x, w, b, *n: norm(conv(x, w, b), *n), X, W, V, V, V, V, V))
        self.assertIn("= dicp.conv(arg0_1, v", text)

    def test_written_out_batch_norm_goes_into_the_weight(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return (conv(x, w) - m[:, None, None]) / s[:, None, None]

        self.assertExpectedInline(
            self.run_on(graph_of(f, X, W, V, V)),
            """\
graph(arg0_1: f32[2,3,8,8], arg1_1: f32[4,3,3,3], arg2_1: f32[4], arg3_1: f32[4]):
  v0: f32[4] = neg(arg2_1)
  v1: f32[4] = reciprocal(arg3_1)
  v2: f32[4] = mul(v0, v1)
  v3: f32[4,1,1,1] = view(v1, [-1,1,1,1])
  v4: f32[4,3,3,3] = mul(arg1_1, v3)
  v5: f32[2,4,8,8] = dicp.conv(arg0_1, v4, v2, None, [1,1], [1,1], [1,1], 1, none)
  return v5
""",
        )

    def test_bias_is_rounded_for_a_vendor_that_wants_it(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.relu(F.batch_norm(conv(x, w), m, v))

        low = [torch.rand(s).bfloat16() for s in (X, W, V, V)]
        equal = claims(lambda n: n.args[2].meta["val"].dtype == n.meta["val"].dtype)
        text = show(rewrite_conv(canonicalize(graph_of(f, *low)), equal))
        self.assertRegex(text, r"(v\d+): bf16\[4\] = prims.convert_element_type\(v\d+, bf16\)\n.*dicp.conv\(arg\d_1, v\d+, \1,")

    def test_batch_norm_stays_where_the_weight_is_larger(self) -> None:
        g = graph_of(lambda x, w, *n: norm(conv(x, w), *n), (1, 64, 2, 2), (4, 64, 3, 3), V, V, V, V)
        self.assertIn("_native_batch_norm", self.run_on(g))

    def test_batch_norm_stays_in_bfloat16(self) -> None:
        x, w = torch.randn(X).bfloat16(), torch.randn(W).bfloat16()
        text = self.run_on(graph_of(lambda x, w, *n: norm(conv(x, w), *n), x, w, V, V, V, V))
        self.assertIn("_native_batch_norm", text)

    def test_value_used_twice_ends_the_chain(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor, *n: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = conv(x, w)
            return y, torch.relu(norm(y, *n))

        text = self.run_on(graph_of(f, X, W, V, V, V, V))
        self.assertIn("None, None, [1,1], [1,1], [1,1], 1, none)", text)
        self.assertIn("relu(", text)

    def test_training_forward_keeps_the_norm(self) -> None:
        w = torch.randn(W, requires_grad=True)
        f = lambda x, w: torch.relu(F.batch_norm(conv(x, w), None, None, training=True))  # noqa: E731
        text = self.run_on(graphs_of(f, X, w, train=True)["forward"])
        self.assertIn("dicp.conv(primals_1, primals_2, None, None, [1,1], [1,1], [1,1], 1, none)", text)

    def test_transposed_convolution_stays(self) -> None:
        g = canonicalize(graph_of(lambda x, w: torch.relu(F.conv_transpose2d(x, w)), X, (3, 4, 3, 3)))
        text = show(g)
        self.assertEqual(self.run_on(g), text)

    def test_unclaimed_leaves_nothing_behind(self) -> None:
        g = canonicalize(graph_of(lambda x, w, *n: norm(conv(x, w), *n), X, W, V, V, V, V))
        text = show(g)
        self.assertEqual(self.run_on(g, claims(lambda node: False)), text)

    def test_symbolic_sizes_and_groups(self) -> None:
        x = torch.randn(3, 4, 8, 9)
        torch._dynamo.mark_dynamic(x, 0)

        def f(x: torch.Tensor, w: torch.Tensor, *n: torch.Tensor) -> torch.Tensor:
            return norm(F.conv2d(x, w, groups=2), *n)

        g = graph_of(f, x, (4, 2, 3, 3), V, V, V, V, dynamic=None)
        text = self.run_on(g)
        self.assertIn("dicp.conv(", text)
        self.assertIn("f32[s0,4,6,7]", text)
        self.assertNotIn("_native_batch_norm", text)
