"""Every claim that is offered for a contraction, over the grid of what may follow it: no further from float64 than
twice what the operator's reference is. What the heuristic prefers here, another processor does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from dicp.compiler import _compile_one
from dicp.config import Config
from dicp.ops.library import ACTIVATIONS, register
from dicp.passes.facts import value_of
from dicp.tuning.choose import candidates
from dicp.vendor.cpu_graph import CpuGraph

register()
aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def every_candidate(target: Any, *args: Any, **kwargs: Any) -> set[str] | None:
    """Run each claim of target(*args) and compare; their names. None where the passes make no such call."""

    vendor, config = CpuGraph(), Config.make()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    graph, operands = Graph(), list(args)
    with FakeTensorMode() as mode:
        for k, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                operands[k] = graph.placeholder(f"operand{k}")
                operands[k].meta["val"] = mode.from_tensor(a)
        call = graph.call_function(target, tuple(operands), kwargs)
        call.meta["val"] = target(*map(value_of, operands), **kwargs)
    graph.output((call,))
    gm = GraphModule(torch.nn.Module(), graph)
    if target.namespace == "dicp" and not vendor.supports(target, call):
        return None

    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    exact, plain = target(*wide, **kwargs), target(*args, **kwargs)
    # four units of it: of few results the reference's sums may all be lucky
    unit = torch.finfo(plain.dtype).eps * exact.abs().max().item()
    theirs = (plain.double() - exact).abs().max().item()
    names = set()
    for claim in candidates(vendor, call, config):
        found = _compile_one(gm, vendor, config, {call: claim})(list(tensors))[0]
        assert found.shape == plain.shape and found.dtype == plain.dtype, claim.name
        mine = (found.double() - exact).abs().max().item()
        assert mine <= 2 * theirs + 4 * unit, f"{claim.name}: {mine:.2e} from float64, the reference {theirs:.2e}"
        names.add(claim.name)
    return names


def grid(quick: Sequence[Any], all: Sequence[Any]) -> list[Any]:
    """What the usual run takes of a parameter, and marked as slow the rest."""
    return [*quick, *(pytest.param(a, marks=pytest.mark.slow) for a in all if a not in quick)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", grid([3, 300], [1, 3, 37, 300]))
@pytest.mark.parametrize("by_columns", grid([False], [False, True]))
@pytest.mark.parametrize("act", grid(["none", "relu", "gelu"], list(ACTIVATIONS)))
def test_linear_layers(act: str, by_columns: bool, rows: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, 132).to(dtype), torch.randn(260, 132).to(dtype) / 8
    w = w.t().contiguous().t() if by_columns else w
    for bias, other in itertools.product((False, True), repeat=2):
        b = torch.randn(260).to(dtype) if bias else None
        r = torch.randn(rows, 260).to(dtype) if other else None
        assert every_candidate(torch.ops.dicp.linear.default, x, w, b, r, act) != set()


CONVOLUTIONS = {
    "3x3": (16, 24, 3, 1, 1, 1, 1),
    "3x3 by 2": (16, 24, 3, 2, 1, 1, 1),
    "3x3 dilated": (16, 24, 3, 1, 2, 2, 1),
    "1x1": (16, 24, 1, 1, 0, 1, 1),
    "4x4 apart": (3, 24, 4, 4, 0, 1, 1),
    "depthwise": (24, 24, 3, 1, 1, 1, 24),
    "depthwise by 2": (24, 24, 3, 2, 1, 1, 24),
    "grouped": (32, 32, 3, 1, 1, 1, 4),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("act", grid(["none", "relu"], list(ACTIVATIONS)))
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind: str, act: str, channels_last: bool, dtype: torch.dtype) -> None:
    channels, results, window, stride, padding, dilation, groups = CONVOLUTIONS[kind]
    x = torch.randn(2, channels, 20, 24).to(dtype)
    w = torch.randn(results, channels // groups, window, window).to(dtype) / window
    how = [stride] * 2, [padding] * 2, [dilation] * 2, groups, act
    if channels_last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    for bias, other in itertools.product((False, True), repeat=2):
        b = torch.randn(results).to(dtype) if bias else None
        r = torch.randn_like(torch.ops.dicp.conv.default(x, w, b, None, *how)) if other else None
        assert every_candidate(torch.ops.dicp.conv.default, x, w, b, r, *how) != set()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factors", [(1, 1), (0.5, 2), (0, 1)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products(rows: int, factors: tuple[float, float], dtype: torch.dtype) -> None:
    beta, alpha = factors
    for batch, turned in itertools.product((None, 1, 6), (False, True)):
        lead = () if batch is None else (batch,)
        a, b = torch.randn(*lead, rows, 100).to(dtype), torch.randn(*lead, 100, 130).to(dtype)
        b = b.mT.contiguous().mT if turned else b
        c = torch.randn(130 if batch is None else lead + (rows, 130)).to(dtype)
        plain, added = (aten.mm, aten.addmm) if batch is None else (aten.bmm, aten.baddbmm)
        assert every_candidate(plain.default, a, b)
        assert every_candidate(added.default, c, a, b, beta=beta, alpha=alpha)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "added"])
@pytest.mark.parametrize("shape", [(2, 4, 4, 33, 33, 32), (1, 6, 2, 1, 70, 16), (1, 2, 2, 130, 57, 40)], ids=str)
def test_attention(shape: tuple[int, ...], mask: str, dtype: torch.dtype) -> None:
    batch, heads, groups, rows, columns, depth = shape
    q = torch.randn(batch, heads, rows, depth).to(dtype)
    k, v = (torch.randn(batch, groups, columns, depth).to(dtype) for _ in range(2))
    closed = torch.rand(batch, 1, rows, columns) > 0.7
    closed[..., 0] = False
    added = torch.zeros(closed.shape).masked_fill(closed, -torch.inf).to(dtype) if mask == "added" else None
    causal = mask == "causal" and rows == columns
    assert every_candidate(torch.ops.dicp.attention.default, q, k, v, added, causal, None) != set()
