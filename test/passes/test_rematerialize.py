"""rematerialize: activations that a backward makes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import graphs_of
from torch import Tensor, nn
from torch.fx import GraphModule

from dicp.dynamo_bridge import aot
from dicp.ir.printer import show
from dicp.ops.aliases import base_of
from dicp.ops.decompositions import decomposition_table
from dicp.passes import norms
from dicp.passes import rematerialize as passes
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rematerialize import Remade, rematerialize

Fn = Callable[..., Tensor]


def partition(fn: Fn, *inputs: Tensor, dynamic: bool = False) -> tuple[GraphModule, GraphModule, Remade]:
    """Forward and backward after the pass, run as well: the gradients of the inputs are set."""
    made = []

    def partitioned(forward: GraphModule, backward: GraphModule, visible: int) -> None:
        made.append(rematerialize(forward, backward, visible))

    found = graphs_of(
        fn,
        *inputs,
        train=True,
        dynamic=dynamic,
        decompositions=decomposition_table(),
        partitioned=partitioned,
    )
    return found["forward"], found["backward"], made[0]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def saved(forward: GraphModule, visible: int = 1) -> list[str]:
    """The names of what the forward keeps, inputs left out."""
    results: Any = forward.graph.output_node().args[0]
    return [n.name for n in results[visible:] if base_of(n).op != "placeholder"]


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)) @ v


def dropout_like(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x @ w
    return (h * torch.rand_like(h)) @ v


@pytest.fixture(autouse=True)
def _small_enough_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SMALLEST", 100)


class TestRematerialize(TestCase):
    def test_an_activation_is_made_where_it_is_wanted(self) -> None:
        forward, backward, made = partition(mlp, *leaves((4, 8), (16, 8), (16,), (16, 2)))
        self.assertEqual(saved(forward), ["mm"])
        self.assertEqual(made, Remade(1, 4 * 16 * 4))
        self.assertExpectedInline(
            show(canonicalize(backward)),
            """\
graph(primals_1: f32[4,8], primals_3: f32[16], mm: f32[4,16], t_2: f32[2,16], t_3: f32[16,8], tangents_1: f32[4,2]):
  v0: f32[4,16] = add(mm, primals_3)
  v1: f32[4,16] = gelu(v0)
  v2: f32[16,4] = permute(v1, [1,0])
  v3: f32[16,2] = mm(v2, tangents_1)
  v4: f32[4,16] = mm(tangents_1, t_2)
  v5: f32[4,16] = gelu_backward(v4, v0)
  v6: f32[4,8] = mm(v5, t_3)
  v7: f32[16,4] = permute(v5, [1,0])
  v8: f32[16,8] = mm(v7, primals_1)
  v9: f32[1,16] = sum.dim_IntList(v5, [0], True)
  v10: f32[16] = view(v9, [16])
  return v6, v8, v10, v3
