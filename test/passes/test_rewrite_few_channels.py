"""rewrite_few_channels: products over few channels that lie apart are sums of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.meta_keys import FREE_OUTPUTS
from dicp.ir.printer import show
from dicp.ir.verify import insert
from dicp.passes.canonicalize import canonicalize
from dicp.passes.conv_matmul import Convolution
from dicp.passes.layout import relay
from dicp.passes.rewrite_few_channels import FEW, LONG, rewrite_few_channels
from dicp.vendor.base import ConvolutionPart

SCORES, MIX = (2, 3, 5, 20), (2, 3)


class Products(claims):
    """A vendor that wants the gradients of weights as products."""

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        return part == "weight"


def mixed(scores: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    return F.linear(scores.permute(0, 2, 3, 1), w, *bias).permute(0, 3, 1, 2)


class TestRewriteFewChannels(TestCase, CheckPass):
    def rewritten(self, f: Callable[..., Any], *args: Any, **options: Any) -> str:
        g = canonicalize(graph_of(f, *args, **options))
        return show(canonicalize(self.check(rewrite_few_channels, g, claims())))

    def test_heads_are_mixed_where_they_lie(self) -> None:
        """Neither the scores nor the result are copied, though a product's rows were."""

        def f(scores: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return mixed(scores, w, b).softmax(-1) @ v

        self.assertExpectedInline(self.rewritten(f, SCORES, MIX, (2,), (20, 4)), """\
graph(arg0_1: f32[2,3,5,20], arg1_1: f32[2,3], arg2_1: f32[2], arg3_1: f32[20,4]):
  v0: f32[3,2] = permute(arg1_1, [1,0])
  v1: f32[2,1,5,20] = slice(arg0_1, 1, 0, 1)
  v2: f32[2] = select.int(v0, 0, 0)
  v3: f32[2,1,1] = view(v2, [2,1,1])
  v4: f32[2,2,5,20] = mul(v1, v3)
  v5: f32[2,1,5,20] = slice(arg0_1, 1, 1, 2)
  v6: f32[2] = select.int(v0, 0, 1)
  v7: f32[2,1,1] = view(v6, [2,1,1])
  v8: f32[2,2,5,20] = mul(v5, v7)
  v9: f32[2,1,5,20] = slice(arg0_1, 1, 2, 3)
  v10: f32[2] = select.int(v0, 0, 2)
  v11: f32[2,1,1] = view(v10, [2,1,1])
  v12: f32[2,2,5,20] = mul(v9, v11)
  v13: f32[2,2,5,20] = add(v4, v8)
  v14: f32[2,2,5,20] = add(v13, v12)
  v15: f32[2,5,20,2] = permute(v14, [0,2,3,1])
  v16: f32[2,5,20,2] = add(v15, arg2_1)
  v17: f32[2,2,5,20] = permute(v16, [0,3,1,2])
  v18: f32[2,2,5,20] = _softmax(v17, -1, False)
  v19: f32[20,20] = view(v18, [20,20])
  v20: f32[20,4] = mm(v19, arg3_1)
  v21: f32[2,2,5,4] = view(v20, [2,2,5,4])
  return v21
""")

    def test_a_convolution_and_its_gradient(self) -> None:
        inputs = [torch.randn(s, requires_grad=True) for s in (SCORES, (2, 3, 1, 1), (2,))]
        graphs = graphs_of(lambda x, w, b: F.conv2d(x, w, b), *inputs, train=True)
        found = [canonicalize(graphs[name]) for name in ("forward", "backward")]
        forward, backward = (show(canonicalize(self.check(rewrite_few_channels, g, Products()))) for g in found)
        self.assertNotIn("convolution", forward)
        self.assertNotIn("clone", forward)  # it is returned where it lies
        self.assertExpectedInline(backward, """\
graph(primals_1: f32[2,3,5,20], primals_2: f32[2,3,1,1], tangents_1: f32[2,2,5,20]):
  v0: f32[2,1,5,20] = slice(tangents_1, 1, 0, 1)
  v1: f32[3,1,1] = select.int(primals_2, 0, 0)
  v2: f32[2,3,5,20] = mul(v0, v1)
  v3: f32[2,1,5,20] = slice(tangents_1, 1, 1, 2)
  v4: f32[3,1,1] = select.int(primals_2, 0, 1)
  v5: f32[2,3,5,20] = mul(v3, v4)
  v6: f32[2,3,5,20] = add(v2, v5)
  v7: f32[2,3,100] = view(primals_1, [2,3,-1])
  v8: f32[2,100,3] = permute(v7, [0,2,1])
  v9: f32[2,2,100] = view(tangents_1, [2,2,-1])
  v10: f32[2,2,3] = bmm(v9, v8)
  v11: f32[2,3] = sum.dim_IntList(v10, [0])
  v12: f32[2,3,1,1] = view(v11, [2,3,1,1])
  v13: f32[2] = sum.dim_IntList(tangents_1, [0,2,3])
  return v6, v12, v13
""")

    def test_the_gradient_of_a_weight_stays_where_it_is_no_product(self) -> None:
        inputs = [torch.randn(s, requires_grad=True) for s in (SCORES, (2, 3, 1, 1), (2,))]
        backward = canonicalize(graphs_of(lambda x, w, b: F.conv2d(x, w, b), *inputs, train=True)["backward"])
        text = show(self.check(rewrite_few_channels, backward, claims()))
        self.assertIn("[0,0], 1, [False,True,True])", text)
        self.assertEqual(text.count("mul("), 2)

    def test_the_gradient_of_what_lies_otherwise(self) -> None:
        """Not viewed as rows of positions, but copied."""
        x = torch.randn(SCORES).contiguous(memory_format=torch.channels_last).requires_grad_()
        w = torch.randn(2, 3, 1, 1, requires_grad=True)
        f = lambda x, w: F.conv2d(x, w).contiguous()  # noqa: E731
        (backward,) = (g for name, g in graphs_of(f, x, w, train=True).items() if name == "backward")
        relay(backward, {n: n.meta["val"].contiguous() for n in backward.graph.nodes if n.name == "tangents_1"})
        backward.meta[FREE_OUTPUTS] = (0, 1)
        text = show(rewrite_few_channels(canonicalize(backward), Products()))
        self.assertNotIn("convolution_backward", text)
        self.assertIn("clone(primals_1", text)

    def test_what_follows_gets_its_strides(self) -> None:
        """A second product reads what the first made where it lies; what needs rows of channels, as a view of
        them does and the graph's caller, gets a copy."""

        def twice(scores: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return mixed(mixed(scores, w).softmax(-1), w.t()).contiguous()

        text = self.rewritten(twice, SCORES, MIX)
        self.assertNotIn("mm(", text)
        self.assertNotIn("clone", text)
        for f in (mixed, lambda s, w: (mixed(s, w) + 1).permute(0, 2, 3, 1).view(-1, 4)):
            text = self.rewritten(f, SCORES, MIX)
            self.assertNotIn("mm(", text)
            self.assertEqual(text.count("clone"), 1)

    def test_results_that_are_free_stay_where_they_are(self) -> None:
        g = canonicalize(graph_of(mixed, SCORES, MIX))
        g.meta[FREE_OUTPUTS] = (0,)
        self.assertNotIn("clone", show(rewrite_few_channels(g, claims())))

    def test_forms(self) -> None:
        """Einsums, which multiply a batch of one; rows alone; three dims; low precision; sizes that vary."""
        einsum = lambda x, w: torch.einsum("bhij,gh->bgij", x, w)  # noqa: E731
        varying = torch.randn(SCORES)
        torch._dynamo.mark_dynamic(varying, [0, 2, 3])
        low = [torch.randn(s).bfloat16() for s in (SCORES, MIX)]
        self.rtol = self.atol = 1e-2  # of bf16
        for f, inputs, options in (
            (einsum, (SCORES, MIX), {}),
            (lambda x, w: F.linear(x.t(), w), ((3, LONG), MIX), {}),
            (lambda x, w: F.linear(x.transpose(1, 2), w), ((1, 3, 20), MIX), {}),
            (lambda x, w: F.linear(x.transpose(1, 2), w), ((2, 3, 20), MIX), {}),
            (lambda x, w: F.conv1d(x, w), ((2, 3, 20), (*MIX, 1)), {}),
            (mixed, low, {}),
            (mixed, (varying, MIX), {"dynamic": None}),
            (einsum, (varying, MIX), {"dynamic": None}),
        ):
            text = self.rewritten(f, *inputs, **options)
            self.assertNotIn("mm(", text)
            self.assertNotIn("convolution(", text)

    def test_a_copy_of_what_is_written_later_stays(self) -> None:
        g = canonicalize(graph_of(mixed, SCORES, MIX))
        (product,) = (n for n in g.graph.nodes if n.target is torch.ops.aten.bmm.default)
        with g.graph.inserting_before(product):
            scores = next(n for n in g.graph.nodes if n.op == "placeholder")
            insert(g.graph, torch.ops.aten.zero_.default, (scores,), like=product)
        text = show(self.check(rewrite_few_channels, g, claims()))
        self.assertIn("bmm(", text)
        self.assertIn("clone(", text)

    def test_what_stays(self) -> None:
        """Channels that lie beside each other, many of them, or one; few elements; windows, steps, groups."""
        x, w = torch.randn(2, 4, 6, LONG), torch.randn(2, 4, 1, 1)
        last = x.contiguous(memory_format=torch.channels_last)
        for f, *inputs in (
            (F.linear, (2, 5, 20, 3), MIX),
            (mixed, (2, FEW + 1, 5, 20), (2, FEW + 1)),
            (mixed, SCORES, (FEW + 1, 3)),
            (mixed, (2, 3, 20, LONG - 1), MIX),
            (F.conv2d, last, w),
            (lambda x, w: F.conv2d(x, w, stride=2), x, w),
            (lambda x, w: F.conv2d(x, w, padding=1), x, w),
            (lambda x, w: F.conv2d(x, w, groups=2), x, w[:, :2]),
            (F.conv_transpose2d, x, (4, 2, 1, 1)),
            (F.conv2d, x, (2, 4, 1, 3)),
        ):
            g = canonicalize(graph_of(f, *inputs))
            text = show(g)
            self.assertEqual(show(self.check(rewrite_few_channels, g, claims())), text)
