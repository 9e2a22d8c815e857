"""PASSES as a whole: order, hooks, verification, whole models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import CheckPass, claims, graph_of, graphs_of
from torch.fx import GraphModule

import dicp.passes
from dicp.errors import VerifyError
from dicp.ir.printer import show
from dicp.passes import PASSES, Pass, run_passes

VERIFY = SimpleNamespace(verify=True, layout=True, numerics="fast")


def all_passes(gm: GraphModule) -> GraphModule:
    return run_passes(gm, claims(), VERIFY)


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b)).sum(-1)


def test_hook_tells_which_pass_changed_the_graph() -> None:
    seen: list[tuple[str, bool]] = []
    run_passes(
        graph_of(mlp, (2, 3, 8), (4, 8), (4,)),
        claims(),
        VERIFY,
        lambda name, gm, changed, seconds: seen.append((name, changed)),
    )
    assert [name for name, _ in seen] == [p.name for p in PASSES]
    assert dict(seen)["rewrite_linear"] and not dict(seen)["rewrite_conv"]


def test_every_pass_gives_its_reason() -> None:
    assert all(p.reason for p in PASSES)
    assert len({p.name for p in PASSES}) == len(PASSES)


def test_wrong_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(gm: GraphModule, vendor: Any) -> GraphModule:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = node.meta["val"].double()
        return gm

    monkeypatch.setattr(dicp.passes, "PASSES", (Pass("spoil", spoil, "to be caught"),))
    with pytest.raises(VerifyError) as error:
        all_passes(graph_of(mlp, (2, 3, 8), (4, 8), (4,)))
    assert "after the pass spoil" in error.value.__notes__


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.norm2 = torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(torch.relu(x + y).mean((2, 3)))


class Transformer(torch.nn.Module):
    """A layer written out: nn.TransformerEncoderLayer is one operator in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.norm, self.norm2 = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("model, shape", [(Residual, (3, 8, 16, 18)), (Transformer, (3, 5, 16))])
def test_models(model: Any, shape: tuple[int, ...], train: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    module = model().train(train)
    graphs = graphs_of(module, shape, train=train, dynamic=dynamic)
    assert graphs
    checker = CheckPass()
    checker.rtol = checker.atol = 1e-4
    for gm in graphs.values():
        checker.check(all_passes, gm)
    if not train:
        text = show(graphs["inference"])
        assert "dicp." in text and "addmm" not in text and "batch_norm" not in text
