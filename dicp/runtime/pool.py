"""Memory of large tensors that outlives them, so that its pages are touched once and not every call.

malloc gives the system back what is dropped at the end of its heap, and every block of 32 MB and more, and
gets it anew: of a training step whose gradients are dropped between steps, the faults of their pages can be a
third. So large results, what a forward saves for its backward, and temporaries with memory of their own lie
in a pool. A tensor of it has a storage of its own, of its size, and holds its piece as long as anything holds
that storage: a tensor, a view, an array, a storage object. Then the next tensor that fits may lie there,
whatever its size and dtype: gradients where activations lay, and the next step's activations where those
gradients lay.

    held       by tensors
    warm       by nobody, its pages still there: what is taken first
    cold       by nobody, without pages: the rest of a range of addresses that is reserved once

Where it takes cold pages while it holds more than half of the most, those that malloc holds free go back
(malloc.py): the loss of a training step is often eager's, and its temporaries may be as large as many
gradients (BERT's step peaks at 38 MB so, else at 144). Not where it holds less: there malloc's are no part of
a peak, and each step would fault them in anew (a tenth of RegNetY's time).

Of what was dropped since the last call, the newest piece of just the size that is wanted comes before all
these.

Held and warm bytes together stay within what was held at once and an eighth more, for the holes between
pieces; beyond, warm pages go back to the system, the highest addresses first. All of them go when a program
does, and by `dicp.release_memory`, and what is held then when it is dropped. They are not lent to the system
meanwhile (madvise, MADV_FREE): the first write to each page so marked cost a tenth of a training step on an
Intel processor (LLaMA 391 ms for 342, ResNet-50 290 for 273, BERT 867 for 772), without counting as a fault.

In one thing such a tensor differs from torch's own: its storage cannot be resized, as that of a tensor on an
array of numpy's cannot. `resize_` to more elements and `untyped_storage().resize_` raise RuntimeError.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dicp.compat import empty_strided_cpu, window
from dicp.runtime.malloc import Idle
from dicp.runtime.spans import Span, Spans

LARGE = 1 << 20
"""Bytes of a result from which on it lies in the pool: fresh pages cost several times what writing them
does."""
PIECE = 1 << 18
"""The same of what no caller sees: saved for a backward, or temporary."""
SLACK = 8  # part of what was held at once that may be warm beside it
_LINE = 64
_PAGE = mmap.PAGESIZE
_LINUX = sys.platform == "linux"
_NORESERVE = 0x4000 if _LINUX else 0  # which the module does not name
_FREE: int | None = getattr(mmap, "MADV_FREE", None)
_GONE = mmap.MADV_DONTNEED if _LINUX else _FREE  # elsewhere the former keeps the pages

Program = Callable[..., Any]


class _Held(weakref.ref[memoryview]):
    """What the storage of a tensor holds; calls back when that is gone."""

    __slots__ = ("end", "era", "start")
    start: int
    end: int
    era: int  # how often all had been given back when it was taken


class _Guard:
    """Lets one thread in at a time: others wait. `with` gives False where this thread is in already: anything
    that makes an object may collect garbage, and that may end programs and call others. `later` is called
    when it is out."""

    __slots__ = ("_depth", "later", "lock")

    def __init__(self) -> None:
        self.lock, self._depth = threading.RLock(), 0
        self.later: Callable[[], None] | None = None

    def __enter__(self) -> bool:
        self.lock.acquire()
        self._depth += 1
        return self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        later = None if self._depth else self.later
        self.lock.release()
        if later is not None:
            later()


class Pool:
    """Large tensors of all programs of the process, on the CPU."""

    def __init__(self, nbytes: int | None = None, idle: Idle | None = None) -> None:
        """nbytes: that it may hold at the most, by default as much as the machine has. idle: memory that is
        given back before pages are taken."""
        self._limit, self._idle = nbytes, idle
        self._guard = _Guard()  # of all that follows but what is dropped
        self._pages: mmap.mmap | None = None
        self._memory = memoryview(b"")
        self._spans = Spans(0)
        self._held: dict[int, _Held] = {}  # by start
        self._dropped: deque[_Held] = deque()  # by any thread, at any time
        self._users: weakref.WeakSet[Program] = weakref.WeakSet()
        self._era = 0
        self._most = 0  # bytes held at once in this era

    def empty(
        self, program: Program, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Uninitialised memory for a tensor of the program; dense, strides in elements."""
        nbytes = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        if nbytes < PIECE or 0 in shape:
            return empty_strided_cpu(shape, strides, dtype)
        piece = None
        with self._guard as alone:
            if alone:
                piece = self._take(nbytes)
                if program not in self._users:
                    self._users.add(program)
                    weakref.finalize(program, self.clear).atexit = False
        if piece is None:  # torch may have it yet, or says that there is no more
            return empty_strided_cpu(shape, strides, dtype)
        return window(torch.frombuffer(piece, dtype=dtype), shape, strides, 0)

    def _take(self, nbytes: int) -> memoryview | None:
        size = -(-nbytes // _LINE) * _LINE
        start = self._collect(size)
        if start is None:
            start = self._place(size)
        if start is None:
            return None
        piece = self._memory[start : start + nbytes]
        held = self._held[start] = _Held(piece, self._drop)
        held.start, held.end, held.era = start, start + size, self._era
        return piece

    def _place(self, size: int) -> int | None:
        """Where so many bytes are, which nobody holds."""
        if self._limit is None:
            self._limit = _memory_to_use()
        if self._spans.held + size > self._limit or not self._reserved():
            return None
        before = self._spans.paged
        start = self._spans.take(size)
        if start is None:
            return None
        at_peak = 2 * self._spans.held > self._most
        if self._spans.paged > before and at_peak and self._idle is not None:
            self._idle.give_back(size)
        self._most = max(self._most, self._spans.held)
        self._cool(self._spans.paged - self._most - self._most // SLACK)
        return start

    def _reserved(self) -> bool:
        """Whether there are addresses: twice as many as bytes, so that holes between pieces do not matter."""
        if self._pages is None and self._limit:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            try:
                self._pages = mmap.mmap(-1, 2 * self._limit, flags=flags)
            except OSError:
                self._limit = 0
                return False
            self._memory, self._spans = memoryview(self._pages), Spans(2 * self._limit)
        return self._pages is not None

    def _drop(self, held: Any) -> None:
        """Called in whatever thread drops the last holder, maybe while another is in here."""
        del self._held[held.start]
        self._dropped.append(held)

    def _collect(self, size: int = 0) -> int | None:
        """Make free what was dropped, but for the last piece of just so many bytes, which is taken again: the
        start of that. A result that each call makes and its caller drops costs no search so, and its lines
        are in the caches yet."""
        again = None
        while self._dropped:
            held = self._dropped.pop()
            if again is None and held.end - held.start == size and held.era == self._era:
                again = held.start
                continue
            self._spans.give(held.start, held.end, warm=held.era == self._era)
            if held.era != self._era:
                self._give_back(Span(held.start, held.end, False))
        return again

    def _cool(self, nbytes: int) -> None:
        """Give so many warm bytes back to the system."""
        if nbytes > 0:
            for span in self._spans.cool(nbytes):
                self._give_back(span)

    def _give_back(self, span: Span) -> None:
        """The whole pages in a span, to the system. Where it does not know how, they stay."""
        first = -(-span.start // _PAGE) * _PAGE
        last = span.end // _PAGE * _PAGE
        if last > first and _GONE is not None and self._pages is not None:
            with contextlib.suppress(OSError):
                self._pages.madvise(_GONE, first, last - first)

    def clear(self) -> None:
        """Give back what is warm, and what is held now when it is dropped."""
        with self._guard as alone:
            self._guard.later = None if alone else self.clear
            if alone:
                self._collect()
                self._cool(self._spans.warm)
                self._era += 1
                self._most = self._spans.held

    def nbytes(self) -> tuple[int, int]:
        """(held, warm) bytes."""
        with self._guard as alone:
            if alone:
                self._collect()
            return self._spans.held, self._spans.warm


def _memory_to_use() -> int:
    """Bytes of the machine's memory, or a part of the addresses where the process has a limit of those. 0
    where the system counts addresses as memory: they would be missing elsewhere."""
    strict = Path("/proc/sys/vm/overcommit_memory")
    if strict.exists() and strict.read_text().strip() == "2":
        return 0
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return physical if limit == resource.RLIM_INFINITY else min(physical, limit // 16 // _PAGE * _PAGE)


POOL = Pool(idle=Idle())
_lock = POOL._guard.lock  # a child gets no pool that another thread was changing
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
