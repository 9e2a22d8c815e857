"""rewrite_linear: products with transposed weights become dicp.linear with what follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_linear import rewrite_linear

EVERYTHING = claims()
B, S, K, N = 2, 3, 8, 4


class TestRewriteLinear(TestCase, CheckPass):
    def run_on(self, g: torch.fx.GraphModule, vendor: Any = EVERYTHING) -> str:
        return show(self.check(rewrite_linear, canonicalize(g), vendor))

    def test_bias_gelu_residual_become_one_call(self) -> None:
        g = graph_of(lambda x, w, b, r: r + F.gelu(F.linear(x, w, b)), (B, S, K), (N, K), (N,), (B, S, N))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8], arg1_1: f32[4,8], arg2_1: f32[4], arg3_1: f32[2,3,4]):
  v0: f32[2,3,4] = dicp.linear(arg0_1, arg1_1, arg2_1, arg3_1, gelu)
  return v0
""",
        )

    def test_product_without_bias(self) -> None:
        g = graph_of(lambda x, w: F.linear(x, w), (B, S, K), (N, K))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8], arg1_1: f32[4,8]):
  v0: f32[2,3,4] = dicp.linear(arg0_1, arg1_1, None, None, none)
  return v0
""",
        )

    def test_one_product_of_another(self) -> None:
        g = graph_of(lambda x, w, v: F.linear(F.linear(x, w), v), (S, K), (N, K), (K, N))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[3,8], arg1_1: f32[4,8], arg2_1: f32[8,4]):
  v0: f32[3,4] = dicp.linear(arg0_1, arg1_1, None, None, none)
  v1: f32[3,8] = dicp.linear(v0, arg2_1, None, None, none)
  return v1
""",
        )

    def test_bias_added_to_the_product(self) -> None:
        g = graph_of(lambda x, w, b: torch.relu(F.linear(x, w) + b), (B, S, K), (N, K), (N,))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8], arg1_1: f32[4,8], arg2_1: f32[4]):
  v0: f32[2,3,4] = dicp.linear(arg0_1, arg1_1, arg2_1, None, relu)
  return v0
""",
        )

    def test_decomposed_tanh_gelu(self) -> None:
        def gelu(x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))

        g = graph_of(lambda x, w: gelu(F.linear(x, w)), (S, K), (N, K))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[3,8], arg1_1: f32[4,8]):
  v0: f32[3,4] = dicp.linear(arg0_1, arg1_1, None, None, gelu_tanh)
  return v0
""",
        )

    def test_untransposed_weight_takes_part_with_what_follows(self) -> None:
        self.assertExpectedInline(
            self.run_on(graph_of(lambda x, w, b: torch.addmm(b, x, w).relu(), (S, K), (K, N), (N,))),
            """\
graph(arg0_1: f32[4], arg1_1: f32[3,8], arg2_1: f32[8,4]):
  v0: f32[4,8] = permute(arg2_1, [1,0])
  v1: f32[3,4] = dicp.linear(arg1_1, v0, arg0_1, None, relu)
  return v1
""",
        )

    def test_untransposed_weight_alone_stays(self) -> None:
        g = canonicalize(graph_of(lambda x, w, b: torch.addmm(b, x, w).exp(), (S, K), (K, N), (N,)))
        text = show(g)
        self.assertEqual(self.run_on(g), text)

    def test_unclaimed_activation_stays_outside(self) -> None:
        g = graph_of(lambda x, w: F.silu(F.linear(x, w)), (S, K), (N, K))
        plain = claims(lambda node: node.args[4] == "none")
        self.assertExpectedInline(
            self.run_on(g, plain),
            """\
graph(arg0_1: f32[3,8], arg1_1: f32[4,8]):
  v0: f32[3,4] = dicp.linear(arg0_1, arg1_1, None, None, none)
  v1: f32[3,4] = sigmoid(v0)
  v2: f32[3,4] = mul(v0, v1)
  return v2
""",
        )

    def test_unclaimed_stays(self) -> None:
        g = canonicalize(graph_of(lambda x, w: F.silu(F.linear(x, w)), (B, S, K), (N, K)))
        text = show(g)
        self.assertEqual(self.run_on(g, claims(lambda node: False)), text)

    def test_value_used_twice_ends_the_chain(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, w)
            return torch.tanh(y) * torch.exp(y)

        self.assertExpectedInline(
            self.run_on(graph_of(f, (B, S, K), (N, K))),
            """\
graph(arg0_1: f32[2,3,8], arg1_1: f32[4,8]):
  v0: f32[2,3,4] = dicp.linear(arg0_1, arg1_1, None, None, none)
  v1: f32[2,3,4] = tanh(v0)
  v2: f32[2,3,4] = exp(v0)
  v3: f32[2,3,4] = mul(v1, v2)
  return v3
""",
        )

    def test_training_forward_keeps_what_it_saves(self) -> None:
        w = torch.randn(N, K, requires_grad=True)
        g = graphs_of(lambda x, w: F.gelu(F.linear(x, w)), (B, S, K), w, train=True)["forward"]
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(primals_1: f32[2,3,8], primals_2: f32[4,8]):
  v0: f32[6,8] = view(primals_1, [6,8])
  v1: f32[6,4] = dicp.linear(v0, primals_2, None, None, none)
  v2: f32[2,3,4] = view(v1, [2,3,4])
  v3: f32[2,3,4] = gelu(v2)
  return v3, v0, v1
