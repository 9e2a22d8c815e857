"""widen: contractions of a low precision in float32, where the vendor asks for it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.widen import widen

T = torch.Tensor
module = importlib.import_module("dicp.passes.widen")  # the package has the function under that name


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

    def test_a_large_weight_in_panels(self) -> None:
        def layer(x: T, w: T, b: T) -> T:
            return torch.nn.functional.linear(x, w, b)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PANEL", 64 * 8 * 4)
            self.assertExpectedInline(
                self.text(layer, low(4, 8), low(160, 8), low(160)),
                """\
graph(arg0_1: bf16[4,8], arg1_1: bf16[160,8], arg2_1: bf16[160]):
  v0: f32[4,8] = prims.convert_element_type(arg0_1, f32)
  v1: bf16[64,8] = slice(arg1_1, 0, 0, 64)
  v2: f32[64,8] = prims.convert_element_type(v1, f32)
  v3: f32[8,64] = permute(v2, [1,0])
  v4: bf16[64] = slice(arg2_1, 0, 0, 64)
  v5: f32[64] = prims.convert_element_type(v4, f32)
  v6: f32[4,64] = addmm(v5, v0, v3)
  v7: bf16[4,64] = prims.convert_element_type(v6, bf16)
  v8: bf16[64,8] = slice(arg1_1, 0, 64, 128)
  v9: f32[64,8] = prims.convert_element_type(v8, f32)
  v10: f32[8,64] = permute(v9, [1,0])
  v11: bf16[64] = slice(arg2_1, 0, 64, 128)
  v12: f32[64] = prims.convert_element_type(v11, f32)
  v13: f32[4,64] = addmm(v12, v0, v10)
  v14: bf16[4,64] = prims.convert_element_type(v13, bf16)
  v15: bf16[32,8] = slice(arg1_1, 0, 128, 160)
  v16: f32[32,8] = prims.convert_element_type(v15, f32)
  v17: f32[8,32] = permute(v16, [1,0])
  v18: bf16[32] = slice(arg2_1, 0, 128, 160)
  v19: f32[32] = prims.convert_element_type(v18, f32)
  v20: f32[4,32] = addmm(v19, v0, v17)
  v21: bf16[4,32] = prims.convert_element_type(v20, bf16)
  v22: bf16[4,160] = cat([v7,v14,v21], 1)
  return v22
""",
            )

    def test_a_large_operand_of_many_rows_in_panels(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PANEL", 64 * 8 * 4)
            self.assertExpectedInline(
                self.text(lambda g, x: g.t() @ x, low(4, 100), low(4, 8)),
                """\
graph(arg0_1: bf16[4,100], arg1_1: bf16[4,8]):
  v0: bf16[4,64] = slice(arg0_1, 1, 0, 64)
  v1: f32[4,64] = prims.convert_element_type(v0, f32)
  v2: f32[64,4] = permute(v1, [1,0])
  v3: f32[4,8] = prims.convert_element_type(arg1_1, f32)
  v4: f32[64,8] = mm(v2, v3)
  v5: bf16[64,8] = prims.convert_element_type(v4, bf16)
  v6: bf16[4,36] = slice(arg0_1, 1, 64, 100)
  v7: f32[4,36] = prims.convert_element_type(v6, f32)
  v8: f32[36,4] = permute(v7, [1,0])
  v9: f32[36,8] = mm(v8, v3)
  v10: bf16[36,8] = prims.convert_element_type(v9, bf16)
  v11: bf16[100,8] = cat([v5,v10], 0)
  return v11
""",
            )

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

    def test_panels_of_as_many_rows_as_there_are(self) -> None:
        g = canonicalize(graph_of(torch.mm, low(4, 8), low(8, 160), dynamic=True))
        rows = next(n for n in g.graph.nodes if n.op == "placeholder")
        assert not isinstance(rows.meta["val"], torch.Tensor)  # symbolic sizes come first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PANEL", 64 * 8 * 4)
            self.check(widen, g, Slow())
        assert sum(n.target is torch.ops.aten.mm.default for n in g.graph.nodes) == 1  # of unknown columns

        def layer(x: T) -> T:
            return x @ weight

        weight = low(8, 160)
        x = low(4, 8)
        torch._dynamo.mark_dynamic(x, 0)
        g = canonicalize(graph_of(layer, x, dynamic=None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PANEL", 64 * 8 * 4)
            self.check(widen, g, Slow())
        assert sum(n.target is torch.ops.aten.mm.default for n in g.graph.nodes) == 3

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
