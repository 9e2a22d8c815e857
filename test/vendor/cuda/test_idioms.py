"""Combinations of operations with a form of their own: which are found, and how exact they are."""

from __future__ import annotations

import re

import pytest
import torch
from kernels import compile_everywhere, load, pointwise, reference, run

from dicp.config import Config
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Store
from dicp.vendor.cuda_graph import codegen


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache})


def rows(n: int, dtype: torch.dtype = torch.float32, of: str = "x", over: str = "total") -> Kernel:
    """A softmax of three rows of x; of: whose maximum is taken off; over: what it is divided by."""
    i, r = Var("i", 3), Var("r", n)
    at = ix.of(i) * n + ix.of(r)
    x, y = load("x", at, dtype), load("y", at, dtype)
    top, total = (Expr("ref", (name,), dtype) for name in ("top", "total"))
    e = ex.unary("exp", x - top)
    body = (
        Reduce(("top",), "max", {"x": x, "y": y}[of]),
        Reduce(("total",), "sum", e),
        Store("out", at, {"total": e, "other": y}[over] / total),
    )
    params = [Param(name, dtype, False) for name in "xy"] + [Param("out", dtype, True, False)]
    return Kernel("softmax", (Axis(i), Axis(r, reduced=True)), tuple(params), (), body)


def words(kernel: Kernel, exact: bool = False) -> set[str]:
    found = set(re.findall(r"d\.(\w+)\(", codegen.emit(kernel, exact=exact).text))
    return found & {"exp", "div", "erf", "tanh", "exp_below", "share", "one_plus_erf", "one_plus_tanh"}


def one_plus(op: str, swapped: bool = False) -> Kernel:
    y = ex.unary(op, load("x", ix.of(Var("i", 4001))))
    return pointwise(1.0 + y if swapped else y + 1.0, 4001, {"x": torch.float32})


def test_a_softmax_is_found() -> None:
    assert words(rows(1000)) == {"exp_below", "share"}


def test_what_is_no_softmax_is_left_as_it_is() -> None:
    """Another's maximum, a numerator that may be infinite, float64, eager's own rounding."""
    assert words(rows(1000, of="y")) == {"exp", "div"}
    assert words(rows(1000, over="other")) == {"exp_below", "div"}
    assert words(rows(1000, torch.float64)) == {"exp", "div"}
    assert words(rows(1000), exact=True) == {"exp", "div"}


@pytest.mark.parametrize("op", ["erf", "tanh"])
def test_one_and_an_odd_function(op: str, config: Config) -> None:
    for swapped in (False, True):
        assert words(one_plus(op, swapped)) == {f"one_plus_{op}"}
        assert words(one_plus(op, swapped), exact=True) == {op}
    two = ex.unary(op, load("x", ix.of(Var("i", 9)))) + 2.0
    assert words(pointwise(two, 9, {"x": torch.float32})) == {op}
    edge = 5.0 if op == "erf" else 9.0
    x = torch.linspace(-edge, edge, 4001)
    got = run(one_plus(op), [x, torch.zeros(4001)], (), config)[1].double()
    want = torch.special.erfc(-x.double()) if op == "erf" else 2 / (1 + torch.exp(-2 * x.double()))
    assert ((got - want).abs() / want).max() < 5e-6
    near = x > -1
    assert ((got - want).abs() / want)[near].max() < 6e-7


@pytest.mark.parametrize("op", ["erf", "tanh"])
def test_one_and_an_odd_function_at_the_ends(op: str, config: Config) -> None:
    x = torch.zeros(4001)
    x[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-30])
    got = run(one_plus(op), [x, torch.zeros(4001)], (), config)[1]
    torch.testing.assert_close(got[:6], torch.tensor([float("nan"), 2.0, 0, 2, 0, 1]), equal_nan=True)


@pytest.mark.parametrize("n", [1000, 20000])
def test_a_softmax_is_as_exact(n: int, config: Config) -> None:
    x = torch.randn(3, n) * 20
    got = run(rows(n), [x.flatten(), x.flatten(), torch.zeros(3 * n)], (), config)[2].view(3, n).double()
    want = torch.softmax(x.double(), 1)
    above = want > 1e-30
    assert ((got - want).abs() / want)[above].max() < 2e-5 and (got - want).abs().max() < 3e-7


@pytest.mark.parametrize("n", [1000, 20000])
def test_infinities_in_a_softmax(n: int, config: Config) -> None:
    x = torch.randn(3, n)
    x[0, 3], x[1, :], x[2, 5] = -torch.inf, torch.finfo(torch.float32).min, torch.inf
    tensors = [x.flatten(), x.flatten(), torch.zeros(3 * n)]
    got, want = run(rows(n), tensors, (), config)[2], reference(rows(n), tensors, ())[2]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-8)


def test_they_compile_for_every_gpu(config: Config) -> None:
    kernels = [rows(1000), rows(20000), one_plus("erf"), one_plus("tanh")]
    kernels.append(pointwise(ex.unary("erf", ex.const(0.5, torch.float32)) + 1.0, 4, {"x": torch.float32}))
    assert compile_everywhere([codegen.emit(k) for k in kernels], config) == 3 * len(kernels)
