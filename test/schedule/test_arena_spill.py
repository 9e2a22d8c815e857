"""Temporaries that leave the arena: when, which, and that programs which allocate them are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dicp.compiler
from dicp.ir import index as ix
from dicp.runtime.program import RELEASE_BYTES, Segment
from dicp.schedule.arena_spill import SMALLEST, spilled
from dicp.schedule.lifetime import Lifetime
from dicp.vendor.cpu_graph.claims import gemv, matmul

MB = 1 << 20


def test_what_is_dead_at_the_peak_leaves() -> None:
    early = [Lifetime("wide", 4 * MB, 0, 1), Lifetime("narrow", SMALLEST - 64, 0, 5)]
    late = [Lifetime("logits", 16 * MB, 5, 6)]
    assert spilled(early, late, 6, arena=4 * MB + SMALLEST) == {"wide"}


def test_what_is_alive_at_the_peak_stays() -> None:
    lives = [Lifetime("a", 4 * MB, 0, 5), Lifetime("b", 4 * MB, 4, 5)]
    assert not spilled(lives, [Lifetime("logits", 16 * MB, 5, 6)], 6, arena=8 * MB)


def test_little_gain_moves_nothing() -> None:
    assert not spilled([Lifetime("a", MB, 0, 1)], [Lifetime("all", 100 * MB, 0, 6)], 6, arena=MB)


def test_what_must_stay_leaves_room_for_others() -> None:
    """The arena is as large as the workspace of a call anyhow, so what fits beside it at another time stays."""
    early, space = [Lifetime("wide", 4 * MB, 0, 1)], [Lifetime("space", 4 * MB, 2, 2)]
    late = [Lifetime("logits", 16 * MB, 5, 6)]
    assert not spilled(early, late, 6, arena=4 * MB, staying=space)
    assert spilled([*early, *space], late, 6, arena=4 * MB) == {"wide", "space"}


def test_memory_of_another_allocator_is_no_peak_to_make_room_for() -> None:
    early, late = [Lifetime("wide", 4 * MB, 0, 1)], [Lifetime("logits", 16 * MB, 5, 6)]
    assert not spilled(early, [], 6, arena=4 * MB, apart=late)
    assert spilled(early, late, 6, arena=4 * MB, apart=late) == {"wide"}


lifetimes = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=15
)


@settings(max_examples=100, deadline=None)
@given(lifetimes, lifetimes)
def test_the_peak_never_grows(mine: Any, theirs: Any) -> None:
    own = [Lifetime(f"t{k}", n * SMALLEST // 4, a, a + b) for k, (n, a, b) in enumerate(mine)]
    others = [Lifetime(f"o{k}", n * SMALLEST, a, a + b) for k, (n, a, b) in enumerate(theirs)]

    def alive(lives: Any, k: int) -> int:
        return sum(x.nbytes for x in lives if x.start <= k <= x.end)

    steps = range(20)
    arena = max(alive(own, k) for k in steps)
    gone = spilled(own, others, len(steps), arena)
    stay = max(alive([x for x in own if x.name not in gone], k) for k in steps)
    outside = [x for x in own if x.name in gone] + others
    assert stay + max(alive(outside, k) for k in steps) <= arena + max(alive(others, k) for k in steps)
    assert all(x.nbytes >= SMALLEST for x in own if x.name in gone)


@pytest.fixture
def allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by oneDNN, which allocates its results, from the memory that programs free."""
    monkeypatch.setenv("DICP_KEEP_RESULTS", "0")
    monkeypatch.setattr(matmul, "prefers_tiles", lambda node: False)
    monkeypatch.setattr(matmul, "prefers_onednn", lambda node: True)
    monkeypatch.setattr(gemv, "are_few", lambda *_, **__: False)


def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (x.softmax(1) @ w).sin() @ v


SIZES = (64, 4096), (4096, 64), (64, 16384)


