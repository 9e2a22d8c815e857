"""choose_layout: channels-last where the bytes say so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.meta_keys import FREE_OUTPUTS, LAYOUT_KEY
from dicp.ir.printer import show
from dicp.ir.verify import verify
from dicp.passes.canonicalize import canonicalize
from dicp.passes.layout import CHANNELS_LAST, choose_layout, relay
from dicp.passes.rewrite_conv import rewrite_conv
from dicp.vendor.base import LayoutCosts

T = torch.Tensor
X, W = (2, 8, 16, 16), (8, 8, 1, 1)


class Always(claims):
    layout_costs = LayoutCosts(conversion=2.0, activation_gain=100.0, weight_loss=0.0)


def tower(x: T, w: T) -> T:
    for _ in range(5):
        x = torch.relu(F.conv2d(x, w))
    return x.mean((2, 3))


def input_gradient(grad: T, w: T, stride: list[int]) -> T:
    size = [(n - 1) * s + w.shape[2] for n, s in zip(grad.shape[2:], stride, strict=True)]
    x = grad.new_empty(*grad.shape[:2], *size)
    x = x.clone(memory_format=torch.channels_last)  # which is not read
    how = (stride, [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
    return torch.ops.aten.convolution_backward.default(grad, x, w, None, *how)[0]


class TestLayout(TestCase, CheckPass):
    def test_tower_pays_for_one_conversion(self) -> None:
        g = canonicalize(graph_of(tower, X, W))
        g = self.check(choose_layout, rewrite_conv(g, claims()), claims())
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8,16,16], arg1_1: f32[8,8,1,1]):
  v0: f32[2,8,16,16]@0231 = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,8,16,16]@0231 = dicp.conv(v0, arg1_1, None, None, [1,1], [0,0], [1,1], 1, relu)
  v2: f32[2,8,16,16]@0231 = dicp.conv(v1, arg1_1, None, None, [1,1], [0,0], [1,1], 1, relu)
  v3: f32[2,8,16,16]@0231 = dicp.conv(v2, arg1_1, None, None, [1,1], [0,0], [1,1], 1, relu)
  v4: f32[2,8,16,16]@0231 = dicp.conv(v3, arg1_1, None, None, [1,1], [0,0], [1,1], 1, relu)
  v5: f32[2,8,16,16]@0231 = dicp.conv(v4, arg1_1, None, None, [1,1], [0,0], [1,1], 1, relu)
  v6: f32[2,8] = mean.dim(v5, [2,3])
  return v6
""",
        )

    def test_one_convolution_stays(self) -> None:
        g = canonicalize(graph_of(lambda x, w: torch.relu(F.conv2d(x, w)), X, W))
        text = show(g)
        self.assertEqual(show(self.check(choose_layout, g, claims())), text)

    def test_reader_of_other_strides_keeps_the_graph(self) -> None:
        def f(x: T, w: T) -> T:
            turned = torch.relu(F.conv2d(x, w)).transpose(1, 2)  # neither row-major nor channels-last
            return turned.view(torch.int32) + 1

        g = canonicalize(graph_of(f, X, W))
        text = show(g)
        self.assertEqual(show(self.check(choose_layout, g, Always())), text)

    def test_output_keeps_its_strides(self) -> None:
        g = graph_of(lambda x, w: torch.relu(F.conv2d(x, w)), X, W)
        g = self.check(choose_layout, canonicalize(g), Always())
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8,16,16], arg1_1: f32[8,8,1,1]):
  v0: f32[2,8,16,16]@0231 = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,8,16,16]@0231 = convolution(v0, arg1_1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v2: f32[2,8,16,16]@0231 = relu(v1)
  v3: f32[2,8,16,16] = clone(v2, memory_format=contiguous_format)
  return v3
""",
        )

    def test_freed_output_does_not(self) -> None:
        g = canonicalize(graph_of(lambda x, w: F.conv2d(x, w), X, W))
        g.meta[FREE_OUTPUTS] = (0,)
        choose_layout(g, Always())
        (result,) = g.graph.output_node().all_input_nodes
        self.assertEqual(result.meta[LAYOUT_KEY], CHANNELS_LAST)

    def test_saved_is_the_copy_that_a_convolution_got(self) -> None:
        def f(x: T, w: T) -> tuple[T, ...]:
            y, z = x * 2, x * 3
            return F.conv2d(y, w), F.conv2d(z, w), z.sum(0), y, z

        g = canonicalize(graph_of(f, X, W))
        g.meta[FREE_OUTPUTS] = (0, 1, 3, 4)
        verify(choose_layout(g, Always()))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8,16,16], arg1_1: f32[8,8,1,1]):
  v0: f32[2,8,16,16]@0231 = mul(arg0_1, 2)
  v1: f32[2,8,16,16] = mul(arg0_1, 3)
  v2: f32[2,8,16,16]@0231 = clone(v0, memory_format=channels_last)
  v3: f32[2,8,16,16]@0231 = convolution(v2, arg1_1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v4: f32[2,8,16,16]@0231 = clone(v1, memory_format=channels_last)
  v5: f32[2,8,16,16]@0231 = convolution(v4, arg1_1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v6: f32[8,16,16] = sum.dim_IntList(v1, [0])
  return v3, v5, v6, v2, v4
""",
        )

    def test_saved_view_of_an_input_stays(self) -> None:
        g = canonicalize(graph_of(lambda x, w: (F.conv2d(x[1:], w), x[1:]), X, W))
        g.meta[FREE_OUTPUTS] = (0, 1)
        choose_layout(g, Always())
        self.assertNotIn(LAYOUT_KEY, g.graph.output_node().args[0][1].meta)

    def test_view_gets_a_copy(self) -> None:
        g = graph_of(lambda x, w: F.conv2d(x, w).flatten(1).sum(1), X, W)
        g = self.check(choose_layout, canonicalize(g), Always())
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8,16,16], arg1_1: f32[8,8,1,1]):
  v0: f32[2,8,16,16]@0231 = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,8,16,16]@0231 = convolution(v0, arg1_1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v2: f32[2,8,16,16] = clone(v1, memory_format=contiguous_format)
  v3: f32[2,2048] = view(v2, [2,2048])
  v4: f32[2] = sum.dim_IntList(v3, [1])
  return v4
""",
        )

    def test_channels_last_input_needs_nothing(self) -> None:
        x = torch.randn(X).to(memory_format=torch.channels_last)
        g = canonicalize(graph_of(tower, x, W))
        text = show(g)
        self.assertEqual(show(self.check(choose_layout, g, Always())), text)

    def test_random_call_reads_its_input_as_traced(self) -> None:
        g = graph_of(lambda x, w: F.conv2d(torch.rand_like(F.conv2d(x, w)), w).sum((2, 3)), X, W)
        self.check(choose_layout, canonicalize(g), Always())

    def test_large_window_with_large_weight_stays(self) -> None:
        g = canonicalize(graph_of(tower, (1, 64, 12, 12), (64, 64, 3, 3)))
        text = show(g)
        self.assertEqual(show(self.check(choose_layout, g, claims())), text)

    def test_a_small_weight_costs_little(self) -> None:
        """In proportion: 147 kB are in the cache when they are used, 4.2 MB less so."""
        for channels, changed in ((64, True), (340, False)):
            g = canonicalize(graph_of(tower, (1, channels, 40, 40), (channels, channels, 3, 3)))
            self.check(choose_layout, g, claims())
            self.assertEqual("@0231" in show(g), changed, channels)

    def test_what_a_stride_makes_slow_pays_for_conversions(self) -> None:
        for stride, changed in (([2, 1], True), ([1, 1], False)):
            for f in (F.conv_transpose2d, input_gradient):
                g = graph_of(
                    lambda x, w: f(x, w, stride=stride).mean((2, 3)),  # noqa: B023
                    *((2, 8, 32, 32), (8, 8, 3, 3)),
                )
                self.check(choose_layout, canonicalize(g), claims())
                self.assertEqual("@0231" in show(g), changed, (stride, f))

    def test_training_graphs(self) -> None:
        w = torch.randn(W, requires_grad=True)
        for g in graphs_of(tower, X, w, train=True).values():
            self.check(choose_layout, canonicalize(g), Always())
            self.assertIn("@0231", show(g))

    def test_symbolic_sizes(self) -> None:
        g = canonicalize(graph_of(tower, (3, 8, 16, 18), W, dynamic=True))
        self.check(choose_layout, g, Always())
        self.assertIn("@0231", show(g))

    def test_sizes_of_what_lies_otherwise(self) -> None:
        """A product refuses the new order and is given a copy; beside it reads a size that is no tensor."""

        def f(x: T, w: T) -> T:
            y = F.conv2d(x, w, padding=2, dilation=2) / 16
            return y @ y

        g = canonicalize(graph_of(f, (16, 8, 7, 7), (4, 8, 2, 2), dynamic=True))
        self.assertIn("sym_size", show(g))
        self.check(choose_layout, g, Always())

    def test_relayed_values_are_copied_for_what_needs_the_traced_strides(self) -> None:
        def f(x: T, w: T) -> tuple[T, ...]:
            return x + 1, x.view(16, 256) * w, torch.as_strided(x, (3, 5), (1, 300)) + 1

        g = graph_of(f, X, (256,))
        x = next(iter(g.graph.nodes))
        turned = x.meta["val"].as_strided(X, (2048, 1, 128, 8))
        g.meta[FREE_OUTPUTS] = (0, 1, 2)
        relay(g, {x: turned})
        verify(g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,8,16,16], arg1_1: f32[256]):
  v0: f32[2,8,16,16] = add(arg0_1, 1)
  v1: f32[2,8,16,16] = permute(arg0_1, [0,1,2,3])
  v2: f32[2,8,16,16] = clone(v1, memory_format=contiguous_format)
  v3: f32[2,8,16,16] = permute(v2, [0,1,2,3])
  v4: f32[16,256] = view(v3, [16,256])
  v5: f32[16,256] = mul(v4, arg1_1)
  v6: f32[3,5] = as_strided(v3, [3,5], [1,300])
  v7: f32[3,5] = add(v6, 1)
  return v0, v5, v7
""",
        )
