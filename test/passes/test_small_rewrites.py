"""rewrite_norm and rewrite_dropout."""

from __future__ import annotations

import torch
from expecttest import TestCase
from graphs import CheckPass, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_dropout import rewrite_dropout
from dicp.passes.rewrite_norm import rewrite_norm


class TestRewriteNorm(TestCase, CheckPass):
    def test_mean_and_var_share_a_pass(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()

        g = self.check(rewrite_norm, canonicalize(graph_of(f, (2, 8))))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8]):
  v0: (f32[2,1], f32[2,1]) = var_mean.correction(arg0_1, [-1], correction=0, keepdim=True)
  v1: f32[2,1] = v0[0]
  v2: f32[2,1] = v0[1]
  v3: f32[2,8] = sub(arg0_1, v2)
  v4: f32[2,1] = add(v1, 1e-05)
  v5: f32[2,1] = sqrt(v4)
  v6: f32[2,8] = div(v3, v5)
  return v6
""",
        )

    def test_different_dims_stay(self) -> None:
        g = canonicalize(graph_of(lambda x: x.mean(0) + x.var(1), (4, 4)))
        text = show(g)
        self.assertEqual(show(self.check(rewrite_norm, g)), text)

    def test_symbolic_sizes(self) -> None:
        g = canonicalize(graph_of(lambda x: x.var((0, -1)) * x.mean((-1, 0)), (3, 4, 5), dynamic=True))
        self.assertIn("var_mean", show(self.check(rewrite_norm, g)))


class TestRewriteDropout(TestCase, CheckPass):
    def test_probability_zero(self) -> None:
        f = lambda x: torch.native_dropout(x.sin(), 0.0, True)  # noqa: E731
        g = self.check(rewrite_dropout, graph_of(f, (4,), decompositions={}))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4]):
  v0: f32[4] = sin(arg0_1)
  v1: f32[4] = clone(v0)
  v2: b8[4] = full_like(v0, True, dtype=b8)
  return v1, v2
""",
        )

    def test_dropout_stays(self) -> None:
        x = torch.randn(4, requires_grad=True)
        g = graphs_of(lambda x: torch.native_dropout(x, 0.5, True)[0], x, train=True, decompositions={})[
            "forward"
        ]
        text = show(g)
        self.assertIn("dropout", text)
        self.assertEqual(show(rewrite_dropout(g)), text)
