"""Constant weights in MKL's form, which serves float32 best on Intel's processors: what it computes is the same
on others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import matmul

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")


@pytest.fixture(autouse=True)
def _intel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(matmul, "cpu_maker", lambda: "intel")


def run(model: nn.Module, *inputs: torch.Tensor, **how: bool) -> list[str]:
    """Names of the calls of the frozen model, whose results are as near to float64's as eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend="dicp_cpu", options={"freeze": True}, **how)
    wide, seen = copy.deepcopy(model).double(), list[Compiled]()
    with torch.no_grad(), observe(seen.append):
        for x in inputs:
            got, eager, exact = compiled(x), model(x), wide(x.double())
            assert got.shape == eager.shape and got.stride() == eager.stride()
            mine, theirs, most = ((y - exact).abs().max() if y.numel() else 0 for y in (got, eager, 2 * exact))
            assert mine <= 2 * theirs + torch.finfo(torch.float32).eps * most
    return [call.claim.name for s in seen for call in s.program.library_calls]


class ByColumns(nn.Module):
    """As GPT-2's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(300, 200)), nn.Parameter(torch.randn(200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 300), (2, 3, 40, 300)])
def test_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    assert run(nn.Linear(300, 200, bias=bias), torch.randn(shape)) == ["linear: MKL"]


def test_a_weight_by_columns() -> None:
    assert run(ByColumns(), torch.randn(40, 300)) == ["linear: MKL"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(300, 700), nn.Linear(700, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def test_what_follows_is_computed_apart() -> None:
    assert run(Block(), torch.randn(64, 300)) == ["linear: MKL", "linear: MKL"]


def test_a_kernel_that_follows_adds_the_bias() -> None:
    for options in ({"freeze": True}, {}):
        torch._dynamo.reset()
        block, seen = Block().eval(), list[Compiled]()
        with torch.no_grad(), observe(seen.append):
            x = torch.randn(2, 100, 300)
            got = torch.compile(block, backend="dicp_cpu", options=options)(x)
        torch.testing.assert_close(got.double(), copy.deepcopy(block).double()(x.double()), rtol=1e-5, atol=1e-5)
        up, down = (call.node for s in seen for call in s.program.library_calls)
        assert not any("bias" in a.name for a in up.all_input_nodes) and len(up.all_input_nodes) == 2
        assert len(down.all_input_nodes) == 3  # behind which no kernel is


def test_other_numbers_of_rows_read_the_weight_as_it_was() -> None:
    assert run(nn.Linear(300, 200), *(torch.randn(n, 300) for n in (32, 70, 5)), dynamic=True) == ["linear: MKL"]


def test_other_numbers_of_rows_and_a_weight_by_columns() -> None:
    assert run(ByColumns(), *(torch.randn(n, 300) for n in (32, 70, 0)), dynamic=True) == ["linear: MKL"]


@pytest.mark.parametrize("rows, packed", [(15, False), (16, True), (0, False)])
def test_few_rows_are_not_packed(rows: int, packed: bool) -> None:
    x = torch.randn(rows, 300)
    assert (run(nn.Linear(300, 200), x) == ["linear: MKL"]) == packed


def test_nothing_is_packed_of_no_depth_or_columns() -> None:
    for depth, columns in ((0, 200), (300, 0)):
        model = nn.Linear(300, 200)
        model.weight, model.bias = (nn.Parameter(torch.randn(*n)) for n in ((columns, depth), (columns,)))
        assert "linear: MKL" not in run(model, torch.randn(40, depth))


class Rows(nn.Module):
    """Multiplies some of the columns of what it gets, whose rows are then apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, 20:320])


def test_rows_that_are_apart_are_read_where_they_lie() -> None:
    torch._dynamo.reset()
    model, x, seen = Rows().eval(), torch.randn(40, 400), list[Compiled]()
    with torch.no_grad(), observe(seen.append):
        got = torch.compile(model, backend="dicp_cpu", options={"freeze": True})(x)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
    programs = [s.program for s in seen]
    assert [c.claim.name for p in programs for c in p.library_calls] == ["linear: MKL"]
    assert not any(p.launches for p in programs)


@pytest.mark.parametrize("apart", [0, 1, 300])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_that_overlap(apart: int, dynamic: bool) -> None:
    for rows in (40, 50):
        x = torch.randn(300 * 60).as_strided((rows, 300), (apart, 1))
        assert run(nn.Linear(300, 200), x, dynamic=dynamic) == ["linear: MKL"]


@pytest.mark.parametrize("strides", [(1, 200), (2, 700), (320, 1), (1, 320), (0, 1), (1, 0), (1, 1), (7, 1)])
def test_however_a_weight_lies(strides: tuple[int, int]) -> None:
    memory = torch.randn(300 * 700)
    model = nn.Linear(300, 200, bias=False)
    model.weight = nn.Parameter(memory.as_strided((200, 300), strides))
    for rows in (40, 41):
        assert "linear: MKL" in run(model, torch.randn(rows, 300))


def test_results_are_written_where_they_are_planned() -> None:
    """Those that nothing else keeps, in turn: three of one size have two places."""
    torch._dynamo.reset()
    model, seen = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4))).eval(), list[Compiled]()
    with torch.no_grad(), observe(seen.append):
        torch.compile(model, backend="dicp_cpu", options={"freeze": True})(torch.randn(64, 300))
    (main,) = [s.program for s in seen if s.program.library_calls]
    assert main.plan.size == 2 * 64 * 300 * 4


def test_a_changed_weight_is_packed_again() -> None:
    model, x = nn.Linear(300, 200).eval(), torch.randn(32, 300)
    compiled = torch.compile(model, backend="dicp_cpu", options={"freeze": True})
    with torch.no_grad():
        before = compiled(x)
        model.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(before, model(x))


def test_it_stays_with_other_processors_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "cpu_maker", lambda: "amd")
    assert run(nn.Linear(300, 200), torch.randn(64, 300)) != ["linear: MKL"]