""",
        )

    def test_residual_through_broadcast_stays_outside(self) -> None:
        g = graph_of(lambda x, w, r: F.linear(x, w) + r, (B, S, K), (N, K), (S, N))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,3,8], arg1_1: f32[4,8], arg2_1: f32[3,4]):
  v0: f32[2,3,4] = dicp.linear(arg0_1, arg1_1, None, None, none)
  v1: f32[2,3,4] = add(v0, arg2_1)
  return v1
""",
        )

    def test_residual_of_other_strides_keeps_the_strides(self) -> None:
        g = graph_of(lambda x, w, r: r.permute(1, 0) + F.linear(x, w), (S, K), (N, K), (N, S))
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[4,3], arg1_1: f32[3,8], arg2_1: f32[4,8]):
  v0: f32[3,4] = permute(arg0_1, [1,0])
  v1: f32[3,4] = dicp.linear(arg1_1, arg2_1, None, None, none)
  v2: f32[3,4] = add(v0, v1)
  return v2
""",
        )

    def test_symbolic_sizes(self) -> None:
        module = torch.nn.Linear(K, N)
        g = graph_of(lambda x: torch.sigmoid(module(x)), (B, S, K), dynamic=True)
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[4,8], arg1_1: f32[4], arg2_1: Sym(s0), arg3_1: Sym(s1), arg4_1: f32[s0,s1,8]):
  v0: f32[s0,s1,4] = dicp.linear(arg4_1, arg0_1, arg1_1, None, sigmoid)
  return v0
""",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "act", [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, lambda x: F.gelu(x, approximate="tanh")]
)
@pytest.mark.parametrize("decomposed", [False, True])
def test_activations(act: Any, dtype: torch.dtype, decomposed: bool) -> None:
    keep = () if decomposed else tuple(getattr(torch.ops.aten, n).default for n in ("gelu", "silu"))
    table = dict(torch._decomp.core_aten_decompositions())
    if decomposed:
        table |= torch._decomp.get_decompositions([torch.ops.aten.gelu, torch.ops.aten.silu])
    x, w = torch.randn(S, K).to(dtype), torch.randn(N, K).to(dtype)
    g = canonicalize(graph_of(lambda x, w: act(F.linear(x, w)), x, w, decompositions=table, keep=keep))
    g = rewrite_linear(g, EVERYTHING)
    calls = [n.target for n in g.graph.nodes if n.op == "call_function"]
    if dtype == torch.float32 or not decomposed:
        assert calls == [torch.ops.dicp.linear.default], show(g)


INT8_GRAPH = """\
graph(arg0_1: i8[4,8], arg1_1: f32[2,3,8], arg2_1: f32[4], arg3_1: f32[4]):
  v0: f32[2,3,4] = dicp.scaled_linear(arg1_1, arg0_1, arg2_1, arg3_1, None, silu)
  return v0
"""


