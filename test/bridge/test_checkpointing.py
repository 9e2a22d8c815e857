"""Parts of a model that torch.utils.checkpoint computes again in the backward, random numbers included."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from dicp import compat
from dicp.compat import FakeTensorMode
from dicp.compiler import Compiled, observe
from dicp.dynamo_bridge.backend import dicp_cpu, dicp_cuda
from dicp.passes.rng_states import open_rng_states

aten = torch.ops.aten


def compiled(fn: Any, backend: str, **options: Any) -> tuple[Any, list[Compiled]]:
    seen: list[Compiled] = []
    torch._dynamo.reset()
    chosen = {"cpu": dicp_cpu, "cuda": dicp_cuda}[backend]
    options |= {"verify": True} | ({"interpret": True} if backend == "cuda" else {})
    net = torch.compile(fn, backend=chosen, options=options, fullgraph=True)

    def run(*inputs: Tensor) -> Any:
        with observe(seen.append):
            return net(*inputs)

    return run, seen


def externs(seen: list[Compiled]) -> list[str]:
    return [str(c.node.target) for s in seen for c in s.program.externs]


def again(part: Any, *inputs: Any) -> Any:
    return checkpoint(part, *inputs, use_reentrant=False)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_dropout_drops_the_same_again(backend: str) -> None:
    """The gradient of what is kept is the factor that it was kept with."""

    def part(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.5).sin().asin(), 0.25)

    run, _ = compiled(lambda x: again(part, again(part, x) / 4), backend)
    x = torch.rand(40, 50).add(0.1).div(20).requires_grad_()
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        y = run(x)
        torch.rand(3)  # what others draw in between
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, y.detach() / x.detach(), rtol=1e-3, atol=1e-5)
        assert 0.05 < (y != 0).float().mean() < 0.25
        found.append(y.detach())
        after = torch.rand(1)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    torch.manual_seed(0)
    y = run(x)
    torch.rand(3)
    torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.rand(1), after)  # the backward leaves the generator as it was


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_attention_without_dropout_draws_nothing(backend: str) -> None:
    def part(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k.sin(), is_causal=True).cos()

    q, k = (torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(2))
    run, seen = compiled(lambda q, k: again(part, again(part, q, k), k), backend)
    got, want = run(q, k), part(part(q, k), k)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(got.square().sum(), (q, k))
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), (q, k)), rtol=1e-4, atol=1e-4)
    assert externs(seen) == []


@pytest.mark.parametrize("options", [{"numerics": "eager"}, {"layout": False}])
def test_other_options(options: dict[str, Any]) -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.linear(x, w), 0.5)

    x, w = torch.randn(30, 20, requires_grad=True), torch.eye(20, requires_grad=True)
    run, _ = compiled(lambda x, w: again(part, x, w), "cpu", **options)
    y = run(x, w)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, torch.where(y == 0, 0.0, 2.0))


def test_attention_with_dropout_is_made_under_its_state() -> None:
    def part(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, torch.eye(16).expand(1, 2, 16, 16), dropout_p=0.5)

    q = torch.randn(1, 2, 16, 16, requires_grad=True)
    run, seen = compiled(lambda q: again(part, q), "cpu")
    torch.manual_seed(0)
    y = run(q)
    zeros = (y == 0).float().mean()
    (first,) = torch.autograd.grad(y.sum(), q)
    torch.manual_seed(0)
    y = run(q)
    torch.rand(5)
    (second,) = torch.autograd.grad(y.sum(), q)
    assert 0.3 < zeros < 0.7 and torch.equal(first, second)


def test_calls_under_a_generator_of_cuda_graphs() -> None:
    """What draws nothing is called without it; what draws keeps the wrapper, and is told what it gives."""
    graph, mode = Graph(), FakeTensorMode()
    x, generator = graph.placeholder("x"), graph.placeholder("rng_state")
    with mode:
        x.meta["val"], generator.meta["val"] = torch.empty(1, 2, 8, 4), torch.Generator()
    _, _, wrapper = compat.rng_wrappers()
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    results = []
    for probability in (0.0, 0.5):
        y = graph.call_function(wrapper, (attention, x, x, x, probability), {"rng_state": generator})
        results.append(graph.call_function(operator.getitem, (y, 0)))
        results[-1].meta["val"] = x.meta["val"]
    graph.output(tuple(results))
    gm = GraphModule(torch.nn.Module(), graph)
    open_rng_states(gm)
    plain, wrapped = (n for n in gm.graph.nodes if n.target in (attention, wrapper))
    assert plain.target is attention and plain.args == (x, x, x, 0.0) and not plain.kwargs
    assert wrapped.target is wrapper and wrapped.kwargs == {"rng_state": generator}
    assert [v.shape for v in wrapped.meta["val"]] == [(1, 2, 8, 4), (1, 2, 8)]
