"""Temporaries in the memory of a result: which, where, and that programs with such are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import Kernels, compiled

import dicp.compiler
from dicp.ir import index as ix
from dicp.schedule.lifetime import Lifetime
from dicp.schedule.memory import plan_memory
from dicp.schedule.result_reuse import SMALLEST, Lender, borrowed
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims import matmul

LIBRARY = Kernels({"mm": Claim("mm", lambda writer, call: [], out=True)})
N = ix.of(ix.Var("n", None, 2))


def lender(name: str, start: int, end: int, nbytes: Any = 4 * SMALLEST) -> Lender:
    return Lender(name, nbytes, nbytes if isinstance(nbytes, int) else 8 * SMALLEST, start, end)


def test_what_is_dead_before_the_result_is_written_lies_in_it() -> None:
    lives = [Lifetime("early", SMALLEST, 0, 3), Lifetime("read", SMALLEST, 3, 4), Lifetime("also", 64, 1, 2)]
    found = borrowed(lives, [lender("y", 0, 3)], {x.name: x.nbytes for x in lives})
    assert found == {"early": ("y", 0), "also": ("y", SMALLEST)}


def test_a_result_that_is_allocated_later_lends_nothing_before() -> None:
    lives = [Lifetime("early", SMALLEST, 0, 1), Lifetime("late", SMALLEST, 2, 3)]
    assert borrowed(lives, [lender("y", 2, 3)], {x.name: x.nbytes for x in lives}) == {"late": ("y", 0)}


def test_the_largest_result_lends_first_and_small_ones_not() -> None:
    lives = [Lifetime("a", 4 * SMALLEST, 0, 1), Lifetime("b", 4 * SMALLEST, 0, 1), Lifetime("c", 64, 0, 1)]
    lenders = [
        lender("small", 0, 9, SMALLEST - 64),
        lender("y", 0, 4),
        lender("z", 0, 4, 5 * SMALLEST),
    ]
    found = borrowed(lives, lenders, {x.name: x.nbytes for x in lives})
    assert found == {"a": ("z", 0), "c": ("z", 4 * SMALLEST), "b": ("y", 0)}


def test_at_every_size_there_is_room() -> None:
    """Of 8 rows in the example, of at least 2."""
    lives = [Lifetime("rows", 4 * SMALLEST, 0, 1), Lifetime("fixed", 3 * SMALLEST, 0, 1)]
    nbytes = {"rows": N * (SMALLEST // 2), "fixed": 3 * SMALLEST}
    assert borrowed(lives, [lender("y", 0, 1, N * SMALLEST)], nbytes) == {"rows": ("y", 0)}
    assert borrowed(lives, [lender("y", 0, 1, 8 * SMALLEST)], nbytes) == {"fixed": ("y", 0)}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_those_in_one_result_never_overlap(mine: Any, theirs: Any) -> None:
    lives = [Lifetime(f"t{k}", n * SMALLEST // 4, a, a + b) for k, (n, a, b) in enumerate(mine)]
    lenders = {f"y{k}": lender(f"y{k}", a, a + b, n * SMALLEST) for k, (n, a, b) in enumerate(theirs)}
    found = borrowed(lives, list(lenders.values()), {x.name: x.nbytes for x in lives})
    inside = [(x, *found[x.name]) for x in lives if x.name in found]
    for x, name, at in inside:
        assert isinstance(at, int) and at + x.nbytes <= lenders[name].room
        assert lenders[name].start <= x.start and x.end <= lenders[name].end
        for other, its_name, its_at in inside:
            if other is not x and its_name == name and other.overlaps(x):
                assert at + x.nbytes <= its_at or its_at + other.nbytes <= at  # type: ignore[operator]


# -- whole programs --------------------------------------------------------------------------------------------


@torch.library.custom_op("dicp_test::borrow_double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)


def widening(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A wide temporary that is dead before the wide result is written."""
    return (x.softmax(1) @ w).sin() @ v


def behind_an_extern(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The result is allocated after the extern."""
    return (double(x).softmax(1) @ w).sin() @ v


def twice(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One result is made of the other, which lends no more then."""
    y = (x.softmax(1) @ w).sin() @ v
    return y, y.flip(0).cumsum(1)


SIZES = (64, 4096), (4096, 64), (64, 16384)


@pytest.mark.parametrize("fn", [widening, behind_an_extern, twice])
@pytest.mark.parametrize("rows", ["static", "symbolic"])
@pytest.mark.parametrize("backend", ["dicp_cpu", "dicp_cuda"])
def test_programs_are_right_and_the_widest_is_borrowed(
    fn: Any, rows: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "dicp_cuda":
        pytest.importorskip("triton")
        monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    monkeypatch.setattr(matmul, "_onednn_serves", lambda node: False)  # it allocates its results itself
    seen: list[dicp.compiler.Compiled] = []
    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend, fullgraph=True)
    x, w, v = (torch.randn(s) for s in SIZES)
    given = [x, x[:37].clone()] if rows == "symbolic" else [x]
    if rows == "symbolic":
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), dicp.compiler.observe(seen.append):
        for part in given:
            torch.testing.assert_close(run(part, w, v), fn(part, w, v), rtol=1e-4, atol=1e-4)
    (program,) = (c.program for c in seen)
    plan, buffers, hint = program.plan, program.lowered.buffers, program.lowered.symbols.hint
    largest = max(plan.borrowed, key=lambda n: hint(buffers[n].nbytes))
    assert buffers[plan.borrowed[largest][0]].kind == "output"
    assert hint(buffers[largest].nbytes) == 64 * 4096 * 4 and largest not in plan.offset


def test_what_is_alive_when_the_result_is_written_stays_in_the_arena() -> None:
    program = compiled(lambda x, w: x.exp().flip(0) @ w, (256, 256), (256, 256), vendor=LIBRARY)
    assert program.plan.offset and not program.plan.borrowed


def test_a_result_lends_no_more_than_it_takes() -> None:
    """One whose elements share places is allocated as small as that."""
    program = compiled(widening, (64, 256), (256, 64), (64, 256), vendor=LIBRARY)
    (result,) = (b for b in program.lowered.buffers.values() if b.kind == "output")
    result.strides = (1, 0)
    assert result.span == 64 and not plan_memory(program.items, program.lowered).borrowed


def test_where_inputs_are_freed_results_are_allocated_late() -> None:
    """The native code of a program that owns inputs begins anew where they die, and results only there."""
    sizes = (64, 256), (256, 64), (64, 256)
    program = compiled(widening, *sizes, vendor=LIBRARY)
    assert program.plan.borrowed
    owned = frozenset(b.name for b in program.lowered.inputs[1:])  # type: ignore[union-attr]
    assert not plan_memory(program.items, program.lowered, owned).borrowed
