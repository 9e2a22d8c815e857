"""rewrite_norm, rewrite_dropout, rewrite_dot and rewrite_scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.ops.library import register
from dicp.passes.canonicalize import canonicalize
from dicp.passes.freeze import mark_frozen
from dicp.passes.rewrite_dot import rewrite_dot
from dicp.passes.rewrite_dropout import rewrite_dropout
from dicp.passes.rewrite_norm import rewrite_norm
from dicp.passes.rewrite_scatter import rewrite_scatter

NOTHING = claims(lambda node: False)


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


    def test_no_dims_to_name(self) -> None:
        f = lambda x: x.mean(0) + x.var(0, correction=0)  # noqa: E731
        self.assertIn("var_mean", show(self.check(rewrite_norm, canonicalize(graph_of(f, ())))))


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


class TestRewriteDot(TestCase, CheckPass):
    def rewritten(self, f: Callable[..., Any], *args: Any) -> str:
        return show(self.check(rewrite_dot, canonicalize(graph_of(f, *args)), NOTHING))

    def test_one_column_is_a_sum(self) -> None:
        def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.addmm(x[0, 0], x, y[:1].t()), x @ y.t()

        self.assertExpectedInline(self.rewritten(f, (3, 70), (5, 70)), """\
graph(arg0_1: f32[3,70], arg1_1: f32[5,70]):
  v0: f32[70] = select.int(arg0_1, 0, 0)
  v1: f32[] = select.int(v0, 0, 0)
  v2: f32[1,70] = slice(arg1_1, 0, 0, 1)
  v3: f32[70,1] = view(v2, [70,1])
  v4: f32[1,70] = permute(v3, [1,0])
  v5: f32[3,70] = mul(arg0_1, v4)
  v6: f32[3,1] = sum.dim_IntList(v5, [-1], True)
  v7: f32[3,1] = add(v6, v1)
  v8: f32[70,5] = permute(arg1_1, [1,0])
  v9: f32[3,5] = mm(arg0_1, v8)
  return v7, v9
""")

    def test_two_columns_are_if_they_are_deep(self) -> None:
        def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x @ y[:, :2], x[:, :60] @ y[:60, :2]

        self.assertExpectedInline(self.rewritten(f, (3, 70), (70, 5)), """\
graph(arg0_1: f32[70,5], arg1_1: f32[3,70]):
  v0: f32[70,2] = slice(arg0_1, 1, 0, 2)
  v1: f32[2,70] = permute(v0, [1,0])
  v2: f32[3,1,70] = unsqueeze(arg1_1, 1)
  v3: f32[1,2,70] = unsqueeze(v1, 0)
  v4: f32[3,2,70] = mul(v2, v3)
  v5: f32[3,2] = sum.dim_IntList(v4, [-1], False)
  v6: f32[3,60] = slice(arg1_1, 1, 0, 60)
  v7: f32[60,5] = slice(arg0_1, 0, 0, 60)
  v8: f32[60,2] = slice(v7, 1, 0, 2)
  v9: f32[3,2] = mm(v6, v8)
  return v5, v9
""")

    def test_a_row_takes_in_what_makes_its_weight(self) -> None:
        def f(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            w = torch.cat([packed & 15, packed >> 4]).to(x.dtype)
            return x @ (w * scale).t()

        packed = torch.randint(0, 256, (4, 70), dtype=torch.uint8)
        self.assertExpectedInline(self.rewritten(f, (1, 70), packed, (8, 1)), """\
graph(arg0_1: u8[4,70], arg1_1: f32[1,70], arg2_1: f32[8,1]):
  v0: u8[4,70] = bitwise_and.Scalar(arg0_1, 15)
  v1: u8[4,70] = __rshift__.Scalar(arg0_1, 4)
  v2: u8[8,70] = cat([v0,v1])
  v3: f32[8,70] = _to_copy(v2, dtype=f32)
  v4: f32[8,70] = mul(v3, arg2_1)
  v5: f32[70,8] = permute(v4, [1,0])
  v6: f32[8,70] = permute(v5, [1,0])
  v7: f32[8,70] = mul(arg1_1, v6)
  v8: f32[8] = sum.dim_IntList(v7, [-1])
  v9: f32[1,8] = unsqueeze(v8, 0)
  return v9
