"""Combinations of operations with a form of their own: which are found, and how exact they are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from kernels import compile_everywhere, load, pointwise, reference, run

from dicp.config import Config
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Store
from dicp.vendor.cuda_graph import codegen, launch
from dicp.vendor.cuda_graph.assemble import programs_function


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache})


def rows(n: int, kept: torch.dtype = torch.bfloat16, of: str = "x", over: str = "total") -> Kernel:
    """A softmax of three rows of x; kept: as what it is stored; of: whose maximum is taken off; over: what it
    is divided by."""
    i, r, dtype = Var("i", 3), Var("r", n), ex.compute_dtype(kept)
    at = ix.of(i) * n + ix.of(r)
    x, y = load("x", at, dtype), load("y", at, dtype)
    top, total = (Expr("ref", (name,), dtype) for name in ("top", "total"))
    e = ex.unary("exp", x - top)
    body = (
        Reduce(("top",), "max", {"x": x, "y": y}[of]),
        Reduce(("total",), "sum", e),
        Store("out", at, {"total": e, "other": y}[over] / total),
    )
    params = [Param(name, dtype, False) for name in "xy"] + [Param("out", kept, True, False)]
    return Kernel("softmax", (Axis(i), Axis(r, reduced=True)), tuple(params), (), body)


def words(kernel: Kernel, exact: bool = False) -> set[str]:
    found = set(re.findall(r"d\.(\w+)\(", codegen.emit(kernel, exact=exact).text))
    return found & {"exp", "div", "erf", "tanh", "exp_below", "share", "one_plus_erf", "one_plus_tanh"}


def one_plus(op: str, swapped: bool = False, kept: torch.dtype = torch.bfloat16) -> Kernel:
    y = ex.unary(op, load("x", ix.of(Var("i", 4001))))
    return pointwise(1.0 + y if swapped else y + 1.0, 4001, {"x": torch.float32}, kept)


def test_a_softmax_is_found() -> None:
    assert words(rows(1000)) == {"exp_below", "share"}


def test_what_is_no_softmax_is_left_as_it_is() -> None:
    """Another's maximum, a numerator that may be infinite, more precision, eager's own rounding."""
    assert words(rows(1000, of="y")) == {"exp", "div"}
    assert words(rows(1000, over="other")) == {"exp_below", "div"}
    for wide in (torch.float32, torch.float64):
        assert words(rows(1000, wide)) == {"exp", "div"}
    assert words(rows(1000), exact=True) == {"exp", "div"}


def test_a_rows_result_alone_may_be_float32() -> None:
    """What is read decides then."""
    for read, op in ((torch.bfloat16, "exp_below"), (torch.float32, "exp")):
        kernel = rows(1000)
        params = tuple(replace(p, dtype=read if p.name in "xy" else torch.float32) for p in kernel.params)
        total = Store("out", ix.of(Var("i", 3)), Expr("ref", ("total",), torch.float32))
        kernel = replace(kernel, params=params, body=(*kernel.body[:2], total))
        assert words(kernel) == {op}


def evaluated(op: str, x: torch.Tensor, config: Config) -> torch.Tensor:
    """1 + op(x) by the shorter form, before it is rounded."""
    source = codegen.emit(one_plus(op), interpreted=True)
    unrounded = source.text.replace("d.narrow(v1, tl.bfloat16)", "v1").replace("d.narrow(v0, tl.bfloat16)", "v0")
    assert unrounded != source.text
    source = replace(source, text=unrounded)
    out = torch.zeros(4001)
    call = launch.InterpretedKernel(source, launch.load(source, config), programs_function(source))
    call(False, x, out)
    return out.double()


@pytest.mark.parametrize("op", ["erf", "tanh"])
def test_one_and_an_odd_function(op: str, config: Config) -> None:
    for swapped in (False, True):
        assert words(one_plus(op, swapped)) == {f"one_plus_{op}"}
        assert words(one_plus(op, swapped), exact=True) == {op}
    assert words(one_plus(op, kept=torch.float32)) == {op}
    two = ex.unary(op, load("x", ix.of(Var("i", 9)))) + 2.0
    assert words(pointwise(two, 9, {"x": torch.float32}, torch.bfloat16)) == {op}
    edge = 5.0 if op == "erf" else 9.0
    x = torch.linspace(-edge, edge, 4001)
    got = evaluated(op, x, config)
    want = torch.special.erfc(-x.double()) if op == "erf" else 2 / (1 + torch.exp(-2 * x.double()))
    assert ((got - want).abs() / want).max() < 5e-6
    near = x > -1
    assert ((got - want).abs() / want)[near].max() < 6e-7


@pytest.mark.parametrize("op", ["erf", "tanh"])
def test_one_and_an_odd_function_at_the_ends(op: str, config: Config) -> None:
    x = torch.zeros(4001)
    x[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-30])
    want = torch.tensor([float("nan"), 2.0, 0, 2, 0, 1]).double()
    torch.testing.assert_close(evaluated(op, x, config)[:6], want, equal_nan=True)


@pytest.mark.parametrize("n", [1000, 20000])
def test_a_softmax_is_as_exact(n: int, config: Config) -> None:
    x = torch.randn(3, n) * 20
    tensors = [x.flatten(), x.flatten(), torch.zeros(3 * n, dtype=torch.bfloat16)]
    got = run(rows(n), tensors, (), config)[2].view(3, n).double()
    want = torch.softmax(x.double(), 1)
    above = want > 1e-30
    assert ((got - want).abs() / want)[above].max() < 2**-8 * 1.01  # half of the last place: rounded once


@pytest.mark.parametrize("n", [1000, 20000])
def test_infinities_in_a_softmax(n: int, config: Config) -> None:
    x = torch.randn(3, n)
    x[0, 3], x[1, :], x[2, 5] = -torch.inf, torch.finfo(torch.float32).min, torch.inf
    tensors = [x.flatten(), x.flatten(), torch.zeros(3 * n, dtype=torch.bfloat16)]
    got, want = run(rows(n), tensors, (), config)[2], reference(rows(n), tensors, ())[2]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=2**-7, atol=0)


def test_they_compile_for_every_gpu(config: Config) -> None:
    kernels = [rows(1000), rows(20000), one_plus("erf"), one_plus("tanh")]
    alone = ex.unary("erf", ex.const(0.5, torch.float32)) + 1.0
    kernels.append(pointwise(alone, 4, {"x": torch.float32}, torch.bfloat16))
    assert compile_everywhere([codegen.emit(k) for k in kernels], config) == 3 * len(kernels)
