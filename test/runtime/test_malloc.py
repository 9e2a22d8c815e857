"""What malloc holds free, as a place for tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dicp.runtime import malloc

KB, MB = 1 << 10, 1 << 20
GNU = malloc._statistics() is not None


@pytest.mark.skipif(not GNU, reason="this C library does not tell what is free")
def test_free_memory_is_used_if_it_is_in_one_piece() -> None:
    """In a process of its own, whose heap nothing else cuts."""
    code = f"""
import torch
from dicp.runtime.malloc import free_bytes, from_free

def make():
    global made
    made += 1
    return torch.empty(4 * {MB}, dtype=torch.uint8)

blocks = [torch.empty(100 * {KB}, dtype=torch.uint8) for _ in range(400)]  # malloc maps 128 KiB and more
made, first = 0, from_free(64 * {MB}, make)
assert first is None and made == 0 and free_bytes() < 64 * {MB}
del blocks[:300:2]
assert free_bytes() > 14 * {MB}
assert from_free(4 * {MB}, make) is None and made == 1
del blocks[:150]
before = free_bytes()
found = from_free(4 * {MB}, make)
assert made == 2 and before - free_bytes() >= 4 * {MB}
start, end = (f(b.data_ptr() for b in blocks) for f in (min, max))
print(found.nbytes, found.data_ptr() < start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(4 * MB), "True"], done.stderr


def test_where_nothing_is_known_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> torch.Tensor:
        raise AssertionError

    none: Callable[[], None] = lambda: None  # noqa: E731
    monkeypatch.setattr(malloc, "_statistics", none)
    assert malloc.free_bytes() == 0 and malloc.from_free(1, never) is None
