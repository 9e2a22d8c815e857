"""Linear layers of the same few rows in one call: against float64, no further from it than twice eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compiler import Compiled, observe
from dicp.ops.library import NARROW_WEIGHTS
from dicp.vendor.cpu_graph.claims import gemv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = (517, 306, 1200)  # none a multiple of a unit or of a thread's share
DEPTH = 301
Results = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield


def check(fn: Callable[..., Results], *args: Tensor, calls: Sequence[str], **options: Any) -> None:
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu", options=options)(*args)
    wide = (a if a.dtype in NARROW_WEIGHTS else a.double() for a in args)
    eager, exact = fn(*args), fn(*wide)
    for mine, theirs, right in zip(got, eager, exact, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        unit = torch.finfo(mine.dtype).eps * right.abs().max().item()
        off, allowed = ((x.double() - right).abs().max().item() for x in (mine, theirs))
        assert off <= 2 * allowed + unit, f"{off:.2e} from float64, eager {allowed:.2e}"
    assert [c.claim.name for s in seen for c in s.program.library_calls] == list(calls)


def operands(rows: int, dtype: torch.dtype, columns: Sequence[int] = COLUMNS) -> list[Tensor]:
    """x, the weights, the biases."""
    weights = [torch.randn(n, DEPTH, dtype=dtype) / DEPTH**0.5 for n in columns]
    return [torch.randn(rows, DEPTH, dtype=dtype), *weights, *(torch.randn(n, dtype=dtype) for n in columns)]


def side_by_side(x: Tensor, *args: Tensor) -> Results:
    n = len(args) // 2
    return tuple(F.linear(x, w, b) for w, b in zip(args[:n], args[n:], strict=True))


def gate(x: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Results:
    return (F.silu(F.linear(x, v, a)) * F.linear(x, w, b),)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_side_by_side(rows: int, dtype: torch.dtype) -> None:
    check(side_by_side, *operands(rows, dtype), calls=["linears: few rows"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gated(rows: int, dtype: torch.dtype) -> None:
    check(gate, *operands(rows, dtype, (1037, 1037)), calls=["linears: few rows"])


@pytest.mark.parametrize("act", [F.relu, F.gelu, torch.tanh])
def test_activations_and_gates_of_them(act: Callable[[Tensor], Tensor]) -> None:
    """Limits are the gate's alone: what it is multiplied by may be negative."""
    x, v, w, *_ = operands(2, torch.float32, (700, 700))

    def fn(x: Tensor, v: Tensor, w: Tensor) -> Results:
        return act(F.linear(x, v)), act(F.linear(x, w)), act(F.linear(-x, v)) * F.linear(-x, w)

    check(fn, x, v, w, calls=["linears: few rows"] * 2)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_instruction_sets(dtype: torch.dtype, isa: str) -> None:
    x, v, w, u, a, b, c = operands(3, dtype, (517, 517, 306))

    def fn(*args: Tensor) -> Results:
        x, v, w, u, a, b, c = args
        return *gate(x, v, w, a, b), *side_by_side(-x, v, u, a, c)

    check(fn, x, v, w, u, a, b, c, calls=["linears: few rows"] * 2, isa=isa)


@pytest.mark.parametrize("narrow", NARROW_WEIGHTS, ids=str)
def test_narrow_weights(narrow: torch.dtype) -> None:
    """Of eight bits, each with a scale for a column."""
    x = torch.randn(1, DEPTH, dtype=torch.bfloat16)
    ws = [(torch.randn(n, DEPTH) * 20).to(narrow) for n in (1024, 1024, 999)]
    scales = [torch.rand(w.shape[0], dtype=torch.bfloat16) / 64 for w in ws]

    def layer(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype)) * scale

    def fn(x: Tensor, *args: Any) -> Results:
        (v, w, u), (a, b, c) = args[:3], args[3:]
        gated = F.silu(layer(x, v, a)) * layer(x, w, b)
        return gated, layer(-x, v, a), layer(-x, u, c)

    check(fn, x, *ws, *scales, calls=["linears: few rows"] * 2)


def test_a_scale_for_a_whole_weight_and_rows_of_a_wider_one() -> None:
    x, w = torch.randn(2, DEPTH), (torch.randn(1500, 2 * DEPTH) * 20).to(torch.int8)

    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Results:
        v = w[:, :DEPTH].to(x.dtype)
        return F.linear(x, v[:700]) * a, F.linear(x, v[700:]) * b

    check(fn, x, w, torch.tensor(0.25), torch.tensor(-3.0), calls=["linears: few rows"])


def test_what_nobody_reads_is_not_written() -> None:
    def fn(x: Tensor, v: Tensor, w: Tensor) -> Results:
        return (torch.ops.dicp.linears(x, None, 0.0, [v, w], [], [], "none", False)[1],)

    x, v, w, *_ = operands(1, torch.float32, (700, 333))
    got = torch.compile(fn, backend="dicp_cpu")(x, v, w)
    torch.testing.assert_close(got[0], F.linear(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 40])
def test_more_rows_are_calls_of_their_own(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "FEW_ROWS_OF_INTEL", 0)
    seen: list[Compiled] = []
    with observe(seen.append):
        torch.compile(side_by_side, backend="dicp_cpu")(*operands(rows, torch.float32))
    assert len(seen[0].program.library_calls) == len(COLUMNS)
