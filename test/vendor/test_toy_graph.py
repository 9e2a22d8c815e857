"""A vendor whose toolchain takes graphs, as docs/adding_a_vendor.md tells it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import graph_of
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd import forward_ad

import dicp
from dicp.compiler import Compiled, compile_graph, observe
from dicp.config import Config
from dicp.errors import DicpError, VendorError, VerifyError
from dicp.ir.verify import insert
from dicp.scaffold import toy_graph


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def compiled(fn: Callable[..., Any], *args: Any, **how: Any) -> tuple[Any, list[Compiled]]:
    torch._dynamo.reset()
    found: list[Compiled] = []
    with observe(found.append):
        out = torch.compile(fn, backend=toy_graph.backend, fullgraph=True, **how)(*args)
    return out, found


def externs(c: Compiled) -> list[str]:
    return [str(e.node.target) for e in c.program.externs]


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_perceptron_is_one_part(dynamic: bool) -> None:
    model = mlp()
    torch._dynamo.reset()
    found: list[Compiled] = []
    run = torch.compile(model, backend=toy_graph.backend, dynamic=dynamic, options={"strict": True})
    with torch.no_grad(), observe(found.append):
        for rows in (5, 9):
            x = r(rows, 6)
            torch.testing.assert_close(run(x), model(x))
    assert len(found) == (1 if dynamic else 2)
    assert [c.claim.name.split(":")[0] for c in found[0].program.library_calls] == ["toy_graph"]


def test_a_tangent_is_refused() -> None:
    run = torch.compile(lambda x: x.exp() * 2, backend=toy_graph.backend)
    with forward_ad.dual_level():
        run(r(3))
        with pytest.raises(DicpError, match="tangent"):
            run(forward_ad.make_dual(r(3), r(3)))


@pytest.mark.parametrize(
    ("gives", "text"),
    [
        (lambda x: [x.double()], "torch.float64 [1, 4], where torch.float32 [1, 4] is due"),
        (lambda x: [x[0]], "torch.float32 [4], where torch.float32 [1, 4] is due"),
        (lambda x: x, "gave Tensor, where a tuple or list is due"),
        (lambda x: [x, x], "gave 2 of 1 results"),
        (lambda x: [x.to("meta")], "on meta, where one on cpu is due"),
    ],
)
def test_a_part_that_gives_something_else(gives: Callable[..., Any], text: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(VendorError, match=re.escape(text)) as raised:
        torch.compile(lambda x: x.exp() * 2, backend=dicp.backend(built_as(gives)))(r(1, 4))
    assert re.search(r"toy_graph: part 0 \(2 calls, from exp \(.*test_toy_graph.py:\d+", str(raised.value))


def built_as(function: Any) -> toy_graph.ToyGraph:
    """A vendor whose every part is this function."""

    class Wrong(toy_graph.ToyGraph):
        words = None, "its own business: a kernel vendor's are names"

        def build(self, gm: torch.fx.GraphModule, config: Any) -> Any:
            return function

    return Wrong()


def test_a_part_that_raises_tells_which_it_is() -> None:
    def fails(x: Any) -> Any:
        raise IndexError("out of range")

    torch._dynamo.reset()
    with pytest.raises(IndexError) as raised:
        torch.compile(lambda x: x.exp() * 2, backend=dicp.backend(built_as(fails)))(r(1, 4))
    assert any("toy_graph: part 0 (2 calls, from exp" in note for note in raised.value.__notes__)


def test_a_build_that_gives_no_function() -> None:
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="build gave None, which is no function"):
        torch.compile(lambda x: x.exp() * 2, backend=dicp.backend(built_as(None)))(r(1, 4))


@pytest.mark.parametrize(
    ("gives", "text"),
    [
        (lambda x: [x], r"gave as result 1 of 1, of mul .*, memory of an input"),
        (lambda x: [x.add_(1) * 1], r"toy_graph: .* wrote input 0 \(arg0_1\)"),
    ],
)
def test_verified_calls_find_what_only_shows_later(
    gives: Callable[..., Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DICP_VERIFY", "1")
    torch._dynamo.reset()
    with pytest.raises(VerifyError, match=text):
        torch.compile(lambda x: x.exp() * 2, backend=dicp.backend(built_as(gives)))(r(1, 4))
    run = torch.compile(lambda x: (x.exp() * 2, x[0], x), backend=toy_graph.backend)
    x = r(3, 4)
    torch.testing.assert_close(run(x)[0], x.exp() * 2)


def test_a_part_is_given_memory_that_holds_the_elements() -> None:
    """Neither an input nor a gradient is a negated view for the chip."""
    x = torch.randn(4, 5, dtype=torch.complex64).conj().imag
    out, _ = compiled(lambda x: x.exp() * 2, x)
    torch.testing.assert_close(out, x.exp() * 2)
    leaf = r(4, 5).requires_grad_()
    out, _ = compiled(lambda x: x * 3, leaf)
    out.backward(x)
    torch.testing.assert_close(leaf.grad, x * 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_trains(dynamic: bool) -> None:
    model = mlp()
    torch._dynamo.reset()
    found: list[Compiled] = []
    run = torch.compile(lambda x, y: F.mse_loss(model(x).softmax(-1), y), backend=toy_graph.backend,
                        dynamic=dynamic)
    for rows in (5, 9):
        x, y = r(rows, 6), r(rows, 3)
        model.zero_grad()
        with observe(found.append):
            run(x, y).backward()
        mine = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        F.mse_loss(model(x).softmax(-1), y).backward()
        torch.testing.assert_close(mine, [p.grad for p in model.parameters()])
    assert {c.role for c in found} == {"forward", "backward"}
    assert all(len(c.program.library_calls) == 1 for c in found if c.role == "forward")


def test_what_is_not_supported_runs_between_parts() -> None:
    def fn(x, w):
        return torch.linalg.svdvals(x @ w).relu() + w.sum(1)

    x, w = r(4, 4), r(4, 4)
    out, (c,) = compiled(fn, x, w)
    torch.testing.assert_close(out, fn(x, w))
    assert len(c.program.library_calls) == 2 and externs(c) == ["aten._linalg_svd.default"]
    assert "svdvals(x @ w)" in c.program.sources["call.py"]  # the user's line, beside the call
    with pytest.raises(Exception, match="toy_graph has no code for this op"):
        compiled(fn, x, w, options={"strict": True})


def test_a_way_out_and_back_is_not_one_part() -> None:
    """relu and the product share a part only if nothing between them is outside it."""
    out, (c,) = compiled(lambda x: x.relu() * x.relu().sin(), r(3, 5))
    assert len(c.program.library_calls) == 2 and externs(c) == ["aten.sin.default"]


def test_independent_calls_share_a_part() -> None:
    out, (c,) = compiled(lambda x, y: (x.relu(), y.exp(), x.sin()), r(3), r(4))
    assert len(c.program.library_calls) == 1 and externs(c) == ["aten.sin.default"]


def test_random_numbers_come_in_program_order() -> None:
    def fn(x):
        a = torch.rand_like(x.exp() * 2)  # a level below b's
        b = torch.rand_like(x)
        return a, b

    x = r(4)
    torch.manual_seed(3)
    out, _ = compiled(fn, x)
    torch.manual_seed(3)
    torch.testing.assert_close(out, fn(x), rtol=0, atol=0)


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return t, x + 1


def step(x, y):
    old = x[0] * 1
    x.add_(y)
    return old, x, x.t()


@pytest.mark.parametrize("fn", [swap, step])
def test_mutated_inputs(fn: Callable[..., Any]) -> None:
    x, y = r(3, 3), r(3, 3)
    mine, theirs = [x.clone(), y.clone()], [x.clone(), y.clone()]
    got, _ = compiled(fn, *mine)
    torch.testing.assert_close(got, fn(*theirs))
    torch.testing.assert_close(mine, theirs)


def test_what_is_written_last_was_read_before() -> None:
    """copy_(x, y), copy_(y, y + 1), return x.t() of old: passes may leave sources and results as bare inputs."""
    gm = graph_of(lambda x, y: (x.t() + 0.5 * y, y + 1), (3, 3), (3, 3))
    x, y = [n for n in gm.graph.nodes if n.op == "placeholder"]
    done = gm.graph.output_node()
    plus = done.args[0][1]
    with gm.graph.inserting_before(done):
        view = insert(gm.graph, torch.ops.aten.permute.default, (y, [1, 0]), like=plus)
        for target, source in ((y, plus), (x, y)):
            insert(gm.graph, torch.ops.aten.copy_.default, (target, source), like=plus, value=target.meta["val"])
    done.args = ((view,),)
    a, b = r(3, 3), r(3, 3)
    args, old = [a, b], b.clone()
    (result,) = compile_graph(gm, toy_graph.vendor, Config.make()).call(args)
    assert torch.equal(b, old + 1) and torch.equal(a, old) and torch.equal(result, old.t()) and not args


def test_strides_are_eagers() -> None:
    out, _ = compiled(lambda x: (x.t() + 1, x.exp().t()), r(3, 5))
    assert [o.stride() for o in out] == [(1, 5), (1, 5)]
    out, _ = compiled(lambda x: (x.t() + 1).t(), r(3, 5), dynamic=True)
    assert out.stride() == (5, 1)


def test_sizes_are_numbers_to_the_parts() -> None:
    def fn(x):
        return (x + 1).view(x.shape[0] * 2, -1) * x.shape[0]

    x = r(6, 8)
    out, (c,) = compiled(fn, x, dynamic=True)
    torch.testing.assert_close(out, fn(x))
    assert len(c.program.library_calls) == 1 and not externs(c)


@pytest.mark.parametrize("grad", [False, True])
def test_programs_are_kept_in_torchs_caches(grad: bool) -> None:
    from torch._dynamo.utils import counters

    x = r(4, 5).requires_grad_(grad)
    fn = lambda x: torch.linalg.svdvals((x @ x.t()).relu()) * 2  # noqa: E731  two parts, a call between them
    want = fn(x)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        got = torch.compile(fn, backend=toy_graph.backend)(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if grad:
            got.sum().backward()
        found.append((counters["dicp"]["graphs"], counters["dicp"]["graphs_loaded"]))
    assert found == [(1 + grad, 0), (0, 1 + grad)]
