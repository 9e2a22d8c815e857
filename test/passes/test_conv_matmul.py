"""rewrite_conv_matmul: channels-last convolutions as matrix products over their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of

from dicp.compiler import observe
from dicp.ir.printer import show
from dicp.ops.library import register
from dicp.passes.canonicalize import canonicalize
from dicp.passes.conv_matmul import convolution_of, rewrite_conv_matmul
from dicp.passes.widen import widen
from dicp.vendor.base import Convolution, ConvolutionPart
from dicp.vendor.cpu_graph.claims.matmul import halved_by_mkl

T = torch.Tensor
aten = torch.ops.aten


class Products(claims):
    """A vendor that wants every product but the gradient of the input whose windows would be folded."""

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        return part != "input" or conv.pointwise


def last(x: T) -> T:
    return x.clone(memory_format=torch.channels_last)


class TestConvMatmul(TestCase, CheckPass):
    def test_window_of_one(self) -> None:
        g = graph_of(lambda x, w, b: F.conv2d(last(x), w, b), (2, 3, 5, 4), (6, 3, 1, 1), (6,))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Products())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[6,3,1,1], arg2_1: f32[6]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[6,3] = view(arg1_1, [6,3])
  v2: f32[3,6] = permute(v1, [1,0])
  v3: f32[2,5,4,3] = permute(v0, [0,2,3,1])
  v4: f32[40,3] = view(v3, [-1,3])
  v5: f32[40,6] = addmm(arg2_1, v4, v2)
  v6: f32[2,5,4,6] = view(v5, [-1,5,4,6])
  v7: f32[2,6,5,4] = permute(v6, [0,3,1,2])
  return v7
""",
        )

    def test_windows_of_a_row_major_image(self) -> None:
        g = graph_of(lambda x, w: F.conv2d(x, w, stride=2), (2, 3, 5, 5), (6, 3, 3, 3))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Products())),
            """\
graph(arg0_1: f32[2,3,5,5], arg1_1: f32[6,3,3,3]):
  v0: f32[6,27] = view(arg1_1, [6,27])
  v1: f32[27,6] = permute(v0, [1,0])
  v2: f32[2,3,2,5,3] = unfold(arg0_1, 2, 3, 2)
  v3: f32[2,3,2,2,3,3] = unfold(v2, 3, 3, 2)
  v4: f32[2,2,2,3,3,3] = permute(v3, [0,2,3,1,4,5])
  v5: f32[2,2,2,3,3,3] = clone(v4, memory_format=contiguous_format)
  v6: f32[8,27] = view(v5, [-1,27])
  v7: f32[8,6] = mm(v6, v1)
  v8: f32[2,2,2,6] = view(v7, [-1,2,2,6])
  v9: f32[2,6,2,2] = permute(v8, [0,3,1,2])
  v10: f32[2,6,2,2] = clone(v9, memory_format=contiguous_format)
  return v10
""",
        )

    def test_windows_over_a_border_of_a_row_major_image_stay(self) -> None:
        g = canonicalize(graph_of(lambda x, w: F.conv2d(x, w, padding=1), (2, 3, 5, 5), (6, 3, 3, 3)))
        text = show(g)
        self.assertEqual(show(self.check(rewrite_conv_matmul, g, Products())), text)

    def test_window_of_one_over_symbolic_sizes(self) -> None:
        def convolve(window: int) -> Any:
            conv = torch.nn.Conv2d(3, 6, window, bias=False).requires_grad_(False)
            return canonicalize(graph_of(lambda x: conv(last(x.relu())), (2, 3, 5, 7), dynamic=True))

        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, convolve(1), Products())),
            """\
graph(arg0_1: Sym(s0), arg1_1: Sym(s1), arg2_1: Sym(s2), arg3_1: f32[s0,3,s1,s2], arg4_1: f32[6,3,1,1]):
  v0: f32[s0,3,s1,s2] = relu(arg3_1)
  v1: f32[s0,3,s1,s2] = clone(v0, memory_format=channels_last)
  v2: f32[6,3] = view(arg4_1, [6,3])
  v3: f32[3,6] = permute(v2, [1,0])
  v4: f32[s0,s1,s2,3] = permute(v1, [0,2,3,1])
  v5: f32[s0*s1*s2,3] = view(v4, [-1,3])
  v6: f32[s0*s1*s2,6] = mm(v5, v3)
  v7: Sym(s1) = sym_size.int(v1, 2)
  v8: Sym(s2) = sym_size.int(v1, 3)
  v9: f32[s0,s1,s2,6] = view(v6, [-1,v7,v8,6])
  v10: f32[s0,6,s1,s2] = permute(v9, [0,3,1,2])
  return v10
""",
        )
        windows = convolve(2)  # a copy of each window, of how many nobody knows
        text = show(windows)
        self.assertEqual(show(self.check(rewrite_conv_matmul, windows, Products())), text)

    def test_bias_of_another_dtype_stays_with_the_convolution(self) -> None:
        """As that of a norm folded into a low precision: a product would round before it is added."""
        register()
        conv = torch.ops.dicp.conv.default
        g = graph_of(
            lambda x, w, b: conv(last(x.bfloat16()), w.bfloat16(), b, None, [1, 1], [0, 0], [1, 1], 1, "none"),
            *((2, 3, 5, 4), (6, 3, 1, 1), (6,)),
        )
        text = show(g)
        self.assertEqual(show(rewrite_conv_matmul(g, Products())), text)

    def test_an_activation_goes_with_it(self) -> None:
        def text(vendor: Products) -> str:
            def f(x: T, w: T, b: T) -> T:
                return F.relu6(F.conv2d(last(x), w, b))

            g = canonicalize(graph_of(f, (2, 3, 5, 4), (6, 3, 1, 1), (6,)))
            return show(self.check(rewrite_conv_matmul, g, vendor))

        self.assertExpectedInline(
            text(Products()),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[6,3,1,1], arg2_1: f32[6]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,5,4,3] = permute(v0, [0,2,3,1])
  v2: f32[40,3] = view(v1, [-1,3])
  v3: f32[6,3] = view(arg1_1, [6,3])
  v4: f32[40,6] = dicp.linear(v2, v3, arg2_1, None, relu6)
  v5: f32[2,5,4,6] = view(v4, [-1,5,4,6])
  v6: f32[2,6,5,4] = permute(v5, [0,3,1,2])
  return v6
