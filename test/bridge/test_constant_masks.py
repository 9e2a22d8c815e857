"""Masks of attention that are made of constants alone become `is_causal`, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dicp.dynamo_bridge.constant_masks import fold_masks

N = 6
MASKS: dict[str, tuple[str, Callable[..., Tensor]]] = {}


def mask(kind: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A function of query rows [B, H, N, D] that makes a mask, and what it is to become."""

    def add(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        MASKS[fn.__name__] = kind, fn
        return fn

    return add


@mask("causal")
def triangle(q: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril()


@mask("causal")
def not_above(q: Tensor) -> Tensor:
    return torch.logical_not(torch.triu(torch.ones(N, N), diagonal=1).bool())


@mask("causal")
def positions(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    return (at[None, None, None, :] <= at[None, None, :, None]).expand(q.shape[0], -1, -1, -1)


@mask("causal")
def packed(q: Tensor) -> Tensor:
    """As transformers makes it: of sequences that are told apart by where positions do not go up by one."""
    at = torch.arange(N).unsqueeze(0)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, columns = torch.arange(N)[:, None], torch.arange(N)[None, :]
    same = sequence[0, rows] == sequence[0, columns]
    return (rows.new_ones((), dtype=torch.bool) & same & (columns <= rows)).expand(1, 1, N, N)


@mask("causal")
def added(q: Tensor) -> Tensor:
    return torch.zeros(N, N).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), float("-inf"))


@mask("causal")
def added_least(q: Tensor) -> Tensor:
    return torch.full((N, N), torch.finfo(torch.float32).min).triu(1)


@mask("open")
def all_true(q: Tensor) -> Tensor:
    return (torch.arange(N)[None, None, :, None] >= 0).expand(q.shape[0], 1, N, N)


@mask("open")
def all_zeros(q: Tensor) -> Tensor:
    return torch.zeros(N, N)


@mask("other")
def above(q: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).triu()


@mask("other")
def below_the_diagonal(q: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril(1)


@mask("other")
def window(q: Tensor) -> Tensor:
    at = torch.arange(N)
    return (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 3)


@mask("other")
def of_one_head(q: Tensor) -> Tensor:
    """All heads but one see everything."""
    heads = torch.arange(q.shape[1])[:, None, None] > 0
    return heads | torch.ones(N, N, dtype=torch.bool).tril()


@mask("other")
def slopes(q: Tensor) -> Tensor:
    """Closed above the diagonal, and no zeros below it."""
    return torch.full((N, N), float("-inf")).triu(1) + torch.arange(N)


@mask("other")
def of_an_input(q: Tensor) -> Tensor:
    return (q[0, 0, :, :1] * 0 == 0) & torch.ones(N, N, dtype=torch.bool).tril()


@mask("other")
def random(q: Tensor) -> Tensor:
    return torch.rand(N, N) >= 0


@mask("other")
def written(q: Tensor) -> Tensor:
    made = torch.ones(N, N, dtype=torch.bool)
    made.triu_()
    return made


@mask("other")
def written_through_a_view(q: Tensor) -> Tensor:
    made = torch.ones(N, N, dtype=torch.bool)
    made.view(-1)[3:].fill_(False)
    made[0] = True
    made[:, 0] = True
    return made


@mask("other")
def written_out(q: Tensor) -> Tensor:
    made = torch.zeros(N, N)
    torch.add(made, 1, out=made)
    return made


@mask("other")
def written_in_part(q: Tensor) -> Tensor:
    made = torch.zeros(N, N)
    made += torch.ones(N, N).tril()
    return made


def attend(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q: F.scaled_dot_product_attention(q, q * 2, q.sin(), make(q), 0.0, False)


def folded(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> list[str]:
    """What each mask becomes."""
    found = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        fold_masks(gm)
        parts = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
        for node in (n for m in parts for n in m.graph.nodes):
            if "scaled_dot_product_attention" in str(node.target):
                given = dict(zip(("q", "k", "v", "attn_mask", "p", "is_causal"), node.args)) | node.kwargs
                kept = given.get("attn_mask") is not None
                found.append("other" if kept else "causal" if given.get("is_causal") else "open")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return found


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    kind, make = MASKS[name]
    assert folded(attend(make), torch.randn(2, 3, N, 4)) == [kind]


@pytest.mark.parametrize("name", [n for n, (kind, _) in MASKS.items() if n != "random"])
def test_compiled_agrees_with_the_mask_given(name: str) -> None:
    _, make = MASKS[name]
    q = torch.randn(2, 3, N, 4, dtype=torch.float64, requires_grad=True)

    def cast(q: Tensor) -> Tensor:
        made = make(q.float())
        return made.to(q.dtype) if made.dtype.is_floating_point else made

    want = attend(cast)(q)
    (grad,) = torch.autograd.grad(want.sin().sum(), q)
    torch._dynamo.reset()
    x = q.detach().float().requires_grad_()
    got = torch.compile(attend(make), backend="dicp_cpu", fullgraph=True)(x)
    got.sin().sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


def test_keywords_and_a_mask_for_two() -> None:
    def fn(q: Tensor) -> Tensor:
        made = triangle(q)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=made, scale=0.5, dropout_p=0.0)
        return F.scaled_dot_product_attention(y, q, value=q, attn_mask=made)

    assert folded(fn, torch.randn(2, 3, N, 4)) == ["causal", "causal"]


def test_checkpointed_parts() -> None:
    def block(q: Tensor, made: Tensor) -> Tensor:
        again = F.scaled_dot_product_attention(q, q, q, made)
        return F.scaled_dot_product_attention(again, q.sin(), q, made & made.view(N, N))

    def fn(q: Tensor) -> Tensor:
        made, of_data = triangle(q), of_an_input(q)
        for _ in range(2):
            q = checkpoint(block, q, made, use_reentrant=False)
        return checkpoint(block, q, of_data, use_reentrant=False)

    q = torch.randn(2, 3, N, 4, requires_grad=True)
    assert folded(fn, q) == ["causal"] * 4 + ["other"] * 2
    torch._dynamo.reset()
    got = torch.compile(fn, backend="dicp_cpu", fullgraph=True)(q)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), q), torch.autograd.grad(fn(q).sum(), q))


def test_other_keys_than_rows() -> None:
    """Torch counts is_causal's diagonal from the upper left, whatever a library makes of it."""

    def fn(q: Tensor, k: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, k, torch.ones(N, N + 2, dtype=torch.bool).tril())
        return F.scaled_dot_product_attention(y, k, k, torch.ones(N, N + 2, dtype=torch.bool))

    assert folded(fn, torch.randn(2, 3, N, 4), torch.randn(2, 3, N + 2, 4)) == ["other", "open"]


def test_sizes_that_vary_keep_theirs() -> None:
    assert folded(attend(positions), torch.randn(2, 3, N, 4), dynamic=True) == ["other"]


def test_a_buffer_is_no_constant() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(N, N, dtype=torch.bool).tril())

        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, self.mask)

    assert folded(Net(), torch.randn(2, 3, N, 4)) == ["other"]


def test_eagers_numerics_keep_the_call_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("dicp.dynamo_bridge.constant_masks.fold_masks", asked.append)
    for options in ({}, {"numerics": "eager"}):
        torch._dynamo.reset()
        torch.compile(attend(triangle), backend="dicp_cpu", options=options)(torch.randn(2, 3, N, 4))
    assert len(asked) == 1
