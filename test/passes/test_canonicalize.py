"""canonicalize: what does nothing goes, what memory can tell stays."""

from __future__ import annotations

import torch
from expecttest import TestCase
from graphs import CheckPass, graph_of, graphs_of, with_mutation

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize


class TestCanonicalize(TestCase, CheckPass):
    def test_no_ops_go(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x.clone().expand(2, 3)[:, 0:3]).detach() * 1
            return torch.exp(y.to(torch.float32) / 1 - 0)

        g = self.check(canonicalize, graph_of(f, (2, 3)))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,3]):
  v0: f32[2,3] = relu(arg0_1)
  v1: f32[2,3] = exp(v0)
  return v1
""",
        )

    def test_views_get_one_form(self) -> None:
        g = graph_of(lambda x: x.t().transpose(0, 1).reshape(2, 3, 4).view(6, 4).t().cos(), (6, 4))
        g = self.check(canonicalize, g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[6,4]):
  v0: f32[4,6] = permute(arg0_1, [1,0])
  v1: f32[4,6] = cos(v0)
  return v1
""",
        )

    def test_conditions_that_always_hold_are_decided(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(3).unsqueeze(1)
            y = torch.where((rows >= 0) & (x > 1), x, torch.zeros_like(x))
            return torch.where(rows > -1, y, y.exp())

        self.assertExpectedInline(
            show(self.check(canonicalize, graph_of(f, (3, 2)))),
            """\
graph(arg0_1: f32[3,2]):
  v0: b8[3,2] = gt.Scalar(arg0_1, 1)
  v1: f32[3,2] = full_like(arg0_1, 0, memory_format=preserve_format)
  v2: f32[3,2] = where.self(v0, arg0_1, v1)
  return v2
""",
        )

    def test_conditions_that_may_fail_stay(self) -> None:
        for above in (
            lambda x: torch.arange(3) > 0,
            lambda x: torch.arange(-1, 2) >= 0,
            lambda x: torch.arange(3, 0, -1) >= 3,
            lambda x: torch.arange(3, dtype=torch.int8) >= 0,
            lambda x: x >= 0,
        ):
            text = show(canonicalize(graph_of(lambda x: torch.where(above(x), x, 0.5), (3,))))  # noqa: B023
            self.assertIn("where", text)

    def test_equal_calls_become_one(self) -> None:
        g = self.check(canonicalize, graph_of(lambda x: x.exp() * x.exp(), (4,)))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4]):
  v0: f32[4] = exp(arg0_1)
  v1: f32[4] = mul(v0, v0)
  return v1
""",
        )

    def test_random_calls_stay_apart(self) -> None:
        g = graph_of(lambda x: torch.rand_like(x) + torch.rand_like(x), (4,))
        text = show(g)
        self.assertEqual(show(canonicalize(g)), text)

    def test_signed_zero_is_kept(self) -> None:
        g = self.check(
            canonicalize,
            graph_of(lambda x, i: (x + 0.0).sin() + (x - 0.0).cos() + (i + 0).exp(), (4,), torch.arange(4)),
        )
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4], arg1_1: i64[4]):
  v0: f32[4] = add(arg0_1, 0.0)
  v1: f32[4] = sin(v0)
  v2: f32[4] = cos(arg0_1)
  v3: f32[4] = add(v1, v2)
  v4: f32[4] = exp(arg1_1)
  v5: f32[4] = add(v3, v4)
  return v5
""",
        )

    def test_constant_tensor_becomes_a_number(self) -> None:
        g = graph_of(lambda x: torch.full((), 0.1) * x + torch.ones(4), (4,))
        g = self.check(canonicalize, g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4]):
  v0: f32[4] = mul(arg0_1, 0.10000000149011612)
  v1: f32[4] = add(v0, 1.0)
  return v1
""",
        )

    def test_constant_that_promotes_stays(self) -> None:
        g = graph_of(lambda x: x * torch.full((4,), 0.1), torch.ones(4, dtype=torch.bfloat16))
        text = show(g)
        self.assertEqual(show(canonicalize(g)), text)

    def test_casts_there_and_back(self) -> None:
        g = graph_of(lambda x: x.float().bfloat16() + x.half().bfloat16(), torch.ones(4).bfloat16())
        g = self.check(canonicalize, g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: bf16[4]):
  v0: f16[4] = _to_copy(arg0_1, dtype=f16)
  v1: bf16[4] = _to_copy(v0, dtype=bf16)
  v2: bf16[4] = add(arg0_1, v1)
  return v2
""",
        )

    def test_copy_that_leaves_the_graph_stays(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x.sin()
            return x.clone(), y, y.clone(), x.sin()

        g = graph_of(f, (4,))
        text = show(g)
        self.assertEqual(show(self.check(canonicalize, g)), text)

    def test_copy_of_written_input_stays(self) -> None:
        g = with_mutation(graph_of(lambda x: (x.clone() + 1, x + 1), (4,)))
        text = show(g)
        self.assertEqual(show(canonicalize(g)), text)

    def test_mutated_input(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            old = x.clone()
            x.add_(1)
            return old

        g = self.check(canonicalize, graph_of(f, (4,)))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4]):
  v0: f32[4] = clone(arg0_1)
  v1: f32[4] = add(arg0_1, 1)
  return v1, v0
""",
        )

    def test_relu_stays_as_it_is(self) -> None:
        g = graph_of(lambda x: torch.relu(x).sum(0), (4, 4))
        text = show(g)
        self.assertEqual(show(self.check(canonicalize, g)), text)

    def test_symbolic_sizes(self) -> None:
        g = graph_of(lambda x: (x.view(-1).view(x.shape) * 1).relu(), (4, 6), dynamic=True)
        g = self.check(canonicalize, g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: Sym(s0), arg1_1: Sym(s1), arg2_1: f32[s0,s1]):
  v0: f32[s0,s1] = relu(arg2_1)
  return v0
""",
        )

    def test_einsum_leaves_views_and_a_product(self) -> None:
        g = graph_of(lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 3, 4), (2, 5, 4))
        g = self.check(canonicalize, g)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,3,4], arg1_1: f32[2,5,4]):
  v0: f32[2,4,5] = permute(arg1_1, [0,2,1])
  v1: f32[2,3,5] = bmm(arg0_1, v0)
  return v1
""",
        )

    def test_backward_transposes_cancel(self) -> None:
        g = graphs_of(lambda x, w: torch.nn.functional.linear(x, w), (4, 8), _parameter(6, 8), train=True)
        g = self.check(canonicalize, g["backward"])
        self.assertExpectedInline(
            show(g),
            """\
graph(primals_1: f32[4,8], tangents_1: f32[4,6]):
  v0: f32[6,4] = permute(tangents_1, [1,0])
  v1: f32[6,8] = mm(v0, primals_1)
  return None, v1
""",
        )


def _parameter(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)
