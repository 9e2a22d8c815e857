"""The memory plan: nothing alive shares memory, nothing dead keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import Kernels, compiled

from dicp.ir import index as ix
from dicp.runtime.program import Program
from dicp.schedule.defs import Buffer
from dicp.schedule.lifetime import Lifetime, most_alive
from dicp.schedule.memory import ALIGN, touched
from dicp.schedule.placement import by_size, stacked
from dicp.vendor.base import Claim

LIBRARY = Kernels({"mm": Claim("mm", lambda writer, call: [], out=True)})

lifetimes = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=25
)


def lives_of(drawn: list[tuple[int, int, int]]) -> list[Lifetime]:
    return [Lifetime(f"b{k}", n * ALIGN, start, start + length) for k, (n, start, length) in enumerate(drawn)]


def check_apart(lives: list[Lifetime], offset: dict[str, int], nbytes: dict[str, int]) -> None:
    for a in lives:
        for b in lives:
            if a is not b and a.overlaps(b) and nbytes[a.name] and nbytes[b.name]:
                lo, hi = offset[a.name], offset[a.name] + nbytes[a.name]
                assert hi <= offset[b.name] or offset[b.name] + nbytes[b.name] <= lo


@settings(max_examples=300, deadline=None)
@given(lifetimes)
def test_live_buffers_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    lives = lives_of(drawn)
    nbytes = {x.name: x.nbytes for x in lives}
    placed = by_size(lives)
    stack = stacked(placed, nbytes)
    assert stack.offset == {p.life.name: p.offset for p in placed} and not stack.maxima
    check_apart(lives, stack.offset, nbytes)
    assert all(at % ALIGN == 0 and at + nbytes[n] <= stack.size for n, at in stack.offset.items())
    alive = [sum(x.nbytes for x in lives if x.start <= k <= x.end) for k in range(20)]
    assert most_alive(lives) == max(alive) <= stack.size <= sum(nbytes.values())


@settings(max_examples=300, deadline=None)
@given(lifetimes, st.lists(st.sampled_from("mnk"), min_size=25, max_size=25), st.data())
def test_a_plan_at_one_size_holds_at_all_others(
    drawn: list[tuple[int, int, int]], symbols: list[str], data: Any
) -> None:
    """Buffers of n, m and k rows, planned where each is 1, at sizes that make other ones the largest."""
    lives = lives_of(drawn)
    nbytes = {x.name: x.nbytes * ix.of(ix.Var(s, None, 0)) for x, s in zip(lives, symbols, strict=False)}
    stack = stacked(by_size(lives), nbytes)

    def at(values: dict[str, int]) -> tuple[dict[str, int], int]:
        for symbol, ends in stack.maxima.items():
            values[symbol.name] = max(ix.evaluate(n, lambda a: values[a.key]) for n in ends)
        env = lambda a: values[a.key]  # noqa: E731
        return {n: ix.evaluate(o, env) for n, o in stack.offset.items()}, ix.evaluate(stack.size, env)

    placed = by_size(lives)
    assert at(dict.fromkeys("mnk", 1))[0] == {p.life.name: p.offset for p in placed}
    values = {s: data.draw(st.integers(0, 9)) for s in "mnk"}
    offset, size = at(dict(values))
    real = {n: ix.evaluate(b, lambda a: values[a.key]) for n, b in nbytes.items()}
    check_apart(lives, offset, real)
    assert all(offset[n] + real[n] <= size for n in real)


def test_of_ends_that_can_be_compared_no_maximum_is_taken() -> None:
    n = ix.of(ix.Var("n", None, 2))
    lives = [Lifetime("a", 256, 0, 1), Lifetime("b", 128, 2, 3), Lifetime("c", 64, 1, 2)]
    stack = stacked(by_size(lives), {"a": 128 * n, "b": 64 * n, "c": 32 * n})
    assert stack.offset == {"a": 0, "b": 0, "c": 128 * n}
    assert stack.size == 160 * n and not stack.maxima
    stack = stacked(by_size(lives), {"a": 128 * n, "b": 64 * ix.of(ix.Var("m", None, 2)), "c": 32 * n})
    assert str(stack.offset["c"]) == "at0" and str(stack.size) == "at0 + 32*n"


def check_plan(p: Program) -> None:
    """Replay the steps: what a step reads is what was written there last under the same name."""
    holder: dict[int, str] = {}
    size = p.plan.size
    for item in p.items:
        reads, writes = touched(item)
        for b in reads:
            spot = place(p, b)
            if spot is not None and b.kind in ("temp", "alias"):
                assert holder.get(spot) == b.name, f"{b.name} was overwritten by {holder.get(spot)}"
        for b in writes:
            spot = place(p, b)
            if spot is None:
                continue
            assert spot % ALIGN == 0 and spot + b.nbytes <= size
            span = (spot, spot + b.nbytes)
            for other, name in list(holder.items()):
                if other < span[1] and span[0] < other + p.lowered.buffers[name].nbytes:
                    del holder[other]
            holder[spot] = b.name


def place(p: Program, b: Any) -> int | None:
    return p.plan.offset.get(p.plan.find(b.name))


MODELS = {
    "mlp": (lambda x, w: ((x @ w).relu() @ w).softmax(1) @ w, (8, 8), (8, 8)),
    "chain": (lambda x, w: (((x.exp() @ w).sin() @ w).cos() @ w).tanh(), (8, 8), (8, 8)),
    "branches": (
        lambda x, w: ((a := x.exp() @ w).relu() @ w) + (a.sin() @ w) * (x @ w).sum(1, keepdim=True),
        (8, 8),
        (8, 8),
    ),
    "norms": (lambda x, w: F.layer_norm(F.layer_norm(x @ w, (8,)) @ w + x, (8,)) @ w, (8, 8), (8, 8)),
    "scatters": (
        lambda x, i, y: x.index_add(0, i, y).index_add(0, i, y * 2).exp().flip(0).cumsum(0),
        (9, 4),
        torch.tensor([1, 1, 2]),
        (3, 4),
    ),
}


def test_no_step_reads_memory_that_another_has_taken() -> None:
    for fn, *inputs in MODELS.values():
        check_plan(compiled(fn, *inputs, vendor=LIBRARY))


def test_checker_finds_a_bad_plan() -> None:
    fn, *inputs = MODELS["branches"]
    p = compiled(fn, *inputs, vendor=LIBRARY)
    p.plan.offset = dict.fromkeys(p.plan.offset, 0)
    with pytest.raises(AssertionError, match="was overwritten by"):
        check_plan(p)


def test_a_chain_of_equal_sizes_needs_two_buffers() -> None:
    p = compiled(*MODELS["chain"], vendor=LIBRARY)
    assert p.plan.size == p.plan.lower_bound == 2 * 8 * 8 * 4


def test_result_takes_over_the_memory_of_a_dying_operand() -> None:
    p = compiled(lambda x, w: (x @ w).relu() @ w, (8, 8), (8, 8), vendor=LIBRARY)
    first, second = p.library_calls
    assert p.plan.find(second.args[0].buffer.name) == first.outputs[0].name


ALLOCATING = Kernels({"mm": Claim("mm", lambda writer, call: [])})


def test_a_librarys_memory_is_taken_over_where_the_arena_would_grow() -> None:
    p = compiled(lambda x, w: (x @ w).relu() @ w, (8, 8), (8, 8), vendor=ALLOCATING)
    first, second = p.library_calls
    assert p.plan.find(second.args[0].buffer.name) == first.outputs[0].name
    assert p.plan.size == 0


def test_a_librarys_memory_is_left_where_the_arena_has_room() -> None:
    p = compiled(lambda x, w: (x.exp() @ w).relu() @ w, (8, 8), (8, 8), vendor=ALLOCATING)
    check_plan(p)
    first, second = p.library_calls
    operand = second.args[0].buffer.name
    assert p.plan.find(operand) == operand and p.plan.size == 8 * 8 * 4
    relu = next(k for k, i in enumerate(p.items) if operand in {b.name for b in touched(i)[1]})
    assert p.plan.last_use[first.outputs[0].name] == relu, "the library's buffer is freed after its last reader"


def test_a_librarys_tensor_keeps_its_dtype() -> None:
    """What takes over its memory is handed on as that tensor."""
    p = compiled(lambda x, w: (x @ w).int() @ w.int(), (8, 8), (8, 8), vendor=ALLOCATING)
    assert all(p.lowered.buffers[a].dtype == p.lowered.buffers[b].dtype for a, b in p.plan.root.items())


def test_operand_that_is_read_later_keeps_its_memory() -> None:
    p = compiled(lambda x, w: ((a := x @ w).exp() @ w) + a, (8, 8), (8, 8), vendor=LIBRARY)
    assert not p.plan.root


def test_operand_read_elsewhere_than_written_keeps_its_memory() -> None:
    p = compiled(lambda x, w: (x @ w).flip(0).exp() @ w, (8, 8), (8, 8), vendor=LIBRARY)
    assert not p.plan.root


def test_operand_of_another_width_keeps_its_memory() -> None:
    p = compiled(lambda x, w: (x @ w).double().cumsum(0).float() @ w, (8, 8), (8, 8), vendor=LIBRARY)
    check_plan(p)
    assert all(
        p.lowered.buffers[a].dtype.itemsize == p.lowered.buffers[b].dtype.itemsize
        for a, b in p.plan.root.items()
    )


def _adding(out: bool) -> Kernels:
    """Claims products, and sums with products that can be written over what is added."""
    claims = {
        "mm": Claim("mm", lambda writer, call: [], out=out),
        "addmm": Claim("addmm", lambda writer, call: [], out=out, over=0),
    }
    return Kernels(claims)


@pytest.mark.parametrize("out", [True, False])
def test_a_call_writes_over_an_operand_that_dies(out: bool) -> None:
    p = compiled(lambda x, w: torch.addmm(x @ w, x, w) @ w, (8, 8), (8, 8), vendor=_adding(out))
    check_plan(p)
    first, second, _ = p.library_calls
    assert p.plan.find(second.outputs[0].name) == first.outputs[0].name
    freed = [name for step in p.steps for names in step.frees.values() for name in names]
    assert freed == ([] if out else [first.outputs[0].name]), "once, after its last reader"


@pytest.mark.parametrize("out", [True, False])
def test_a_call_writes_elsewhere_than_what_is_still_needed(out: bool) -> None:
    others = {
        "read later": lambda x, w: (torch.addmm(a := x @ w, x, w) @ w) + a,
        "read in another way": lambda x, w: torch.addmm(a := x @ w, a, w) @ w,
        "an input": lambda x, w: torch.addmm(x, x.exp(), w) @ w,
        "in another order": lambda x, w: torch.addmm((x @ w).t(), x, w) @ w,
        "a part": lambda x, w: torch.addmm((x @ torch.cat([w, w], 1))[:, :8], x, w) @ w,
        "what the caller gets": lambda x, w: torch.addmm(x @ w, x, w),
    }
    for name, fn in others.items():
        p = compiled(fn, (8, 8), (8, 8), vendor=_adding(out))
        check_plan(p)
        call = next(c for c in p.library_calls if c.claim.name == "addmm")
        assert p.plan.find(call.outputs[0].name) == call.outputs[0].name, name


def test_results_and_inputs_are_outside_the_arena() -> None:
    p = compiled(*MODELS["mlp"], vendor=LIBRARY)
    kinds = {p.lowered.buffers[n].kind for n in p.plan.offset}
    assert kinds == {"temp"}
    returned = {o.buffer.name for o in p.lowered.outputs}
    assert not returned & set(p.plan.offset)


def test_symbolic_sizes_are_planned_with_symbols() -> None:
    p = compiled(*MODELS["chain"], vendor=LIBRARY, dynamic=True)
    assert p.plan.offset and isinstance(p.plan.size, ix.Poly)
    at = {a.key: 8 for a in ix.atoms(p.plan.size)}
    assert ix.evaluate(p.plan.size, lambda a: at[a.key]) == 2 * 8 * 8 * 4


def test_scatter_result_lives_in_its_base() -> None:
    p = compiled(*MODELS["scatters"])
    assert set(p.plan.root) >= {d.outputs[0].name for d in p.lowered.defs if type(d).__name__ == "Scatter"}


def test_nothing_to_plan() -> None:
    p = compiled(lambda x: x + 1, (4,))
    assert p.plan.size == 0 and not p.plan.offset


def test_memory_of_rows_that_lie_apart_has_the_gaps() -> None:
    assert Buffer("b", (4, 3), torch.float32, (8, 1)).nbytes == (3 * 8 + 3) * 4
    assert Buffer("b", (4, 3), torch.float32, (0, 1)).nbytes == 4 * 3 * 4
