"""unfuse_bias: kernels add biases for vendors that ask for it."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of
from torch.fx import GraphModule

from dicp.ir.printer import show
from dicp.ops.library import register
from dicp.passes.canonicalize import canonicalize
from dicp.passes.unfuse_bias import unfuse_bias


class Apart(claims):
    """A vendor whose library is slow with a bias on many rows."""

    def unfuses_bias(self, node: Any) -> bool:
        return bool(node.meta["val"].shape[0] > 4)


def graph(rows: int, beta: float = 1) -> GraphModule:
    def f(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.addmm(b, x, w, beta=beta).relu()

    return canonicalize(graph_of(f, (5,), (rows, 3), (3, 5)))


class TestUnfuseBias(TestCase, CheckPass):
    def test_a_kernel_adds_it(self) -> None:
        self.assertExpectedInline(
            show(self.check(unfuse_bias, graph(8), Apart())),
            """\
graph(arg0_1: f32[5], arg1_1: f32[8,3], arg2_1: f32[3,5]):
  v0: f32[8,5] = mm(arg1_1, arg2_1)
  v1: f32[8,5] = add(v0, arg0_1)
  v2: f32[8,5] = relu(v1)
  return v2
""",
        )

    def test_few_rows_factors_and_no_say(self) -> None:
        for g, vendor in ((graph(4), Apart()), (graph(8, beta=2), Apart()), (graph(8), claims())):
            text = show(g)
            self.assertEqual(show(self.check(unfuse_bias, g, vendor)), text)

    def test_that_of_a_linear_call(self) -> None:
        register()

        def f(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.ops.dicp.linear(x, w, b, None, "none").relu()

        self.assertExpectedInline(
            show(self.check(unfuse_bias, canonicalize(graph_of(f, (5,), (8, 3), (5, 3))), Apart())), """\
graph(arg0_1: f32[8,3], arg1_1: f32[5,3], arg2_1: f32[5]):
  v0: f32[8,5] = dicp.linear(arg0_1, arg1_1, None, None, none)
  v1: f32[8,5] = add(v0, arg2_1)
  v2: f32[8,5] = relu(v1)
  return v2
"""
        )

        def activated(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.ops.dicp.linear(x, w, b, None, "relu")  # type: ignore[no-any-return]

        act = canonicalize(graph_of(activated, (5,), (8, 3), (5, 3)))
        text = show(act)
        self.assertEqual(show(self.check(unfuse_bias, act, Apart())), text)
