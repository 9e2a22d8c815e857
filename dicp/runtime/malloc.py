"""What malloc holds free: memory that was used, and whose pages are there."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


class _Statistics(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library, from version 2.33 on (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _statistics() -> Callable[[], _Statistics] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library; the last: Windows
        return None
    found.restype, found.argtypes = _Statistics, ()
    return found  # type: ignore[no-any-return]


def free_bytes() -> int:
    """Bytes in malloc's heaps that nobody holds; 0 where the C library does not tell. Takes some 50
    microseconds."""
    statistics = _statistics()
    return 0 if statistics is None else int(statistics().fordblks)


def from_free(nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """The tensor that `make` allocates, if malloc has its memory of what it holds free; else None. What is
    free may be in pieces too small, or another thread's, and then malloc gets new pages for it."""
    before = free_bytes()
    if before < nbytes:
        return None
    made = make()
    return made if before - free_bytes() >= nbytes // 2 else None
