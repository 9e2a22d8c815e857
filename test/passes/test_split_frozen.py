"""Freezing as a pass: what becomes the constant graph, what stays, and that both compute what one did."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, example_inputs, graph_of, run_eagerly, with_mutation
from torch.fx import GraphModule

from dicp.ir.printer import show
from dicp.ir.verify import verify
from dicp.passes.canonicalize import canonicalize
from dicp.passes.freeze import SMALL, Folding, constants_of, is_constant, mark_frozen, split_frozen
from dicp.passes.layout import choose_layout
from dicp.passes.pack import pack_weights
from dicp.passes.rewrite_conv import rewrite_conv
from dicp.passes.rewrite_linear import rewrite_linear

T = torch.Tensor
CONV_WEIGHT, CONV_SMALL = (8, 3, 3, 3), (1, 3, 4, 4)  # a weight larger than the result


class Packs(claims):
    """A vendor that packs every weight."""

    def packs(self, node: Any) -> str:
        return "blocks"


def frozen(gm: GraphModule, *positions: int) -> GraphModule:
    """Positions are by first use, as in Dynamo's graphs."""
    mark_frozen(gm, {k: f"w{k}" for k in positions})
    return gm


def split(gm: GraphModule) -> tuple[GraphModule, GraphModule, Folding]:
    """(main, constants, folding); together they compute what the graph did."""
    inputs = example_inputs(gm)
    expected = run_eagerly(gm, inputs)[: len(results_of(gm))]
    found = split_frozen(gm)
    assert found is not None
    constants, folding = found
    verify(gm)
    verify(constants)
    values = torch.fx.Interpreter(constants).run(*(inputs[k] for k in folding.frozen))
    actual = torch.fx.Interpreter(gm).run(*(inputs[k] for k in folding.kept), *values)
    torch.testing.assert_close(list(actual), expected, rtol=1e-5, atol=1e-5)
    assert folding.nbytes == sum(v.nbytes for v in values)
    return gm, constants, folding


def results_of(gm: GraphModule) -> Any:
    return gm.graph.output_node().args[0]


def nothing_folds(gm: GraphModule) -> None:
    before = show(gm)
    assert split_frozen(gm) is None
    assert show(gm) == before


