"""The pattern combinators."""

from __future__ import annotations

import torch
from graphs import graph_of
from torch.fx import GraphModule, Node

from dicp.passes.matcher import both_ways, const, either, match, op, through, var

aten = torch.ops.aten
x, y = var("x"), var("y")


def last(g: GraphModule) -> Node:
    return g.graph.output_node().all_input_nodes[0]


def test_variable_met_twice_is_one_node() -> None:
    square = op(aten.mul.Tensor, x, x)
    assert match(square, last(graph_of(lambda a, b: a * a, (4,), (4,)))) is not None
    assert match(square, last(graph_of(lambda a, b: a * b, (4,), (4,)))) is None


def test_both_ways_finds_either_order() -> None:
    pattern = both_ways(aten.add.Tensor, x, op(aten.exp.default, y))
    for f in (lambda a, b: a + b.exp(), lambda a, b: b.exp() + a):
        found = match(pattern, last(graph_of(f, (4,), (4,))))
        assert found is not None and found["y"] is found.interior[0].args[0]


def test_scaled_sum_is_no_sum() -> None:
    g = graph_of(lambda a, b: torch.add(a, b, alpha=2), (4,), (4,))
    assert match(both_ways(aten.add.Tensor, x, y), last(g)) is None


def test_interior_value_used_outside_prevents() -> None:
    def f(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = a.exp()
        return e.sin(), e

    pattern = op(aten.sin.default, op(aten.exp.default, x))
    assert match(pattern, last(graph_of(f, (4,)))) is None
    assert match(pattern, last(graph_of(lambda a: a.exp().sin(), (4,)))) is not None


def test_backtracks_into_the_other_choice() -> None:
    pattern = op(aten.mul.Tensor, either(op(aten.exp.default, x), y), x)
    assert match(pattern, last(graph_of(lambda a: a.exp() * a, (4,)))) is not None
    assert match(pattern, last(graph_of(lambda a, b: a.exp() * b, (4,), (4,)))) is not None


def test_const_reads_full_and_numbers() -> None:
    pattern = op(aten.mul.Tensor, x, const("c"))
    found = match(pattern, last(graph_of(lambda a: a * torch.full((), 0.5), (4,))))
    assert found is not None and found["c"] == 0.5
    assert match(op(aten.mul.Tensor, x, 0.25), found.root) is None
    assert match(op(aten.mul.Tensor, x, 0.5), found.root) is not None


def test_through_skips_casts_in_any_number() -> None:
    pattern = op(aten.exp.default, through(aten._to_copy.default, op(aten.sin.default, x)))
    for f in (
        lambda a: a.sin().exp(),
        lambda a: a.sin().double().exp(),
        lambda a: a.sin().half().double().exp(),
    ):
        assert match(pattern, last(graph_of(f, (4,)))) is not None


def test_shapes_do_not_matter() -> None:
    pattern = op(aten.relu.default, op(aten.mm.default, x, y))
    for shapes in (((2, 3), (3, 4)), ((1, 7), (7, 1))):
        assert match(pattern, last(graph_of(lambda a, b: torch.relu(a @ b), *shapes))) is not None
    assert (
        match(pattern, last(graph_of(lambda a, b: torch.relu(a @ b), (5, 6), (6, 7), dynamic=True)))
        is not None
    )
