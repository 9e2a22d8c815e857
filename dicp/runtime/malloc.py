"""What malloc holds free, and giving its pages back (GNU C library, from version 2.33 on)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


class _Statistics(ctypes.Structure):
    """`struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _statistics() -> Callable[[], Any] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # another C library, or an older one
        return None
    found.restype, found.argtypes = _Statistics, ()
    return found  # type: ignore[no-any-return]


def trim() -> None:
    """Give the system the pages of all that malloc holds free. Raises AttributeError where the C library
    cannot."""
    ctypes.CDLL(None).malloc_trim(0)


_USUAL = (32 << 20) - (1 << 16)
"""Bytes of the largest block, its header included, that malloc lets become usual."""


@functools.cache
def keep_more() -> None:
    """Have malloc keep up to 64 MB free at the end of its heap: it keeps twice the largest block that was
    mapped and dropped so far, 32 MB at the most (mallopt(3), M_MMAP_THRESHOLD), and here one of that size is
    dropped, without a page touched, as by anybody who drops such a tensor. Libraries' results that a forward
    saves else leave malloc's heap as the backward drops them, and each step faults their pages in anew:
    RegNetY's (2x224x224, 45 MB of them) took 64 to 72 ms, and 57 to 66 so. So do those that die within a
    call: ResNet-50's (2x224x224, 3,100 faults a call) took 47.7 ms, and 43.6 so. Thresholds that the user
    sets stay."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.free(libc.malloc(_USUAL))


class Idle:
    """Memory in malloc's heaps that nobody holds. Much of it stays resident: only the end of a heap is given
    back as it is freed."""

    def __init__(self) -> None:
        self._gone = 0  # bytes that were free when all was given back, and have been since: without pages

    def give_back(self, nbytes: int) -> bool:
        """Give the system all pages, if there are so many bytes of them. Asking takes some tenths of a
        millisecond, giving as much per MB or two. What was used and freed again since it was last asked does
        not count: nothing tells it from what has no pages."""
        statistics = _statistics()
        if statistics is None:
            return False
        free = int(statistics().fordblks)
        pays = free >= self._gone + nbytes
        if pays:
            trim()
        self._gone = free if pays else min(free, self._gone)
        return pays
