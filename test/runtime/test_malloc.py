"""Giving back what malloc holds free."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from dicp.runtime import malloc

KB, MB = 1 << 10, 1 << 20
GNU = malloc._statistics() is not None


@pytest.mark.skipif(not GNU, reason="this C library does not tell what is free")
def test_pages_go_back_once_until_they_are_used_again() -> None:
    """In a process of its own, whose heap nothing else uses."""
    code = f"""
import torch
from dicp.bench.measure import status
from dicp.runtime.malloc import Idle

def use():  # malloc maps pieces of 128 KiB and more
    return [torch.ones(100 * {KB}, dtype=torch.uint8) for _ in range(400)]

idle, blocks = Idle(), use()
idle.give_back(0)
end = blocks[-1]  # so that what is free is not at the heap's end
del blocks
before = status("VmRSS")
asked = [idle.give_back(n * {MB}) for n in (64, 32, 32)]
given = before - status("VmRSS")
blocks = use()
asked += [idle.give_back(16 * {MB})]
del blocks[200:]
asked += [idle.give_back(16 * {MB}), idle.give_back(16 * {MB})]
print(*asked, given >= 32 * {MB}, bool((end == 1).all() and all((b == 1).all() for b in blocks)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False", "False", "True", "False", "True", "True"], done.stderr


def test_where_nothing_is_known_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    monkeypatch.setattr(malloc, "_statistics", nothing)
    assert not malloc.Idle().give_back(0)


@pytest.mark.skipif(not GNU, reason="this C library does not tell what is free")
@pytest.mark.parametrize("training", [True, False])
def test_what_a_step_drops_stays_with_malloc(training: bool) -> None:
    """Of blocks at the end of its heap, whose pages the next step would have to touch anew."""
    code = f"""
import ctypes
from dicp.runtime.malloc import _statistics, keep_more
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
libc.free(libc.malloc(3 << 20))  # so that blocks of 1 MB lie in the heap
if {training}:
    keep_more()
blocks = [libc.malloc(1 << 20) for _ in range(40)]
for block in blocks:
    libc.free(block)
print(_statistics()().keepcost >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (int(done.stdout) >= 40) is training, done.stdout