""",
        )


NORMS: dict[str, tuple[Fn, tuple[tuple[int, ...], ...]]] = {
    "layer": (
        lambda x, a, w, b, v: F.layer_norm(x @ a, (6,), w, b) @ v,
        ((30, 5), (5, 6), (6,), (6,), (6, 3)),
    ),
    "layer over two dims, no bias": (
        lambda x, a, w, v: F.layer_norm(x @ a, (4, 6), w) @ v,
        ((3, 4, 5), (5, 6), (4, 6), (6, 3)),
    ),
    "layer, no weight": (
        lambda x, a, v: F.layer_norm(x @ a, (6,)) @ v,
        ((30, 5), (5, 6), (6, 3)),
    ),
    "batch and relu": (
        lambda x, a, w, b, v: F.conv2d(F.relu(F.batch_norm(F.conv2d(x, a), None, None, w, b, True)), v),
        ((2, 3, 5, 4), (6, 3, 3, 3), (6,), (6,), (4, 6, 1, 1)),
    ),
    "batch of two dims": (
        lambda x, a, w, b, v: F.relu(F.batch_norm(x @ a, None, None, w, b, True)) @ v,
        ((30, 5), (5, 6), (6,), (6,), (6, 3)),
    ),
    "group": (
        lambda x, a, w, b, v: F.conv2d(F.silu(F.group_norm(F.conv2d(x, a), 2, w, b)), v),
        ((2, 3, 5, 4), (6, 3, 3, 3), (6,), (6,), (4, 6, 1, 1)),
    ),
    "group, no weight": (
        lambda x, a, v: F.conv2d(F.silu(F.group_norm(F.conv2d(x, a), 3)), v),
        ((2, 3, 5, 4), (6, 3, 3, 3), (4, 6, 1, 1)),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_made_from_their_statistics(name: str, dynamic: bool) -> None:
    fn, shapes = NORMS[name]
    mine, exact = leaves(*shapes, dtype=torch.float64), leaves(*shapes, dtype=torch.float64)
    _, _, made = partition(fn, *mine, dynamic=dynamic)
    assert made.values == 1
    fn(*exact).sum().backward()
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_rounded_statistics_are_taken_again(name: str) -> None:
    fn, shapes = NORMS[name]
    _, backward, made = partition(fn, *leaves(*shapes, dtype=torch.bfloat16))
    assert made.values == 1
    assert sum(n.target in norms.NORMS for n in backward.graph.nodes) == 1


REFUSED: dict[str, tuple[Fn, tuple[tuple[int, ...], ...]]] = {
    "what the caller sees lives anyway": (
        lambda x, w, v: (lambda h: (h @ v, h))(F.gelu(x @ w)),  # type: ignore[dict-item,return-value]
        ((30, 8), (8, 6), (6, 2)),
    ),
    "made of weights alone": (lambda x, w: x @ torch.exp(w), ((30, 8), (8, 6))),
    "random": (dropout_like, ((30, 8), (8, 6), (6, 2))),
    "made by a product": (lambda x, w, v: torch.relu(x @ w) @ v, ((30, 8), (8, 6), (6, 2))),
    "as much would be kept instead": (
        lambda x, w, z, v: (torch.tanh(x @ w) + z) @ v,
        ((30, 8), (8, 6), (30, 6), (6, 2)),
    ),
    "a reduction": (
        lambda x, w, v: torch.softmax(x @ w, -1) @ v,
        ((30, 8), (8, 6), (6, 2)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_are_kept(name: str) -> None:
    fn, shapes = REFUSED[name]
    assert partition(fn, *leaves(*shapes))[2] == Remade()


def test_small_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SMALLEST", 4 * 16 * 4 + 1)
    assert partition(mlp, *leaves((4, 8), (16, 8), (16,), (16, 2)))[2] == Remade()


def test_no_value_is_made_from_one_that_is_made_again() -> None:
    """Residual sums: each other one is kept, so that no chain reaches back through the network."""

    def blocks(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = F.gelu(x @ w) + x
        return x

    _, backward, made = partition(blocks, *leaves((30, 8), *[(8, 8)] * 6))
    gelus = sum(n.target is torch.ops.aten.gelu.default for n in backward.graph.nodes)
    assert 0 < made.values < 6 and gelus == made.values


def test_a_mutated_input_is_not_read_again() -> None:
    """The running mean is another one by the time of the backward."""

    def step(x: Tensor, w: Tensor, v: Tensor, mean: Tensor) -> Tensor:
        h = torch.tanh(x @ w) + mean
        mean.mul_(2)
        return h @ v

    shapes = ((30, 8), (8, 6), (6, 2))
    mine, exact = leaves(*shapes), leaves(*shapes)
    partition(step, *mine, torch.ones(6))
    step(*exact, torch.ones(6)).sum().backward()
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_a_training_step_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the backend's own decompositions, with running statistics and several saved views."""
    made = []
    monkeypatch.setattr(aot, "rematerialize", lambda *given: made.append(rematerialize(*given)) or made[-1])
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    ).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = [p.clone() for p in torch.autograd.grad(body(x).square().sum(), list(body.parameters()))]
    compiled = torch.compile(body, backend="dicp_cpu")
    got = torch.autograd.grad(compiled(x).square().sum(), list(body.parameters()))
    assert [m.values for m in made] == [1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_views_whose_sizes_are_not_kept() -> None:
    """Kept as they are: the backward has no sizes to take them with."""

    def repeated(x: Tensor) -> Tensor:
        v = F.softsign(x).expand(-1, 4)
        return v @ v.repeat_interleave(2, 0).mT

    mine, exact = leaves((40, 1)), leaves((40, 1))
    partition(repeated, *mine, dynamic=True)
    repeated(*exact).sum().backward()
    torch.testing.assert_close(mine[0].grad, exact[0].grad)


def test_an_input_and_a_view_of_it() -> None:
    """Where a value is made from both, the view, kept before, becomes one of the input, which is kept instead."""
    (x,) = leaves((128, 100), dtype=torch.complex64)
    forward, backward, made = partition(lambda x: torch.view_as_real(torch.reciprocal(x * x.conj() + 1)), x)
    assert made.values == 1 and saved(forward) == []
    names = [n.name for n in backward.graph.nodes]
    assert len(names) == len(set(names))
