"""rewrite_conv_matmul: what windows add up to, as a product and a fold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of

from dicp.compiler import observe
from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.conv_matmul import rewrite_conv_matmul
from dicp.passes.widen import widen
from dicp.vendor.base import Convolution, ConvolutionPart

T = torch.Tensor
aten = torch.ops.aten


class Folds(claims):
    """A vendor that wants the gradients of inputs as products, and nothing else."""

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        return part == "input"


class Everything(claims):
    """One that wants every product."""

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        return True


class Widens(Folds):
    """The same, which computes convolutions of a low precision in float32, but products as stored."""

    def computes_wide(self, node: Any) -> bool:
        return node.target is not aten.mm.default


def last(x: T) -> T:
    return x.clone(memory_format=torch.channels_last)


def input_gradient(g: T, x: T, w: T, stride: int, padding: int) -> T:
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, False, False])
    return aten.convolution_backward.default(g, x, w, None, *how)[0]


class TestConvFold(TestCase, CheckPass):
    def test_windows_side_by_side(self) -> None:
        g = graph_of(
            lambda x, w, b: F.conv_transpose2d(last(x), w, b, stride=2), (2, 3, 5, 4), (3, 6, 2, 2), (6,)
        )
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Folds())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[3,6,2,2], arg2_1: f32[6]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,5,4,3] = permute(v0, [0,2,3,1])
  v2: f32[40,3] = view(v1, [-1,3])
  v3: f32[3,2,2,6] = permute(arg1_1, [0,2,3,1])
  v4: f32[3,2,2,6] = clone(v3, memory_format=contiguous_format)
  v5: f32[3,24] = view(v4, [3,24])
  v6: f32[40,24] = mm(v2, v5)
  v7: f32[2,5,4,2,2,6] = view(v6, [-1,5,4,2,2,6])
  v8: f32[2,5,4,1,2,1,2,6] = view(v7, [-1,5,4,1,2,1,2,6])
  v9: f32[2,5,4,2,1,2,6] = select.int(v8, 3, 0)
  v10: f32[2,5,4,2,2,6] = select.int(v9, 4, 0)
  v11: f32[2,5,2,4,2,6] = permute(v10, [0,1,3,2,4,5])
  v12: f32[2,5,2,4,2,6] = clone(v11, memory_format=contiguous_format)
  v13: f32[2,10,8,6] = view(v12, [-1,10,8,6])
  v14: f32[2,6,10,8] = permute(v13, [0,3,1,2])
  v15: f32[6,1,1] = view(arg2_1, [-1,1,1])
  v16: f32[2,6,10,8] = add(v14, v15)
  return v16
""",
        )

    def test_windows_that_overlap(self) -> None:
        g = graph_of(
            lambda x, w: F.conv_transpose2d(last(x), w, stride=2, padding=1, output_padding=1),
            *((2, 3, 5, 4), (3, 6, 3, 3)),
        )
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Folds())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[3,6,3,3]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,5,4,3] = permute(v0, [0,2,3,1])
  v2: f32[40,3] = view(v1, [-1,3])
  v3: f32[3,3,3,6] = permute(arg1_1, [0,2,3,1])
  v4: f32[3,3,3,6] = clone(v3, memory_format=contiguous_format)
  v5: f32[3,54] = view(v4, [3,54])
  v6: f32[40,54] = mm(v2, v5)
  v7: f32[2,5,4,3,3,6] = view(v6, [-1,5,4,3,3,6])
  v8: f32[2,5,4,4,4,6] = constant_pad_nd(v7, [0,0,0,1,0,1], 0)
  v9: f32[2,5,4,2,2,2,2,6] = view(v8, [-1,5,4,2,2,2,2,6])
  v10: f32[2,5,4,2,2,2,6] = select.int(v9, 3, 0)
  v11: f32[2,5,4,2,2,6] = select.int(v10, 4, 0)
  v12: f32[2,6,5,2,2,6] = constant_pad_nd(v11, [0,0,0,0,0,0,0,1,0,1], 0)
  v13: f32[2,5,4,2,2,6] = select.int(v10, 4, 1)
  v14: f32[2,6,5,2,2,6] = constant_pad_nd(v13, [0,0,0,0,0,0,1,0,0,1], 0)
  v15: f32[2,5,4,2,2,2,6] = select.int(v9, 3, 1)
  v16: f32[2,5,4,2,2,6] = select.int(v15, 4, 0)
  v17: f32[2,6,5,2,2,6] = constant_pad_nd(v16, [0,0,0,0,0,0,0,1,1,0], 0)
  v18: f32[2,5,4,2,2,6] = select.int(v15, 4, 1)
  v19: f32[2,6,5,2,2,6] = constant_pad_nd(v18, [0,0,0,0,0,0,1,0,1,0], 0)
  v20: f32[2,6,5,2,2,6] = add(v12, v14)
  v21: f32[2,6,5,2,2,6] = add(v20, v17)
  v22: f32[2,6,5,2,2,6] = add(v21, v19)
  v23: f32[2,6,2,5,2,6] = permute(v22, [0,1,3,2,4,5])
  v24: f32[2,6,2,5,2,6] = clone(v23, memory_format=contiguous_format)
  v25: f32[2,12,10,6] = view(v24, [-1,12,10,6])
  v26: f32[2,10,10,6] = slice(v25, 1, 1, 11)
  v27: f32[2,10,8,6] = slice(v26, 2, 1, 9)
  v28: f32[2,10,8,6] = clone(v27, memory_format=contiguous_format)
  v29: f32[2,6,10,8] = permute(v28, [0,3,1,2])
  return v29