""",
        )
        apart = text(Products(lambda node: node.target is not torch.ops.dicp.linear.default))
        self.assertIn("addmm(", apart)
        self.assertIn("hardtanh(", apart)

    def test_what_is_added_goes_with_it_if_it_lies_by_rows(self) -> None:
        register()

        def text(order: Any, act: str = "none", window: int = 1) -> str:
            def f(x: T, w: T, other: T) -> T:
                sizes = ([1, 1], [window // 2, window // 2], [1, 1], 1)
                return torch.ops.dicp.conv.default(last(x), w, None, order(other), *sizes, act)

            g = graph_of(f, (2, 3, 5, 4), (6, 3, window, window), (2, 6, 5, 4))
            return show(self.check(rewrite_conv_matmul, g, Products()))

        self.assertIn("f32[40,6] = dicp.linear(v5, v6, None, v3, none)", text(last))
        self.assertIn("dicp.conv(", text(T.contiguous))
        self.assertIn("dicp.conv(", text(last, "relu"))  # of the sum: linear has it before
        self.assertIn("dicp.conv(", text(last, window=3))  # whose windows would be gathered

    def test_larger_window_gathers(self) -> None:
        g = graph_of(
            lambda x, w: F.conv2d(last(x), w, stride=2, padding=(1, 0)), (2, 3, 5, 4), (6, 3, 3, 2)
        )
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Products())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[6,3,3,2]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[6,18] = view(arg1_1, [6,18])
  v2: f32[18,6] = permute(v1, [1,0])
  v3: f32[2,3,7,4] = constant_pad_nd(v0, [0,0,1,1], 0)
  v4: f32[2,3,3,4,3] = unfold(v3, 2, 3, 2)
  v5: f32[2,3,3,2,3,2] = unfold(v4, 3, 2, 2)
  v6: f32[2,3,2,3,3,2] = permute(v5, [0,2,3,1,4,5])
  v7: f32[2,3,2,3,3,2] = clone(v6, memory_format=contiguous_format)
  v8: f32[12,18] = view(v7, [-1,18])
  v9: f32[12,6] = mm(v8, v2)
  v10: f32[2,3,2,6] = view(v9, [-1,3,2,6])
  v11: f32[2,6,3,2] = permute(v10, [0,3,1,2])
  return v11
""",
        )

    def test_gradients(self) -> None:
        def f(g: T, x: T, w: T) -> tuple[T, T]:
            mask = [True, True, False]
            out = aten.convolution_backward.default(
                g, last(x), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
            )
            return out[0], out[1]

        g = graph_of(f, (2, 6, 5, 4), (2, 3, 5, 4), (6, 3, 1, 1))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Products())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[2,6,5,4], arg2_1: f32[6,3,1,1]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,5,4,6] = permute(arg1_1, [0,2,3,1])
  v2: f32[2,5,4,6] = clone(v1, memory_format=contiguous_format)
  v3: f32[40,6] = view(v2, [-1,6])
  v4: f32[6,3] = view(arg2_1, [6,3])
  v5: f32[40,3] = mm(v3, v4)
  v6: f32[2,5,4,3] = view(v5, [-1,5,4,3])
  v7: f32[2,3,5,4] = permute(v6, [0,3,1,2])
  v8: f32[6,40] = permute(v3, [1,0])
  v9: f32[2,5,4,3] = permute(v0, [0,2,3,1])
  v10: f32[40,3] = view(v9, [-1,3])
  v11: f32[6,3] = mm(v8, v10)
  v12: f32[6,3,1,1] = view(v11, [6,3,1,1])
  v13: f32[6,3,1,1] = clone(v12, memory_format=channels_last)
  return v7, v13