class TestSplit(TestCase, CheckPass):
    def test_two_graphs(self) -> None:
        g = frozen(canonicalize(graph_of(lambda x, w, s: x @ (w * s).t() + s[0], (4, 6), (5, 6), (5, 1))), 0, 1)
        main, constants, folding = split(g)
        self.assertExpectedInline(
            show(constants),
            """\
graph(arg0_1: f32[5,6], arg1_1: f32[5,1]):
  v0: f32[5,6] = mul(arg0_1, arg1_1)
  return v0
""",
        )
        self.assertExpectedInline(
            show(main),
            """\
graph(arg1_1: f32[5,1], arg2_1: f32[4,6], folded0: f32[5,6]):
  v0: f32[6,5] = permute(folded0, [1,0])
  v1: f32[4,5] = mm(arg2_1, v0)
  v2: f32[1] = select.int(arg1_1, 0, 0)
  v3: f32[4,5] = add(v1, v2)
  return v3
""",
        )
        assert folding.frozen == (0, 1) and folding.names == ("w0", "w1") and folding.kept == (1, 2)
        assert folding.texts == ("mul f32[5,6]",)

    def test_batch_norm_folds_where_at_each_call_it_would_not_pay(self) -> None:
        def fn(x: T, w: T, mean: T, var: T, scale: T, shift: T) -> T:
            return F.relu(F.batch_norm(F.conv2d(x, w), mean, var, scale, shift))

        shapes = (CONV_SMALL, CONV_WEIGHT, (8,), (8,), (8,), (8,))
        keep = [torch.ops.aten._native_batch_norm_legit_no_training.default]
        loose = canonicalize(graph_of(fn, *shapes, keep=keep))
        self.check(rewrite_conv, loose, claims())
        assert "relu)" not in show(loose)
        g = frozen(canonicalize(graph_of(fn, *shapes, keep=keep)), 1, 2, 3, 4, 5)
        main, constants, _ = split(self.check(rewrite_conv, g, claims()))
        self.assertExpectedInline(
            show(main),
            """\
graph(arg0_1: f32[1,3,4,4], folded0: f32[8], folded1: f32[8,3,3,3]):
  v0: f32[1,8,2,2] = dicp.conv(arg0_1, folded1, folded0, None, [1,1], [0,0], [1,1], 1, relu)
  return v0
""",
        )
        assert "rsqrt" in show(constants)

    def test_packed_weights(self) -> None:
        def fn(x: T, w: T, v: T) -> T:
            return F.linear(F.linear(x, w), v * 2)

        g = frozen(canonicalize(graph_of(fn, (4, 6), (5, 6), (3, 5))), 1, 2)
        g = self.check(pack_weights, self.check(rewrite_linear, g, claims()), Packs())
        main, constants, folding = split(g)
        self.assertExpectedInline(
            show(main),
            """\
graph(arg0_1: f32[4,6], folded0: f32[5,6], folded1: f32[3,5]):
  v0: f32[4,5] = dicp.linear(arg0_1, folded0, None, None, none)
  v1: f32[4,3] = dicp.linear(v0, folded1, None, None, none)
  return v1
""",
        )
        self.assertExpectedInline(
            show(constants),
            """\
graph(arg1_1: f32[5,6], arg2_1: f32[3,5]):
  v0: f32[3,5] = mul(arg2_1, 2)
  return arg1_1, v0
""",
        )
        assert folding.forms == ("blocks", "blocks") and folding.kept == (0,)

    def test_packed_convolutions_go_channels_last(self) -> None:
        """However few their positions are; row-major ones are not packed."""

        def fn(x: T, w: T) -> T:
            for _ in range(3):
                x = F.relu(F.conv2d(x, w, padding=1))
            return x.sum((2, 3))

        g = frozen(canonicalize(graph_of(fn, (1, 8, 6, 6), (8, 8, 3, 3))), 1)
        g = rewrite_conv(g, claims())
        assert "pack" not in show(pack_weights(g, Packs()))
        g = pack_weights(choose_layout(g, Packs()), Packs())
        assert show(g).count("dicp.pack") == 3 and show(g).count("clone") == 1

    def test_larger_values_stay(self) -> None:
        """An expansion is made where it is read; of it the sum is folded."""
        n = SMALL // 4
        g = frozen(graph_of(lambda x, w: x * ((w + 1).expand(2, n) + torch.arange(2.0)[:, None]), (2, n), (1, 1)), 0)
        main, constants, _ = split(canonicalize(g))
        assert "arange" not in show(constants) and "add" in show(constants) and "expand" in show(main)

    def test_small_tables_fold(self) -> None:
        """As those of rotary embeddings, though larger than the frequencies that they are made of."""
        fn = lambda x, f: x * torch.outer(torch.arange(16.0), f).cos()  # noqa: E731
        main, _, folding = split(frozen(canonicalize(graph_of(fn, (16, 4), (4,))), 0))
        assert folding.nbytes == 256 and folding.texts == ("cos f32[16,4]",) and "= cos" not in show(main)

    def test_views_and_numbers_stay(self) -> None:
        nothing_folds(frozen(graph_of(lambda x, w: x @ w.t() + torch.arange(5.0), (4, 6), (5, 6)), 1))

    def test_results_stay(self) -> None:
        """The caller may write into what he gets."""
        nothing_folds(frozen(graph_of(lambda x, w: (x + 1, w * 2, (w + 3).t()), (4, 6), (5, 6)), 1))

    def test_random_numbers_stay(self) -> None:
        nothing_folds(frozen(graph_of(lambda x, w: x + torch.bernoulli(w), (4,), (4,)), 1))
        g = frozen(graph_of(lambda x, w: x + F.dropout(w, 0.5) * 2, (4,), (4,)), 1)
        assert not any("rand" in n.name or "bernoulli" in n.name for n in constants_of(g))

    def test_what_is_written_is_not_frozen(self) -> None:
        g = with_mutation(graph_of(lambda w, x: w * 2 + x, (4,), (4,)))
        assert not constants_of(frozen(g, 0))
        nothing_folds(g)

    def test_symbolic_sizes_stay_in_the_main_graph(self) -> None:
        fn = lambda x, w: x * (w * 2) + (w + w.exp()).expand(x.shape[0], -1).cos()  # noqa: E731
        w = torch.randn(9)
        torch._dynamo.mark_static(w)
        g = frozen(canonicalize(graph_of(fn, (4, 9), w, dynamic=True)), 0)
        main, constants, folding = split(g)
        assert folding.frozen == (0,) and len(folding.texts) == 2
        assert "exp(" in show(constants) and "cos(" in show(main)

    def test_nothing_is_frozen_unless_asked(self) -> None:
        g = graph_of(lambda x, w: x * (w * 2), (4,), (4,))
        assert not constants_of(g)
        nothing_folds(g)


def test_what_is_made_of_constants_in_many_steps() -> None:
    """Each value is asked about once: there are 2 ** 60 ways to the last one's weight."""

    def f(x: T, w: T) -> T:
        for _ in range(60):
            w = w.sin() * w
        return x + w

    gm = frozen(graph_of(f, (1,), (1,)), 0)
    added = gm.graph.output_node().args[0][0]  # type: ignore[index,union-attr]
    x, w = added.all_input_nodes  # type: ignore[union-attr]
    assert is_constant(w) and not is_constant(x) and not is_constant(added)  # type: ignore[arg-type]
