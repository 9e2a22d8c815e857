"""Measuring a call: its time, beside others' in alternating rounds, and its peak memory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import dicp
from dicp.runtime import malloc

Thunk = Callable[[], object]


def alternating(
    calls: Sequence[Thunk], rounds: int = 7, min_ms: float = 20.0, wait: Callable[[], None] = lambda: None
) -> list[float]:
    """Median milliseconds of each call, taking turns."""
    return [statistics.median(seen) for seen in turns(calls, rounds, min_ms, wait)]


def turns(
    calls: Sequence[Thunk], rounds: int = 7, min_ms: float = 20.0, wait: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Milliseconds of each call, of each round. Every round runs each of them once, so that whatever else the
    machine does falls on all alike; a call shorter than `min_ms` is repeated within its turn until the turn
    lasts that long. `wait`: until what a call has begun is done; a turn ends with it."""
    repeats = []
    for call in calls:
        call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        ms = (time.perf_counter() - start) * 1e3
        repeats.append(max(1, min(1000, round(min_ms / max(ms, 1e-3)))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, repeat, seen in zip(calls, repeats, times):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            wait()
            seen.append((time.perf_counter() - start) * 1e3 / repeat)
    return times


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While this process has the file, whose name with ".waiting" behind it gets a line from each that waits;
    None: at once."""
    if lock is None:
        yield
        return
    with open(lock + ".waiting", "a") as waiting:
        waiting.write(f"{os.getpid()}\n")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seconds(call: Thunk) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no field {field}")


def _release_kept() -> None:
    """Give back what is kept between calls only to be used again, so that the next call is seen to take
    it."""
    dicp.release_memory()
    gc.collect()
    malloc.trim()


def peaks(
    calls: Sequence[Thunk], rounds: int = 5, growth: Callable[[Thunk], int | None] | None = None
) -> list[int | None]:
    """Median `peak_growth` (or `growth`) of each call over alternating rounds: what an allocator has lying
    about, and in which pieces, differs from one call to the next."""
    growth = growth or peak_growth
    seen: list[list[int]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, seen, strict=True):
            peak = growth(call)
            if peak is not None:
                found.append(peak)
    return [int(statistics.median(found)) if found else None for found in seen]


def peak_growth_on_gpu(call: Thunk) -> int:
    """Bytes by which what torch's allocator has given out on the GPU peaks above the call's start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def peak_growth(call: Thunk) -> int | None:
    """Bytes by which the process's resident memory peaks above its start during the call, its results
    included.

    Linux: what malloc and dicp's pool of workspaces keep for reuse is given back first, the peak (VmHWM) is
    reset through /proc/self/clear_refs, and read again after the call. None where the system offers no such
    thing."""
    try:
        _release_kept()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        kept = call()
        peak = status("VmHWM")
    except (OSError, AttributeError):
        return None
    del kept
    return max(0, peak - before)