""",
        )

    def test_a_weight_larger_than_what_is_made_of_it_stays_as_it_lies(self) -> None:
        g = graph_of(lambda x, w: F.conv_transpose2d(x, w), (2, 32, 1, 1), (32, 6, 2, 2))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Folds())),
            """\
graph(arg0_1: f32[2,32,1,1], arg1_1: f32[32,6,2,2]):
  v0: f32[2,1,1,32] = permute(arg0_1, [0,2,3,1])
  v1: f32[2,32] = view(v0, [-1,32])
  v2: f32[32,24] = view(arg1_1, [32,24])
  v3: f32[2,24] = mm(v1, v2)
  v4: f32[2,1,1,6,2,2] = view(v3, [-1,1,1,6,2,2])
  v5: f32[2,1,1,2,2,6] = permute(v4, [0,1,2,4,5,3])
  v6: f32[2,1,1,1,2,1,2,6] = view(v5, [-1,1,1,1,2,1,2,6])
  v7: f32[2,1,1,2,1,2,6] = select.int(v6, 3, 0)
  v8: f32[2,1,1,2,2,6] = select.int(v7, 4, 0)
  v9: f32[2,1,2,1,2,6] = permute(v8, [0,1,3,2,4,5])
  v10: f32[2,1,2,1,2,6] = clone(v9, memory_format=contiguous_format)
  v11: f32[2,2,2,6] = view(v10, [-1,2,2,6])
  v12: f32[2,6,2,2] = permute(v11, [0,3,1,2])
  v13: f32[2,6,2,2] = clone(v12, memory_format=contiguous_format)
  return v13
""",
        )

    def test_gradient(self) -> None:
        g = graph_of(
            lambda g, x, w: input_gradient(last(g), last(x), last(w), 2, 0),
            *((2, 6, 2, 2), (2, 3, 5, 4), (6, 3, 2, 2)),
        )
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Folds())),
            """\
