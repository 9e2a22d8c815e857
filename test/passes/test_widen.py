"""widen: contractions of a low precision in float32, where the vendor asks for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.widen import widen

T = torch.Tensor


class Slow(claims):
    """A vendor without products of bfloat16."""

    def computes_wide(self, node: Any) -> bool:
        return True


def low(*shape: int) -> T:
    return torch.randn(shape).bfloat16()


class TestWiden(TestCase, CheckPass):
    rtol, atol = 4e-2, 1e-1  # eager rounds partial sums to bfloat16 too

    def text(self, fn: Any, *inputs: Any) -> str:
        return show(self.check(widen, canonicalize(graph_of(fn, *inputs)), Slow()))

    def test_weights_are_converted_as_they_lie_and_shared_operands_once(self) -> None:
        def two(x: T, v: T, w: T) -> T:
            return x @ v.t() + x @ w

        self.assertExpectedInline(
            self.text(two, low(4, 8), low(6, 8), low(8, 6)),
            """\
graph(arg0_1: bf16[6,8], arg1_1: bf16[4,8], arg2_1: bf16[8,6]):
  v0: f32[4,8] = prims.convert_element_type(arg1_1, f32)
  v1: f32[6,8] = prims.convert_element_type(arg0_1, f32)
  v2: f32[8,6] = permute(v1, [1,0])
  v3: f32[4,6] = mm(v0, v2)
  v4: bf16[4,6] = prims.convert_element_type(v3, bf16)
  v5: f32[8,6] = prims.convert_element_type(arg2_1, f32)
  v6: f32[4,6] = mm(v0, v5)
  v7: bf16[4,6] = prims.convert_element_type(v6, bf16)
  v8: bf16[4,6] = add(v4, v7)
  return v8
""",
        )

    def test_several_results(self) -> None:
        def gradients(g: T, x: T, w: T) -> Any:
            how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
            return torch.ops.aten.convolution_backward.default(g, x, w, None, *how)[:2]

        shapes = (low(2, 6, 5, 4), low(2, 3, 5, 4), low(6, 3, 3, 3))
        self.assertExpectedInline(
            self.text(gradients, *shapes),
            """\
graph(arg0_1: bf16[2,6,5,4], arg1_1: bf16[2,3,5,4], arg2_1: bf16[6,3,3,3]):
  v0: f32[2,6,5,4] = prims.convert_element_type(arg0_1, f32)
  v1: f32[2,3,5,4] = prims.convert_element_type(arg1_1, f32)
  v2: f32[6,3,3,3] = prims.convert_element_type(arg2_1, f32)
  v3: (f32[2,3,5,4], f32[6,3,3,3], ?) = convolution_backward(v0, v1, v2, None, [1,1], [1,1], [1,1], False, [0,0], 1, [True,True,False])
  v4: f32[2,3,5,4] = v3[0]
  v5: bf16[2,3,5,4] = prims.convert_element_type(v4, bf16)
  v6: f32[6,3,3,3] = v3[1]
  v7: bf16[6,3,3,3] = prims.convert_element_type(v6, bf16)
  return v5, v7
""",
        )

    def test_what_lies_between_convolutions_is_not_rounded(self) -> None:
        def block(x: T, w: T, v: T, scale: T, shift: T) -> Any:
            y = F.relu(F.batch_norm(F.conv2d(x, w), shift, scale, scale, shift))
            z = F.conv2d(y, v) + x
            return F.relu(z).mean((2, 3))

        w, scale = low(3, 3, 1, 1), low(3).abs()
        self.assertExpectedInline(self.text(block, low(2, 3, 4, 4), w, w.clone(), scale, low(3)), """\