""")
        self.assertIn("mm(", self.rewritten(f, (2, 70), packed, (8, 1)))  # each row would make it anew
        self.assertIn("mm(", self.rewritten(f, (1, 60), packed[:, :60].clone(), (8, 1)))

    def test_weights_that_are_in_memory_or_will_be_stay_operands(self) -> None:
        x, w, s = (1, 70), (8, 70), (8, 1)
        several = lambda x, w, s: (x @ (w * s).t(), (w * s).sum())  # noqa: E731
        whole = lambda x, w: x @ w.relu().cumsum(1).t()  # noqa: E731 (elements are made of others)
        narrow = torch.randint(-9, 9, (8, 70), dtype=torch.int8)
        of_rows = lambda x, w, s: x @ (w.to(x.dtype) * s).t()  # noqa: E731 (read as stored)
        plain = lambda x, w: x @ w.t()  # noqa: E731
        cases = (plain, (x, w)), (several, (x, w, s)), (whole, (x, w)), (of_rows, (x, narrow, s))
        for f, inputs in cases:
            self.assertIn("mm(", self.rewritten(f, *inputs))

    def test_weights_that_are_made_once_stay_operands(self) -> None:
        g = canonicalize(graph_of(lambda x, w, s: x @ (w * s).t(), (1, 70), (8, 70), (8, 1)))
        inputs = [n for n in g.graph.nodes if n.op == "placeholder"]
        mark_frozen(g, {k: n.name for k, n in enumerate(inputs) if n.name != "arg2_1"})
        self.assertIn("mm(", show(self.check(rewrite_dot, g, NOTHING)))

    def test_a_column_times_a_row_is_no_sum(self) -> None:
        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.addmm(y[0], x, y)

        self.assertExpectedInline(self.rewritten(f, (3, 1), (1, 5)), """\
graph(arg0_1: f32[1,5], arg1_1: f32[3,1]):
  v0: f32[5] = select.int(arg0_1, 0, 0)
  v1: f32[3,5] = mul(arg1_1, arg0_1)
  v2: f32[3,5] = add(v1, v0)
  return v2
""")

    def test_rows_that_lie_apart_stay(self) -> None:
        text = self.rewritten(lambda x, y: x.t() @ y, (70, 3), (70, 1))
        self.assertIn("= mm(", text)
        self.assertNotIn("= mm(", self.rewritten(lambda x, y: x.t()[:1] @ y, (70, 3), (70, 1)))

    def test_of_a_batch_in_low_precision_it_is_rounded_once(self) -> None:
        x, y = (torch.randn(5, 1, 300).bfloat16() for _ in range(2))
        self.assertExpectedInline(self.rewritten(lambda x, y: torch.bmm(x, y.mT), x, y), """\
graph(arg0_1: bf16[5,1,300], arg1_1: bf16[5,1,300]):
  v0: bf16[5,300,1] = view(arg0_1, [5,300,1])
  v1: f32[5,1,300] = prims.convert_element_type(arg1_1, f32)
  v2: f32[5,300,1] = prims.convert_element_type(v0, f32)
  v3: f32[5,1,300] = permute(v2, [0,2,1])
  v4: f32[5,1,300] = mul(v1, v3)
  v5: f32[5,1,1] = sum.dim_IntList(v4, [-1], True)
  v6: bf16[5,1,1] = prims.convert_element_type(v5, bf16)
  return v6