graph(arg0_1: f32[2,6,2,2], arg1_1: f32[2,3,5,4], arg2_1: f32[6,3,2,2]):
  v0: f32[2,6,2,2] = clone(arg0_1, memory_format=channels_last)
  v1: f32[6,3,2,2] = clone(arg2_1, memory_format=channels_last)
  v2: f32[2,2,2,6] = permute(v0, [0,2,3,1])
  v3: f32[8,6] = view(v2, [-1,6])
  v4: f32[6,2,2,3] = permute(v1, [0,2,3,1])
  v5: f32[6,12] = view(v4, [6,12])
  v6: f32[8,12] = mm(v3, v5)
  v7: f32[2,2,2,2,2,3] = view(v6, [-1,2,2,2,2,3])
  v8: f32[2,2,2,1,2,1,2,3] = view(v7, [-1,2,2,1,2,1,2,3])
  v9: f32[2,2,2,2,1,2,3] = select.int(v8, 3, 0)
  v10: f32[2,2,2,2,2,3] = select.int(v9, 4, 0)
  v11: f32[2,3,2,2,2,3] = constant_pad_nd(v10, [0,0,0,0,0,0,0,0,0,1], 0)
  v12: f32[2,3,2,2,2,3] = permute(v11, [0,1,3,2,4,5])
  v13: f32[2,3,2,2,2,3] = clone(v12, memory_format=contiguous_format)
  v14: f32[2,6,4,3] = view(v13, [-1,6,4,3])
  v15: f32[2,5,4,3] = slice(v14, 1, 0, 5)
  v16: f32[2,5,4,3] = clone(v15, memory_format=contiguous_format)
  v17: f32[2,3,5,4] = permute(v16, [0,3,1,2])
  return v17
""",
        )

    def test_gradients_of_a_transposed_convolution(self) -> None:
        """Are what a convolution computes, and the gradient of its weight, of windows of what comes back."""

        def f(g: T, x: T, w: T) -> tuple[T, T, T]:
            how = ([2, 1], [0, 1], [1, 1], True, [1, 0], 1, [True, True, True])
            return aten.convolution_backward.default(last(g), last(x), w, [6], *how)

        g = graph_of(f, (2, 6, 12, 4), (2, 3, 5, 4), (3, 6, 3, 3))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Everything())),
            """\
graph(arg0_1: f32[2,6,12,4], arg1_1: f32[2,3,5,4], arg2_1: f32[3,6,3,3]):
  v0: f32[2,6,12,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,3,5,4] = clone(arg1_1, memory_format=channels_last)
  v2: f32[3,54] = view(arg2_1, [3,54])
  v3: f32[54,3] = permute(v2, [1,0])
  v4: f32[2,6,12,6] = constant_pad_nd(v0, [1,1,0,0], 0)
  v5: f32[2,6,5,6,3] = unfold(v4, 2, 3, 2)
  v6: f32[2,6,5,4,3,3] = unfold(v5, 3, 3, 1)
  v7: f32[2,5,4,6,3,3] = permute(v6, [0,2,3,1,4,5])
  v8: f32[2,5,4,6,3,3] = clone(v7, memory_format=contiguous_format)
  v9: f32[40,54] = view(v8, [-1,54])
  v10: f32[40,3] = mm(v9, v3)
  v11: f32[2,5,4,3] = view(v10, [-1,5,4,3])
  v12: f32[2,3,5,4] = permute(v11, [0,3,1,2])
  v13: f32[2,5,4,3] = permute(v1, [0,2,3,1])
  v14: f32[40,3] = view(v13, [-1,3])
  v15: f32[3,40] = permute(v14, [1,0])
  v16: f32[3,54] = mm(v15, v9)
  v17: f32[3,6,3,3] = view(v16, [3,6,3,3])
  v18: f32[3,6,3,3] = clone(v17, memory_format=channels_last)
  v19: f32[6] = sum.dim_IntList(v0, [0,2,3])
  return v12, v18, v19