class TestInt8Weights(TestCase, CheckPass):
    def graph(self, fn: Any) -> torch.fx.GraphModule:
        w, scale, b = torch.randint(-9, 9, (N, K), dtype=torch.int8), torch.rand(N), torch.rand(N)
        return canonicalize(graph_of(fn, torch.randn(B, S, K), w, scale, b))

    def test_scaled_by_groups_of_the_depth(self) -> None:
        def f(x: Any, w: Any, s: Any, z: Any, b: Any) -> Any:
            groups = (w.view(N, 2, 4).float() - z.view(N, 2, 1).float()) * s.view(N, 2, 1)
            return F.linear(x, groups.view(N, K), b)

        w, z = (torch.randint(-9, 9, (N, n), dtype=torch.int8) for n in (K, 2))
        g = graph_of(f, (S, K), w, torch.rand(N, 2), z, (N,))
        self.assertExpectedInline(
            show(self.check(rewrite_linear, canonicalize(g), EVERYTHING)),
            """\
graph(arg0_1: i8[4,8], arg1_1: i8[4,2], arg2_1: f32[4,2], arg3_1: f32[3,8], arg4_1: f32[4]):
  v0: i8[4,2,4] = view(arg0_1, [4,2,4])
  v1: i8[4,2,1] = view(arg1_1, [4,2,1])
  v2: f32[4,2,1] = view(arg2_1, [4,2,1])
  v3: i8[4,8] = view(v0, [4,8])
  v4: f32[4,2] = view(v2, [4,2])
  v5: i8[4,2] = view(v1, [4,2])
  v6: f32[3,4] = dicp.group_scaled_linear(arg3_1, v3, v4, v5)
  v7: f32[3,4] = add(v6, arg4_1)
  return v7
""",
        )

    def test_groups_that_are_not_such(self) -> None:
        """A zero point that is scaled twice, scales of rows of another shape, a weight of 16 bits."""
        w, s = torch.randint(-9, 9, (N, K), dtype=torch.int8), torch.rand(N, 2, 1)
        for f in (
            lambda x, w, s: x @ (torch.sub(w.view(N, 2, 4).float(), s, alpha=2) * s).view(N, K).t(),
            lambda x, w, s: x @ (w.view(N, 2, 4).float() * s[:, :1]).view(N, K).t(),
            lambda x, w, s: x @ (w.view(N, 2, 4).to(torch.int16).float() * s).view(N, K).t(),
            lambda x, w, s: x @ (w.view(N, 2, 4).float() * s).view(K, N),
        ):
            g = canonicalize(graph_of(f, (S, K), w, s))
            assert "group_scaled" not in show(self.check(rewrite_linear, g, EVERYTHING))

    def test_scaled_after_the_product(self) -> None:
        g = self.graph(lambda x, w, s, b: F.silu(F.linear(x, w.to(x.dtype)) * s + b))
        self.assertExpectedInline(show(self.check(rewrite_linear, g, EVERYTHING)), INT8_GRAPH)

    def test_scaled_before_the_product(self) -> None:
        g = self.graph(lambda x, w, s, b: F.silu(F.linear(x, w.to(x.dtype) * s[:, None], b)))
        text = show(self.check(rewrite_linear, g, EVERYTHING))
        assert "dicp.scaled_linear" in text and "mul" not in text

    def test_casts_that_change_numbers_stay(self) -> None:
        """A mask kept as int8, a sign dropped, a scaled weight rounded to integers."""
        for made in (
            lambda w, s: w.bool().float(),
            lambda w, s: w.to(torch.uint8).float(),
            lambda w, s: (w.float() * s[:, None]).to(torch.int32).float(),
        ):
            g = self.graph(lambda x, w, s, b, made=made: F.linear(x, made(w, s), b))
            assert "scaled_linear" not in show(self.check(rewrite_linear, g, EVERYTHING))

    def test_a_vendor_without_it_gets_the_product(self) -> None:
        g = self.graph(lambda x, w, s, b: F.linear(x, w.to(x.dtype)) * s + b)
        text = show(self.check(rewrite_linear, g, claims(lambda node: node.target is torch.ops.dicp.linear.default)))
        assert "dicp.linear" in text and "mul" in text