""")


class TestRewriteScatter(TestCase, CheckPass):
    def setUp(self) -> None:
        register()

    def test_the_gradient_of_a_table_with_padding_is_added_into_the_other(self) -> None:
        def f(x: torch.Tensor, g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x.sin() + torch.ops.aten.embedding_dense_backward(g, i, 9, 1, False)

        x, g, i = torch.randn(9, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 2], [8, 0, 1]])
        g = self.check(rewrite_scatter, canonicalize(graph_of(f, x, g, i, decompositions={})), NOTHING)
        self.assertExpectedInline(show(g), """\
graph(arg0_1: f32[9,4], arg1_1: f32[2,3,4], arg2_1: i64[2,3]):
  v0: f32[9,4] = sin(arg0_1)
  v1: b8[2,3] = eq.Scalar(arg2_1, 1)
  v2: b8[2,3,1] = unsqueeze(v1, 2)
  v3: f32[] = full([], 0, dtype=f32)
  v4: f32[2,3,4] = where.self(v2, v3, arg1_1)
  v5: f32[9,4] = index_put(v0, [arg2_1], v4, True)
  return v5
""")

    def test_one_after_the_other(self) -> None:
        def f(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            put = torch.zeros(9, 4).index_put((i,), v, accumulate=True)
            return torch.zeros(9, 4).scatter_add(0, i[:, None].expand(-1, 4), v) + (put + x)

        inputs = torch.randn(9, 4), torch.tensor([1, 2, 2]), torch.randn(3, 4)
        g = self.check(rewrite_scatter, canonicalize(graph_of(f, *inputs)), NOTHING)
        self.assertExpectedInline(show(g), """\
graph(arg0_1: f32[3,4], arg1_1: i64[3], arg2_1: f32[9,4]):
  v0: i64[3,1] = unsqueeze(arg1_1, 1)
  v1: i64[3,4] = expand(v0, [-1,4])
  v2: f32[9,4] = index_put(arg2_1, [arg1_1], arg0_1, True)
  v3: f32[9,4] = scatter_add(v2, 0, v1, arg0_1)
  return v3
""")

    def test_what_stays(self) -> None:
        i = torch.tensor([1, 2, 2])
        zeros = torch.ops.aten.embedding_dense_backward

        def kept(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
            shared = zeros(g, i, 9, -1, False)
            return x + shared, shared * 2

        cases = {
            "read by others as well": kept,
            "broadcast": lambda x, g: x[:1] + zeros(g, i, 9, -1, False),
            "scaled by how often": lambda x, g: x + zeros(g, i, 9, -1, True),
            "a factor": lambda x, g: torch.add(x, zeros(g, i, 9, -1, False), alpha=2),
            "overwrites": lambda x, g: x + torch.zeros(9, 4).index_put((i,), g),
            "not into zeros": lambda x, g: x + torch.ones(9, 4).index_put((i,), g, accumulate=True),
            "low precision": lambda x, g: x.bfloat16() + zeros(g.bfloat16(), i, 9, -1, False),
        }
        for name, f in cases.items():
            with self.subTest(name):
                g = canonicalize(graph_of(f, (9, 4), (3, 4), decompositions={}))
                text = show(g)
                self.assertEqual(show(self.check(rewrite_scatter, g, NOTHING)), text)

    def test_in_low_precision_it_is_one_call_where_the_vendor_has_it(self) -> None:
        def f(x: torch.Tensor, g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x.sin() + torch.ops.aten.embedding_dense_backward(g, i, 9, 2, False)

        self.rtol = self.atol = 1.6e-2  # eager rounds the gradient, then the sum
        inputs = torch.randn(9, 4).bfloat16(), torch.randn(3, 4).bfloat16(), torch.tensor([1, 2, 8])
        g = canonicalize(graph_of(f, *inputs, decompositions={}))
        g = self.check(rewrite_scatter, g, claims())
        self.assertExpectedInline(show(g), """\
graph(arg0_1: bf16[9,4], arg1_1: bf16[3,4], arg2_1: i64[3]):
  v0: bf16[9,4] = sin(arg0_1)
  v1: bf16[9,4] = dicp.add_rows(v0, arg1_1, arg2_1, 2)
  return v1
""")