""",
        )

    def test_many_geometries(self) -> None:
        for window, stride, padding, more, size in (
            ((4, 4), (2, 2), (1, 1), (0, 0), (4, 4)),
            ((3, 5), (2, 3), (1, 2), (1, 0), (3, 2)),
            ((2, 2), (3, 4), (0, 0), (2, 3), (2, 3)),  # between windows nothing is added
            ((5, 1), (1, 1), (2, 0), (0, 0), (4, 3)),
            ((4, 3), (3, 2), (0, 1), (0, 1), (1, 1)),
            ((7, 7), (2, 2), (3, 3), (1, 1), (5, 4)),
        ):
            for channels in (3, 40):  # by channel, and as the weight lies
                g = graph_of(
                    lambda x, w: F.conv_transpose2d(x, w, None, stride, padding, more),  # noqa: B023
                    *((2, channels, *size), (channels, 5, *window)),
                )
                text = show(self.check(rewrite_conv_matmul, canonicalize(g), Folds()))
                self.assertNotIn("convolution", text)

    def test_what_stays(self) -> None:
        def transposed(**how: Any) -> Any:
            return lambda x, w: F.conv_transpose2d(last(x), w, **how)

        for f in (transposed(dilation=2), transposed(groups=2)):
            g = canonicalize(graph_of(f, (2, 4, 5, 4), (4, 6, 3, 3)))
            text = show(g)
            self.assertEqual(show(self.check(rewrite_conv_matmul, g, Folds())), text)

    def test_only_windows_side_by_side_are_rounded_before_they_are_added_up(self) -> None:
        def text(window: int, gradient: bool) -> str:
            def f(g: T, w: T) -> T:
                if not gradient:
                    return F.conv_transpose2d(last(g), w, stride=2)
                x = g.new_zeros(2, 6, 8 + window, 6 + window)
                return input_gradient(last(g), last(x), w, 2, 0)

            shapes = (2, 4, 5, 4), (4, 6, window, window)
            g = graph_of(f, *(torch.randn(s).bfloat16() for s in shapes))
            vendor = Widens()
            return show(self.check(rewrite_conv_matmul, widen(canonicalize(g), vendor), vendor))

        for gradient in (False, True):
            self.assertIn("bf16[40,24] = mm(", text(2, gradient))
            self.assertIn("f32[40,54] = mm(", text(3, gradient))

    def test_a_weight_whose_copy_lies_otherwise_than_what_is_stored(self) -> None:
        """The product reads the one, the graph has the other: both go by one order of channels and window."""

        def f(x: T, w: T) -> T:
            to = torch.ops.prims.convert_element_type.default
            wide = (last(to(v, torch.float32)) for v in (x, w))
            return to(F.conv_transpose2d(*wide, stride=2), torch.bfloat16)

        shapes = (2, 40, 2, 2), (40, 5, 2, 2)
        g = canonicalize(graph_of(f, *(torch.randn(s).bfloat16() for s in shapes)))
        self.assertIn("bf16[8,20] = mm(", show(self.check(rewrite_conv_matmul, g, Widens())))


CALLS = {
    "one position": (torch.nn.ConvTranspose2d(100, 64, 4), (2, 100, 1, 1)),
    "few positions": (torch.nn.ConvTranspose2d(128, 64, 4, 2, 1), (2, 128, 4, 4)),
    "side by side": (torch.nn.ConvTranspose2d(64, 32, 2, 2), (2, 64, 16, 16)),
    "to colours": (torch.nn.ConvTranspose2d(32, 3, 4, 2, 1), (8, 32, 16, 16)),
    "gradient": (torch.nn.Conv2d(32, 64, 3, 2, 1), (4, 32, 16, 16)),
}


@pytest.mark.parametrize(
    ("name", "freeze"), [*((name, False) for name in CALLS), *((name, True) for name in CALLS if name != "gradient")]
)
def test_agrees_with_eager(name: str, freeze: bool) -> None:
    """Those that cpu_graph folds, forward, with frozen weights, and backward."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    conv, shape = CALLS[name]
    x = last(torch.randn(shape)).requires_grad_()
    compiled, seen = torch.compile(conv, backend="dicp_cpu", options={"freeze": freeze}), []
    results = []
    for f in (conv, compiled):
        conv.zero_grad()
        x.grad = None
        with observe(seen.append), torch.set_grad_enabled(not freeze):
            y = f(x)
            if not freeze:
                y.square().sum().backward()
        results.append((y.detach(), x.grad, conv.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert results[1][0].stride() == results[0][0].stride()
    calls = [call.node.target for graph in seen for call in graph.program.library_calls]
    assert aten.mm.default in calls