""",
        )

    def test_only_the_weight_of_a_larger_window(self) -> None:
        def f(g: T, x: T, w: T) -> tuple[T, T]:
            mask = [True, True, False]
            out = aten.convolution_backward.default(
                g, last(x), w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
            )
            return out[0], out[1]

        g = graph_of(f, (2, 6, 5, 4), (2, 3, 5, 4), (6, 3, 3, 3))
        self.assertExpectedInline(
            show(self.check(rewrite_conv_matmul, canonicalize(g), Products())),
            """\
graph(arg0_1: f32[2,3,5,4], arg1_1: f32[2,6,5,4], arg2_1: f32[6,3,3,3]):
  v0: f32[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,5,4,6] = permute(arg1_1, [0,2,3,1])
  v2: f32[2,5,4,6] = clone(v1, memory_format=contiguous_format)
  v3: f32[40,6] = view(v2, [-1,6])
  v4: f32[6,40] = permute(v3, [1,0])
  v5: f32[2,3,7,6] = constant_pad_nd(v0, [1,1,1,1], 0)
  v6: f32[2,3,5,6,3] = unfold(v5, 2, 3, 1)
  v7: f32[2,3,5,4,3,3] = unfold(v6, 3, 3, 1)
  v8: f32[2,5,4,3,3,3] = permute(v7, [0,2,3,1,4,5])
  v9: f32[2,5,4,3,3,3] = clone(v8, memory_format=contiguous_format)
  v10: f32[40,27] = view(v9, [-1,27])
  v11: f32[6,27] = mm(v4, v10)
  v12: f32[6,3,3,3] = view(v11, [6,3,3,3])
  v13: f32[6,3,3,3] = clone(v12, memory_format=channels_last)
  v14: (f32[2,3,5,4], ?, ?) = convolution_backward(arg1_1, v0, arg2_1, None, [1,1], [1,1], [1,1], False, [0,0], 1, [True,False,False])
  v15: f32[2,3,5,4] = v14[0]
  return v15, v13
