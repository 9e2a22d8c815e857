"""What malloc holds free, and giving its pages back (GNU C library, from version 2.33 on)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class _Statistics(ctypes.Structure):
    """`struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class _Library(NamedTuple):
    statistics: Callable[[], Any]
    trim: Callable[[int], int]


@functools.cache
def _library() -> _Library | None:
    try:
        process = ctypes.CDLL(None)
        statistics, trim = process.mallinfo2, process.malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; the last: Windows
        return None
    statistics.restype, statistics.argtypes = _Statistics, ()
    trim.restype, trim.argtypes = ctypes.c_int, (ctypes.c_size_t,)
    return _Library(statistics, trim)


class Idle:
    """Memory in malloc's heaps that nobody holds. Much of it stays resident: only the end of a heap is given
    back as it is freed."""

    def __init__(self) -> None:
        self._gone = 0  # bytes that were free when all was given back, and have been since: without pages

    def give_back(self, nbytes: int) -> bool:
        """Give the system all pages, if there are so many bytes of them. Asking takes some 50 microseconds,
        giving milliseconds, so what was used and freed again since it was last asked does not count."""
        library = _library()
        if library is None:
            return False
        free = int(library.statistics().fordblks)
        pays = free >= self._gone + nbytes
        if pays:
            library.trim(0)
        self._gone = free if pays else min(free, self._gone)
        return pays