graph(arg0_1: bf16[2,3,4,4], arg1_1: bf16[3,3,1,1], arg2_1: bf16[3], arg3_1: bf16[3], arg4_1: bf16[3,3,1,1]):
  v0: f32[2,3,4,4] = prims.convert_element_type(arg0_1, f32)
  v1: f32[3,3,1,1] = prims.convert_element_type(arg1_1, f32)
  v2: f32[2,3,4,4] = convolution(v0, v1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v3: f32[3] = prims.convert_element_type(arg3_1, f32)
  v4: f32[3] = prims.convert_element_type(arg2_1, f32)
  v5: (f32[2,3,4,4], f32[0], f32[0]) = _native_batch_norm_legit_no_training(v2, v3, v4, v4, v3, 0.1, 1e-05)
  v6: f32[2,3,4,4] = v5[0]
  v7: f32[2,3,4,4] = relu(v6)
  v8: f32[3,3,1,1] = prims.convert_element_type(arg4_1, f32)
  v9: f32[2,3,4,4] = convolution(v7, v8, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v10: f32[2,3,4,4] = prims.convert_element_type(arg0_1, f32)
  v11: f32[2,3,4,4] = add(v9, v10)
  v12: f32[2,3,4,4] = relu(v11)
  v13: bf16[2,3,4,4] = prims.convert_element_type(v12, bf16)
  v14: bf16[2,3] = mean.dim(v13, [2,3])
  return v14
""")

    def test_what_others_read_is_rounded(self) -> None:
        """What is returned, as it is (z) and as float32."""

        def block(x: T, w: T) -> Any:
            z = F.relu(F.conv2d(x, w))
            return torch.ops.prims.convert_element_type(F.conv2d(z, w), torch.float32), z

        self.assertExpectedInline(self.text(block, low(2, 3, 4, 4), low(3, 3, 1, 1)), """\
graph(arg0_1: bf16[2,3,4,4], arg1_1: bf16[3,3,1,1]):
  v0: f32[2,3,4,4] = prims.convert_element_type(arg0_1, f32)
  v1: f32[3,3,1,1] = prims.convert_element_type(arg1_1, f32)
  v2: f32[2,3,4,4] = convolution(v0, v1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v3: f32[2,3,4,4] = relu(v2)
  v4: bf16[2,3,4,4] = prims.convert_element_type(v3, bf16)
  v5: f32[2,3,4,4] = prims.convert_element_type(v4, f32)
  v6: f32[2,3,4,4] = convolution(v5, v1, None, [1,1], [0,0], [1,1], False, [0,0], 1)
  v7: bf16[2,3,4,4] = prims.convert_element_type(v6, bf16)
  v8: f32[2,3,4,4] = prims.convert_element_type(v7, f32)
  return v8, v4
""")

    def test_float32_stays(self) -> None:
        g = canonicalize(graph_of(torch.mm, (4, 8), (8, 6)))
        before = show(g)
        self.assertEqual(show(self.check(widen, g, Slow())), before)

    def test_what_eager_refuses_stays(self) -> None:
        g = canonicalize(graph_of(torch.mm, (4, 8), (8, 6)))
        next(n for n in g.graph.nodes if n.op == "placeholder").meta["val"] = low(4, 8).to("meta")
        before = show(g)
        self.assertEqual(show(widen(g, Slow())), before)

    def test_a_vendor_without_a_say(self) -> None:
        g = canonicalize(graph_of(torch.mm, low(4, 8), low(8, 6)))
        before = show(g)
        self.assertEqual(show(self.check(widen, g, claims())), before)

    def test_symbolic_sizes(self) -> None:
        g = canonicalize(graph_of(torch.mm, low(4, 8), low(8, 6), dynamic=True))
        self.assertIn("mm(", show(self.check(widen, g, Slow())))
        assert all(
            n.meta["val"].dtype == torch.float32
            for n in g.graph.nodes
            if n.target is torch.ops.aten.mm.default
        )

    def test_gradients_of_attention(self) -> None:
        def attend(q: T, k: T, v: T) -> T:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        inputs = [low(2, 4, 16, 8).requires_grad_() for _ in range(3)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        graphs = graphs_of(attend, *inputs, train=True, keep=(flash.default,))
        for gm in graphs.values():
            wide = self.check(widen, canonicalize(gm), Slow())
            calls = [n for n in wide.graph.nodes if "flash_attention" in str(n.target)]
            assert len(calls) == 1
            assert all(v.dtype == torch.float32 for v in calls[0].meta["val"])