""",
        )

    def test_what_stays(self) -> None:
        stays = [
            (lambda x, w: F.conv2d(x, w), (2, 4, 5, 4), (6, 4, 1, 1)),  # not channels-last
            (lambda x, w: F.conv2d(last(x), w, groups=2), (2, 4, 5, 4), (6, 2, 1, 1)),
            (lambda x, w: F.conv2d(last(x), w, dilation=2), (2, 4, 5, 4), (6, 4, 2, 2)),
            (lambda x, w: F.conv_transpose2d(last(x), w), (2, 4, 5, 4), (4, 6, 2, 2)),  # would be folded
        ]
        for f, *shapes in stays:
            g = canonicalize(graph_of(f, *shapes))
            text = show(g)
            self.assertEqual(show(self.check(rewrite_conv_matmul, g, Products())), text)
        g = canonicalize(graph_of(lambda x, w: F.conv2d(last(x), w), (2, 4, 5, 4), (6, 4, 1, 1)))
        text = show(g)
        self.assertEqual(show(self.check(rewrite_conv_matmul, g, claims())), text)  # a vendor without a say


class Reads(Products):
    """One that computes convolutions of a low precision in float32, and reads products of it as stored."""

    def __init__(self, products: bool = True) -> None:
        super().__init__()
        self.products = products

    def computes_wide(self, node: Any) -> bool:
        return not (self.products and node.target in (aten.mm.default, aten.addmm.default))


class TestLowPrecision(TestCase, CheckPass):
    rtol, atol = 4e-2, 1e-1  # eager rounds partial sums to bfloat16 too

    def text(self, f: Any, *shapes: tuple[int, ...], vendor: Any = None) -> str:
        vendor = vendor or Reads()
        g = graph_of(f, *(torch.randn(s).bfloat16() for s in shapes))
        return show(self.check(rewrite_conv_matmul, widen(canonicalize(g), vendor), vendor))

    def test_patches_are_gathered_as_stored(self) -> None:
        self.assertExpectedInline(
            self.text(lambda x, w, b: F.conv2d(x, w, b, stride=2), (2, 3, 6, 4), (6, 3, 2, 2), (6,)),
            """\
graph(arg0_1: bf16[2,3,6,4], arg1_1: bf16[6,3,2,2], arg2_1: bf16[6]):
  v0: bf16[6,12] = view(arg1_1, [6,12])
  v1: bf16[12,6] = permute(v0, [1,0])
  v2: bf16[2,3,3,4,2] = unfold(arg0_1, 2, 2, 2)
  v3: bf16[2,3,3,2,2,2] = unfold(v2, 3, 2, 2)
  v4: bf16[2,3,2,3,2,2] = permute(v3, [0,2,3,1,4,5])
  v5: bf16[2,3,2,3,2,2] = clone(v4, memory_format=contiguous_format)
  v6: bf16[12,12] = view(v5, [-1,12])
  v7: bf16[12,6] = addmm(arg2_1, v6, v1)
  v8: bf16[2,3,2,6] = view(v7, [-1,3,2,6])
  v9: bf16[2,6,3,2] = permute(v8, [0,3,1,2])
  v10: bf16[2,6,3,2] = clone(v9, memory_format=contiguous_format)
  return v10
""",
        )

    def test_gradients(self) -> None:
        def f(g: T, x: T, w: T) -> tuple[T, T, T]:
            return aten.convolution_backward.default(
                g, last(x), w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
            )

        self.assertExpectedInline(
            self.text(f, (2, 6, 5, 4), (2, 3, 5, 4), (6, 3, 1, 1)),
            """\
graph(arg0_1: bf16[2,3,5,4], arg1_1: bf16[2,6,5,4], arg2_1: bf16[6,3,1,1]):
  v0: bf16[2,3,5,4] = clone(arg0_1, memory_format=channels_last)
  v1: f32[2,6,5,4] = prims.convert_element_type(arg1_1, f32)
  v2: bf16[2,5,4,6] = permute(arg1_1, [0,2,3,1])
  v3: bf16[2,5,4,6] = clone(v2, memory_format=contiguous_format)
  v4: bf16[40,6] = view(v3, [-1,6])
  v5: bf16[6,3] = view(arg2_1, [6,3])
  v6: bf16[40,3] = mm(v4, v5)
  v7: bf16[2,5,4,3] = view(v6, [-1,5,4,3])
  v8: bf16[2,3,5,4] = permute(v7, [0,3,1,2])
  v9: bf16[6,40] = permute(v4, [1,0])
  v10: bf16[2,5,4,3] = permute(v0, [0,2,3,1])
  v11: bf16[40,3] = view(v10, [-1,3])
  v12: bf16[6,3] = mm(v9, v11)
  v13: bf16[6,3,1,1] = view(v12, [6,3,1,1])
  v14: bf16[6,3,1,1] = clone(v13, memory_format=channels_last)
  v15: f32[6] = sum.dim_IntList(v1, [0,2,3])
  v16: bf16[6] = prims.convert_element_type(v15, bf16)
  return v8, v14, v16
