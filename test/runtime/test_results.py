"""Memory of large results that is kept for the next call, and never while anyone holds it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.dlpack import to_dlpack

import dicp
from dicp.compiler import observe
from dicp.config import Config
from dicp.dynamo_bridge import saved
from dicp.runtime.results import LARGE, RESULTS, Results

N = LARGE // 4


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    dicp.release_memory()
    yield
    dicp.release_memory()


def program() -> Callable[..., Any]:
    return lambda args: None


def take(pool: Results, of: Callable[..., Any], n: int = N) -> torch.Tensor:
    return pool.take(of, (n,), (1,), torch.float32)


def autograd(t: torch.Tensor) -> object:
    x = t.detach().requires_grad_()
    return (x * x).sum()


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.detach(),
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
        lambda t: memoryview(t.numpy()),
        to_dlpack,
        autograd,
    ],
    ids=["tensor", "view", "detached", "storage", "array", "memoryview", "dlpack", "autograd"],
)
def test_memory_is_taken_again_when_nobody_holds_it(hold: Callable[[torch.Tensor], object]) -> None:
    pool, of = Results(), program()
    first = take(pool, of)
    address = first.data_ptr()
    held = [hold(first)]
    del first
    assert take(pool, of).data_ptr() != address
    held.clear()
    assert take(pool, of).data_ptr() == address


def test_a_caller_that_holds_the_last_result_meets_two_blocks_in_turns() -> None:
    pool, of = Results(), program()
    seen, last = [], None
    for _ in range(6):
        last = take(pool, of)
        seen.append(last.data_ptr())
    assert seen[2:] == seen[:2] * 2 and seen[0] != seen[1]


def test_no_more_is_kept_than_callers_held_at_once() -> None:
    pool, of = Results(), program()
    first = [take(pool, of, n) for n in (N, 2 * N, 3 * N)]
    assert len({t.data_ptr() for t in first}) == 3
    first.clear()
    take(pool, of, 3 * N)  # was idle
    take(pool, of, 2 * N + 1)  # new: as much goes, longest unused first
    assert [b.nbytes // 4 for b in pool.blocks()] == [3 * N, 2 * N + 1]
    take(pool, of, 6 * N)
    assert [b.nbytes // 4 for b in pool.blocks()] == [6 * N]


def test_programs_take_what_others_dropped_if_it_is_of_their_dtype() -> None:
    pool, of, other = Results(), program(), program()
    address = take(pool, of).data_ptr()
    assert take(pool, other).data_ptr() == address
    ints = pool.take(other, (N,), (1,), torch.int32)
    assert ints.dtype == torch.int32 and len(list(pool.blocks())) == 1


def test_small_and_empty_results_are_torch_own() -> None:
    pool, of = Results(), program()
    for n in (N - 1, 0):
        assert take(pool, of, n).shape == (n,)
    assert pool.take(of, (0, 2 * N), (2 * N, 1), torch.float32).numel() == 0
    assert not list(pool.blocks())


@pytest.mark.parametrize(
    "change",
    [lambda t: t.untyped_storage().resize_(2 * LARGE), lambda t: t.share_memory_()],
    ids=["resized", "shared"],
)
def test_memory_that_was_exchanged_is_not_taken(change: Callable[[torch.Tensor], object]) -> None:
    pool, of = Results(), program()
    first = take(pool, of)
    change(first)
    (block,) = pool.blocks()
    del first
    assert block.idle() and not block.same()
    take(pool, of)
    assert block not in list(pool.blocks())


def test_a_result_of_inference_mode_does_not_become_one_of_training() -> None:
    pool, of = Results(), program()
    with torch.inference_mode():
        take(pool, of)
        take(pool, of)
    assert not take(pool, of).is_inference()


def test_another_size_frees_what_was_kept() -> None:
    pool, of = Results(), program()
    take(pool, of)
    other = take(pool, of, 2 * N)
    assert [b.nbytes for b in pool.blocks()] == [2 * LARGE]
    assert other.untyped_storage().nbytes() == 2 * LARGE


def test_what_is_idle_rests_and_is_whole_when_taken_again() -> None:
    pool, of = Results(), program()
    held = take(pool, of).fill_(3)
    address = take(pool, of).data_ptr()
    pool.rest()
    assert sorted(b.resting for b in pool.blocks()) == [False, True]
    again = take(pool, of).fill_(2)
    assert again.data_ptr() == address and bool((again == 2).all()) and bool((held == 3).all())
    assert not any(b.resting for b in pool.blocks())


def test_blocks_live_no_longer_than_their_program() -> None:
    pool, of = Results(), program()
    take(pool, of)
    assert list(pool.blocks())
    del of
    gc.collect()
    assert not list(pool.blocks())


def test_release_memory_gives_back_what_is_idle() -> None:
    f = torch.compile(lambda x: x + 1, backend="dicp_cpu")
    f(torch.ones(N))
    assert [b.nbytes for b in RESULTS.blocks()] == [LARGE]
    dicp.release_memory()
    assert not list(RESULTS.blocks())


def test_gradients_that_are_dropped_lie_where_they_lay() -> None:
    w = torch.randn(1024, 1024, requires_grad=True)
    f = torch.compile(lambda x, w: torch.tanh(x @ w).sum(), backend="dicp_cpu")
    seen = []
    for k in range(4):
        x = torch.full((8, 1024), 0.01 * (k + 1))
        w.grad = None
        f(x, w).backward()
        (expected,) = torch.autograd.grad(torch.tanh(x @ w).sum(), w)
        torch.testing.assert_close(w.grad, expected, rtol=1e-4, atol=1e-5)
        seen.append(w.grad.data_ptr())
    assert len(set(seen)) == 1
    f(x, w).backward()  # accumulates: the gradient that is held stays, another is made and added
    torch.testing.assert_close(w.grad, 2 * expected, rtol=1e-4, atol=1e-5)


def test_what_a_forward_saves_is_not_kept() -> None:
    texts: dict[str, str] = {}
    f = torch.compile(lambda x, w: torch.tanh(x @ w), backend="dicp_cpu")
    with observe(lambda c: texts.update({c.role: c.program.sources["call.py"]})):
        f(torch.randn(1024, 1024), torch.randn(1024, 1024, requires_grad=True)).sum().backward()
    assert "RESULTS.take" in texts["backward"] and "RESULTS.take" not in texts["forward"]
    assert "RESULTS.rest" in texts["forward"] and "RESULTS.rest" not in texts["backward"]


@pytest.mark.parametrize("keep", [True, False])
def test_the_option(keep: bool) -> None:
    f = torch.compile(lambda x: x * 2, backend="dicp_cpu", options={"keep_results": keep})
    x = torch.ones(N)
    assert torch.equal(f(x), 2 * x)
    assert bool(list(RESULTS.blocks())) == keep


def test_frozen_weights_are_not_kept_twice() -> None:
    linear = torch.nn.Linear(1024, 1024).requires_grad_(False).eval()
    f = torch.compile(lambda x: x @ (linear.weight * 2), backend="dicp_cpu", options={"freeze": True})
    with torch.no_grad():
        f(torch.ones(1, 1024))
    assert not list(RESULTS.blocks())


def test_a_saved_program_keeps_its_results() -> None:
    found: list[Any] = []
    with observe(found.append):
        torch.compile(lambda x: x.sin() + 1, backend="dicp_cpu")(torch.ones(N))
    dicp.release_memory()
    call = saved.load(found[0].program.save().to_bytes(), None, Config.make())
    assert len({call([torch.zeros(N)])[0].data_ptr() for _ in range(3)}) == 1
    assert [b.nbytes for b in RESULTS.blocks()] == [LARGE]


def test_sizes_that_vary_have_memory_of_their_own() -> None:
    f = torch.compile(lambda x: x * 2, backend="dicp_cpu", dynamic=True)
    for n in (N, 2 * N, 2 * N, 3, N + 1, N):
        x = torch.randn(n)
        y = f(x)
        assert torch.equal(y, 2 * x) and y.untyped_storage().nbytes() == 4 * n


def test_threads_never_share_a_result() -> None:
    f = torch.compile(lambda x: x * 2, backend="dicp_cpu")
    f(torch.ones(N))
    wrong = []

    def work(number: int) -> None:
        x = torch.full((N,), float(number))
        for _ in range(30):
            y = f(x)
            if not bool((y == 2.0 * number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
