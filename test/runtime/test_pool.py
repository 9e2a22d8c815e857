"""Memory of large tensors that is kept for the next call, and never while anyone holds it."""

from __future__ import annotations

import array
import ctypes
import gc
import io
import mmap
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.dlpack import to_dlpack

import dicp
from dicp.compiler import observe
from dicp.config import Config
from dicp.dynamo_bridge import saved
from dicp.runtime import spans
from dicp.runtime.malloc import Idle
from dicp.runtime.pool import LARGE, PIECE, POOL, Pool
from dicp.runtime.spans import Span

PAGE = mmap.PAGESIZE
N = LARGE // 4
LIMIT = 64 * LARGE


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """Collections walk through what these tests make alone, not through all that others loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    dicp.release_memory()
    yield
    dicp.release_memory()


def program() -> Callable[..., Any]:
    return lambda args: None


def take(pool: Pool, of: Callable[..., Any], n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.empty(of, (n,), (1,), dtype)


def resident(pool: Pool) -> int:
    """Bytes of the pages that the pool has."""
    assert pool._pages is not None
    first = ctypes.addressof(ctypes.c_char.from_buffer(pool._pages)) // PAGE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = array.array("Q", file.read(8 * (len(pool._pages) // PAGE)))
    return sum(e >> 63 for e in entries) * PAGE


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
    pool, of = Pool(LIMIT), program()
    first = take(pool, of)
    address = first.data_ptr()
    held = [hold(first)]
    del first
    assert take(pool, of).data_ptr() != address
    held.clear()
    assert take(pool, of).data_ptr() == address


def test_a_caller_that_holds_the_last_result_meets_two_places_in_turns() -> None:
    pool, of = Pool(LIMIT), program()
    seen, last = [], None
    for _ in range(6):
        last = take(pool, of)
        seen.append(last.data_ptr())
    assert seen[2:] == seen[:2] * 2 and seen[0] != seen[1]


def test_a_tensor_has_a_storage_of_its_own_size() -> None:
    pool, of = Pool(LIMIT), program()
    a, b = take(pool, of).fill_(1), pool.empty(of, (3, N), (1, 3), torch.bfloat16).fill_(2)
    assert a.untyped_storage().nbytes() == 4 * N and b.untyped_storage().nbytes() == 6 * N
    assert bool((a == 1).all()) and b.stride() == (1, 3)
    torch.save(a, file := io.BytesIO())
    assert 4 * N <= len(file.getvalue()) < 4 * N + 4096
    assert a.share_memory_().is_shared() and bool((a == 1).all())
    assert b.resize_(5).numel() == 5
    for resize in (lambda: b.resize_(4 * N), lambda: b.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.complex64])
def test_another_size_and_dtype_lies_where_others_lay(dtype: torch.dtype) -> None:
    pool, of, other = Pool(LIMIT), program(), program()
    address = take(pool, of, 2 * N).data_ptr()
    n = LARGE // dtype.itemsize
    first, second = take(pool, other, n, dtype), take(pool, of, n, dtype)
    assert first.dtype == dtype
    assert [first.data_ptr(), second.data_ptr()] == [address, address + LARGE]
    assert pool.nbytes() == (2 * LARGE, 0)


def test_no_more_is_kept_than_was_held_at_once_and_an_eighth() -> None:
    pool, of = Pool(LIMIT), program()
    held = [take(pool, of, 4 * N).fill_(1) for _ in range(4)]
    del held[0], held[1]  # the first and the third of the four
    between = take(pool, of, 6 * N).fill_(1)  # no hole is as large
    assert pool.nbytes() == (14 * LARGE, 4 * LARGE)
    assert resident(pool) == 18 * LARGE
    more = take(pool, of, 6 * N)
    assert pool.nbytes() == (20 * LARGE, 20 * LARGE // 8)
    del held, between, more
    assert pool.nbytes() == (0, 20 * LARGE + 20 * LARGE // 8)


def test_what_is_idle_elsewhere_goes_back_before_cold_pages_are_taken() -> None:
    asked: list[tuple[int, int]] = []

    class Recorded(Idle):
        def give_back(self, nbytes: int) -> bool:
            asked.append((nbytes, resident(pool)))
            return True

    pool, of = Pool(LIMIT, Recorded()), program()
    take(pool, of).fill_(1)
    take(pool, of).fill_(1)
    held = take(pool, of, 2 * N).fill_(1)
    assert asked == [(LARGE, 0), (2 * LARGE, LARGE)] and bool((held == 1).all())


def test_not_while_little_is_held() -> None:
    """There is no peak then, and malloc would have its own pages anew at each step."""
    asked: list[int] = []

    class Recorded(Idle):
        def give_back(self, nbytes: int) -> bool:
            asked.append(nbytes)
            return True

    pool, of = Pool(LIMIT, Recorded()), program()
    held = [take(pool, of, 16 * N).fill_(1)]
    assert asked == [16 * LARGE]
    held.clear()
    for n in (3, 12, 4):  # between the first two no hole is left for the third
        held.append(take(pool, of, n * N).fill_(1))
    held = held[:1]
    assert asked[1:] == [4 * LARGE]
    pool._cool(pool.nbytes()[1])
    held.append(take(pool, of, 5 * N))
    assert asked[1:] == [4 * LARGE], "8 of 19 MB are held"
    held.append(take(pool, of, 5 * N))
    assert asked[1:] == [4 * LARGE, 5 * LARGE], "13 of them"


def test_small_and_empty_tensors_are_torch_own() -> None:
    pool, of = Pool(LIMIT), program()
    assert take(pool, of, PIECE // 4 - 1).resize_(N).numel() == N
    assert pool.empty(of, (0, 2 * N), (2 * N, 1), torch.float32).numel() == 0
    assert pool.nbytes() == (0, 0)


def test_so_are_those_that_the_machine_has_no_memory_for() -> None:
    pool, of = Pool(2 * LARGE), program()
    held = take(pool, of)
    other = take(pool, of, 2 * N).fill_(1)
    assert pool.nbytes() == (LARGE, 0)
    del held, other
    assert Pool(0).empty(of, (N,), (1,), torch.float32).resize_(2 * N).numel() == 2 * N


@pytest.mark.skipif(sys.platform != "linux", reason="what a limit of addresses counts differs")
def test_a_limit_of_addresses_leaves_the_rest_to_others() -> None:
    code = (
        "import resource, torch; from dicp.runtime.pool import Pool\n"
        "resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))\n"
        "pool = Pool(); t = pool.empty(print, (1 << 20,), (1,), torch.float32)\n"
        "print(pool._limit, pool.nbytes()[0], torch.empty(3 << 30, dtype=torch.uint8).numel())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(1 << 30), str(4 << 20), str(3 << 30)]


def test_a_result_of_inference_mode_does_not_become_one_of_training() -> None:
    pool, of = Pool(LIMIT), program()
    with torch.inference_mode():
        assert take(pool, of).is_inference()
    assert not take(pool, of).is_inference()


def test_memory_stays_no_longer_than_its_program() -> None:
    pool, of = Pool(LIMIT), program()
    take(pool, of).fill_(1)
    held = take(pool, of).fill_(1)
    assert pool.nbytes() == (LARGE, 0)
    take(pool, of).fill_(1)
    assert pool.nbytes() == (LARGE, LARGE)
    del of
    gc.collect()
    assert pool.nbytes() == (LARGE, 0) and resident(pool) == LARGE
    del held
    assert pool.nbytes() == (0, 0) and resident(pool) == 0


def test_pages_that_are_given_back_are_gone() -> None:
    pool, of = Pool(LIMIT), program()
    low, high = take(pool, of, 4 * N).fill_(1), take(pool, of, 8 * N).fill_(2)
    del high
    assert resident(pool) == 12 * LARGE
    pool.clear()
    assert resident(pool) == 4 * LARGE and bool((low == 1).all())
    assert bool((take(pool, of, 8 * N) == 0).all())


def test_release_memory_gives_back_what_is_idle() -> None:
    f = torch.compile(lambda x: x + 1, backend="dicp_cpu")
    f(torch.ones(N))
    assert POOL.nbytes() == (0, LARGE)
    dicp.release_memory()
    assert POOL.nbytes() == (0, 0)


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


@pytest.mark.parametrize("size, how, keeps", [(64, {}, True), (8, {}, False), (64, {"keep_results": False}, False)])
def test_malloc_keeps_what_libraries_allocate(size: int, how: dict[str, Any], keeps: bool) -> None:
    """Of 1 MB and more, which dies within each call."""
    texts: dict[str, str] = {}
    f = torch.compile(lambda x: torch.fft.fft2(x).real + 1, backend="dicp_cpu", options=how)
    with observe(lambda c: texts.update({c.role: c.program.sources["call.py"]})):
        f(torch.randn(64, size, size))
    assert ("keep_more()" in texts["inference"]) is keeps


def test_what_a_forward_saves_lies_there_and_gradients_where_that_lay() -> None:
    texts: dict[str, str] = {}
    f = torch.compile(lambda x, w, v: torch.tanh(x @ w) @ v, backend="dicp_cpu")
    x, w, v = torch.randn(2048, 512), torch.randn(512, 512), torch.randn(512, 4)
    w.requires_grad_()
    with observe(lambda c: texts.update({c.role: c.program.sources["call.py"]})):
        y = f(x, w, v)  # small: what lies in the pool is saved
        (kept,) = POOL._held.values()
        assert kept.end - kept.start == 4 * 2048 * 512
        y.sum().backward()
    assert "POOL.empty" in texts["backward"] and "POOL.empty" in texts["forward"]
    assert "keep_more()" in texts["forward"]  # and in the backward, where a library allocates the gradient
    (gradient,) = POOL._held.values()
    assert kept.start <= gradient.start < gradient.end <= kept.end
    x, wide, v = x.double(), w.detach().double().requires_grad_(), v.double()
    expected = torch.autograd.grad((torch.tanh(x @ wide) @ v).sum(), wide)[0]
    assert (w.grad - expected).norm() < 1e-5 * expected.norm()


def test_what_the_caller_sees_lies_there_if_it_is_larger() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x @ w)
        return y * y, torch.tanh(y @ w)  # y is saved, and the second result

    f = torch.compile(fn, backend="dicp_cpu")
    small = torch.randn(1024, 128)
    first = f(small, torch.randn(128, 128, requires_grad=True))
    pieces = [held.end - held.start for held in POOL._held.values()]
    assert pieces == [small.nbytes] and PIECE < small.nbytes < LARGE
    large = torch.randn(4096, 128)
    second = f(large, torch.randn(128, 128, requires_grad=True))
    pieces = [held.end - held.start for held in POOL._held.values()]
    assert pieces == [small.nbytes] + 3 * [large.nbytes] and first[0].shape != second[0].shape


def test_a_graph_that_is_kept_keeps_what_it_saved() -> None:
    f = torch.compile(lambda x, w: torch.tanh(x @ w), backend="dicp_cpu")
    x, w = torch.randn(1024, 512), torch.randn(512, 512, requires_grad=True)
    loss = f(x, w).sum()
    f(2 * x, w).sum().backward()
    first = torch.autograd.grad(loss, w, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)
    x, wide = x.double(), w.detach().double().requires_grad_()
    expected = torch.autograd.grad(torch.tanh(x @ wide).sum(), wide)[0]
    assert (first - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("keep", [True, False])
def test_the_option(keep: bool) -> None:
    f = torch.compile(lambda x: x * 2, backend="dicp_cpu", options={"keep_results": keep})
    x = torch.ones(N, requires_grad=True)
    for given in (x, x.detach()):
        y = f(given)
        assert torch.equal(y, 2 * x) and bool(POOL.nbytes()[0]) == keep


def test_frozen_weights_are_not_kept_twice() -> None:
    linear = torch.nn.Linear(1024, 1024).requires_grad_(False).eval()
    f = torch.compile(lambda x: x @ (linear.weight * 2), backend="dicp_cpu", options={"freeze": True})
    with torch.no_grad():
        f(torch.ones(1, 1024))
    assert POOL.nbytes() == (0, 0)


def test_a_saved_program_keeps_its_results() -> None:
    found: list[Any] = []
    with observe(found.append):
        torch.compile(lambda x: x.sin() + 1, backend="dicp_cpu")(torch.ones(N))
    dicp.release_memory()
    call = saved.load(found[0].program.save().to_bytes(), None, Config.make())
    assert len({call([torch.zeros(N)])[0].data_ptr() for _ in range(3)}) == 1
    assert POOL.nbytes() == (0, LARGE)


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


def test_what_comes_back_while_memory_is_taken_confuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any object that is made may begin a collection of garbage, which may end programs and call others."""
    pool, of, live = Pool(256 * PIECE), program(), list[torch.Tensor]()
    choose, returns = random.Random(0), 0

    def piece() -> torch.Tensor:
        return take(pool, of, choose.randint(PIECE, 4 * PIECE), torch.uint8)

    def span(start: int, end: int, warm: bool) -> Span:
        nonlocal returns
        if choose.random() < 0.1:
            returns += 1
            live.append(piece())
            pool.nbytes()
            if choose.random() < 0.2:
                pool.clear()
        return Span(start, end, warm)

    monkeypatch.setattr(spans, "Span", span)
    for _ in range(1000):
        while len(live) > 30 or live and choose.random() < 0.5:
            live.pop(choose.randrange(len(live)))
        live.append(piece())
        pieces = sorted((held.start, held.end) for held in pool._held.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(pieces))
    pool.clear()
    assert returns > 100 and pool.nbytes() == (sum(h.end - h.start for h in pool._held.values()), 0)
    live.clear()
    assert pool.nbytes() == (0, 0) and resident(pool) == 0


def test_what_is_to_be_cleared_meanwhile_is_cleared_after() -> None:
    pool, of = Pool(LIMIT), program()
    take(pool, of).fill_(1)
    with pool._guard:
        pool.clear()
        assert resident(pool) == LARGE
    assert resident(pool) == 0


def test_a_child_finds_the_pool_whole_when_another_thread_used_it() -> None:
    code = (
        "import os, signal, threading, time; from dicp.runtime.pool import POOL\n"
        "def use():\n"
        "    with POOL._guard: ready.set(); time.sleep(0.3)\n"
        "ready = threading.Event(); threading.Thread(target=use).start(); ready.wait()\n"
        "if os.fork() == 0: signal.alarm(5); os._exit(len(POOL.nbytes()))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), POOL.nbytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 (0, 0)"