def run(fn: Any, *inputs: torch.Tensor, backend: str = "dicp_cpu", dynamic: bool = False) -> Any:
    """The one program that a backend makes of fn, whose results are compared with fn's, dynamic ones also at
    halves of the sizes."""
    seen: list[dicp.compiler.Compiled] = []
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    halves = [t[tuple(slice(n // 2) for n in t.shape)].contiguous() for t in inputs]
    with torch.no_grad(), dicp.compiler.observe(seen.append):
        for given in (inputs, halves if dynamic else inputs):
            torch.testing.assert_close(compiled(*given), fn(*given), rtol=1e-4, atol=1e-4)
    assert len(seen) == 1
    return seen[0].program


def test_they_are_there_for_a_segment(allocating: None) -> None:
    program = run(model, torch.randn(64, 2048), torch.randn(2048, 64), torch.randn(64, 16384))
    ((name, first),) = program.plan.spilled.items()
    (segment,) = program.steps
    assert program.lowered.buffers[name].nbytes == MB // 2 and name not in program.plan.offset
    assert segment.allocs == {first: [name]} and name in segment.frees[program.plan.last_use[name]]
    assert f"{name} = empty_strided((64, 2048, )" in program.sources["call.py"]
    assert program.plan.size < MB // 4


def test_pages_of_the_pool_are_no_library_s(allocating: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library allocates later lies elsewhere, so the arena costs no more."""
    monkeypatch.delenv("DICP_KEEP_RESULTS")
    program = run(model, torch.randn(64, 2048), torch.randn(2048, 64), torch.randn(64, 16384))
    assert not program.plan.spilled and MB // 2 <= program.plan.size < MB


def test_a_result_takes_their_pages_in_the_pool() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return double(x.softmax(1) @ w)[:, :, None] * v

    program = run(fn, torch.randn(64, 2048), torch.randn(2048, 64), torch.randn(256))
    ((name, _),) = program.plan.spilled.items()
    text = program.sources["call.py"]
    assert program.lowered.buffers[name].nbytes == MB // 2
    assert text.index(f"{name} = POOL.empty(call, (64, 2048, )") < text.index(f"del {name}")
    assert text.index(f"del {name}") < text.index(" = POOL.empty(call, (64, 64, 256, )")


def test_a_segment_ends_where_a_large_one_begins_or_dies(allocating: None) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x + x.mean()).softmax(1) @ w).sin() @ v

    program = run(fn, torch.randn(256, 4096), torch.randn(4096, 64), torch.randn(64, 16384))
    text = program.sources["call.py"]
    (name,) = program.plan.spilled
    assert program.lowered.buffers[name].nbytes == 4 * MB
    order = "code = native0", f"{name} = empty_strided(", "code = native1", f"del {name}", "code = native2"
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_a_segment_does_not_wait_for_several_that_come(allocating: None) -> None:
    """Each of them alone is less than a segment ends for."""

    def fn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.softmax(1) @ w
        return (x @ u).sin() @ v

    program = run(fn, *(torch.randn(s) for s in ((256, 1280), (1280, 1280), (1280, 64), (64, 16384))))
    segments = [step for step in program.steps if isinstance(step, Segment)]
    early = [[n for at in s.allocs if at for n in s.allocs[at]] for s in segments]
    held = [sum(program.lowered.buffers[name].nbytes for name in names) for names in early]
    assert MB < max(held) < RELEASE_BYTES and len(program.plan.spilled) == 4


@torch.library.custom_op("dicp_test::heap_double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)


def with_an_extern(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    wide = x.softmax(1)
    return (double(wide @ w) + wide @ (w + 1)).sin() @ v


def test_python_holds_them_between_segments(allocating: None) -> None:
    program = run(with_an_extern, *(torch.randn(s) for s in SIZES))
    (name,) = (n for n in program.plan.spilled if program.lowered.buffers[n].shape == (64, 4096))
    first, *_ = (s for s in program.steps if isinstance(s, Segment))
    assert name in first.allocs[program.plan.spilled[name]]
    assert f"{name}.data_ptr()" in program.sources["call.py"].split("code = native1")[1]


def test_another_vendor_allocates_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    program = run(
        lambda x, w, v: double(x.softmax(1) @ w) @ v, *(torch.randn(s) for s in SIZES), backend="dicp_cuda"
    )
    text = program.sources["call.py"]
    for name in program.plan.spilled:
        assert text.count(f"{name} = empty_strided") == 1
        assert text.index(f"{name} = empty_strided") < text.index(f"del {name}")
    assert program.plan.spilled


def test_symbolic_sizes_leave_as_they_do_in_the_example(allocating: None) -> None:
    program = run(model, *(torch.randn(s) for s in SIZES), dynamic=True)
    (name,) = program.plan.spilled
    assert isinstance(program.lowered.buffers[name].nbytes, ix.Poly) and name not in program.plan.offset