""",
        )

    def test_what_is_computed_with_in_float32(self) -> None:
        def read_in_float32(x: T, w: T) -> tuple[T, T]:
            y = F.conv2d(last(x).float(), w.float())
            return y.bfloat16(), y.sum()

        shapes = ((2, 4, 5, 4), (6, 4, 1, 1))
        text = self.text(read_in_float32, *shapes)
        self.assertIn("f32[40,6] = mm(", text)
        text = self.text(lambda x, w: F.conv2d(last(x), w), *shapes, vendor=Reads(products=False))
        self.assertIn("f32[40,6] = mm(", text)
        text = self.text(lambda x, w: F.conv2d(last(x), w), *shapes)
        self.assertIn("bf16[40,6] = mm(", text)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_agree_with_eager(window: int, stride: int, padding: int) -> None:
    """The products that cpu_graph chooses: few positions, channels-last input, forward and backward."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(5, 7, window, stride=stride, padding=padding, bias=False)
    x = last(torch.randn(2, 5, 6, 7)).requires_grad_()
    results = []
    for f in (conv, torch.compile(conv, backend="dicp_cpu")):
        conv.zero_grad()
        x.grad = None
        y = f(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, conv.weight.grad))
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, eager)
        order = [k for k, n in enumerate(ours.shape) if n > 1]
        assert [ours.stride(k) for k in order] == [eager.stride(k) for k in order]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_what_goes_with_a_product_agrees_with_eager(adds: bool, freeze: bool) -> None:
    """A 1x1 convolution, with a norm folded into it, and ReLU6 or a residual behind: NaN stays NaN."""
    torch.manual_seed(0)
    conv, norm = torch.nn.Conv2d(64, 96, 1, bias=False), torch.nn.BatchNorm2d(96)
    model = torch.nn.Sequential(conv, norm).eval()
    x, other = last(torch.randn(2, 64, 28, 28)), last(torch.randn(2, 96, 28, 28))
    x[0, 3, 4, 5] = torch.nan

    def f(x: T, other: T) -> T:
        return model(x) + other if adds else F.relu6(model(x))

    compiled, seen = torch.compile(f, backend="dicp_cpu", options={"freeze": freeze}), []
    with torch.no_grad(), observe(seen.append):
        ours = compiled(x, other)
    (call,) = seen[0].program.library_calls
    with torch.no_grad():
        torch.testing.assert_close(ours, f(x, other), equal_nan=True)
    assert ours.isnan().any()
    if halved_by_mkl():  # where tiles are ahead of the libraries, but for weights in oneDNN's order with ReLU6
        product = adds or not freeze
        assert call.node.target is (torch.ops.dicp.linear if product else torch.ops.dicp.conv).default


def test_which_convolution() -> None:
    register()
    g = graph_of(lambda x, w: F.conv2d(last(x), w, stride=2, padding=1), (2, 3, 5, 4), (6, 3, 3, 2))
    (node,) = [n for n in g.graph.nodes if n.target is aten.convolution.default]
    dtypes = (torch.float32, torch.float32)
    assert convolution_of(node) == Convolution(18, (3, 3), (3, 6), (3, 2), (2, 2), (1, 1), *dtypes)


@pytest.mark.parametrize(
    ("window", "stride", "product"),
    [(3, 1, False), (2, 2, True), (2, 3, True), (6, 1, True), (1, 1, True)],
)
def test_of_windows_that_overlap_the_batch_is_known(window: int, stride: int, product: bool) -> None:
    """Of 64 images the gathered windows would take 16 times the memory that 4 do."""
    register()
    x = torch.randn(4, 3, 6, 6)
    torch._dynamo.mark_dynamic(x, 0)
    g = graph_of(lambda x, w: F.conv2d(x, w, stride=stride), x, (6, 3, window, window), dynamic=None)
    (node,) = [n for n in g.graph.nodes if n.target is aten.convolution.default]
    assert not isinstance(node.meta["val"].shape[0], int)
    assert (convolution_of(node) is not None) == product
