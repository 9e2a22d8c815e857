"""Memory of large results that outlives them, so that their pages are touched once and not every call.

A result belongs to the caller, who drops it when he likes. malloc gives the system back what was dropped at
the end of its heap, and every block of 32 MB and more, and gets it anew: of a training step whose gradients
are dropped between steps, the faults of their pages can be a third. So the memory of large results is
remembered, and a call takes what nobody else holds any more: no tensor, no view of one, no array and no
storage object.

    taken      by the caller's tensors, or anything that shares their memory
    idle       by nobody; the next result of its size and dtype takes it
    resting    idle while the forward of a training step runs: the system may have its pages if it is short of
               memory (madvise, MADV_FREE), and a call that takes it again finds either those or fresh ones

Memory is new only where nothing of its size is idle, and then as many bytes that are idle go, longest unused
first: no more is ever kept than callers held at once. What is idle goes when a program does, too, and by
`dicp.release_memory`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dicp.compat import StorageHolders, empty_strided_cpu, window

LARGE = 1 << 20
"""Bytes of a result from which on its memory is kept: fresh pages cost several times what writing
them does."""
_MADV_FREE = 8
_PAGE = 4096

Program = Callable[..., Any]


class Block:
    """Memory of one result, and whether anyone else holds it."""

    __slots__ = ("address", "base", "nbytes", "resting", "storage", "taken")

    def __init__(self, result: torch.Tensor) -> None:
        self.base = window(result, result.shape, result.stride(), 0)
        self.storage = StorageHolders(result)
        self.address, self.nbytes = result.data_ptr(), self.storage.nbytes()
        self.resting = False
        self.taken = 0  # number of the `take` that gave it away last

    def idle(self) -> bool:
        """Whether this object alone holds the memory."""
        return self.storage.holders() == _alone()

    def same(self) -> bool:
        """Whether it is what it was: not resized, nor swapped for other memory, as sharing it with a process
        does."""
        return self.base.data_ptr() == self.address and self.storage.nbytes() == self.nbytes

    def rest(self) -> None:
        """Let the system have the pages if it is short of memory. An advice: where the system does not know
        it, they stay."""
        first = -(-self.address // _PAGE) * _PAGE
        last = (self.address + self.nbytes) // _PAGE * _PAGE
        if _libc() is not None:
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_FREE)
        self.resting = True


class Results:
    """The large results of all programs of the process, on the CPU."""

    def __init__(self) -> None:
        self._blocks: dict[Any, list[Block]] = {}  # by size, dtype and mode; longest unused first
        self._lock = threading.RLock()  # a collection of garbage may come back here
        self._takes = 0
        self._users: weakref.WeakSet[Program] = weakref.WeakSet()

    def take(
        self, program: Program, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory for a result of the program, uninitialised; dense, strides in elements."""
        nbytes = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        if nbytes < LARGE or 0 in shape:
            return empty_strided_cpu(shape, strides, dtype)
        with self._lock:
            self._takes += 1
            # a tensor of inference mode stays one
            blocks = self._blocks.setdefault((nbytes, dtype, torch.is_inference_mode_enabled()), [])
            block = self._idle_among(blocks)
            if block is None:
                self._free(nbytes)
                self._end_with(program)
                block = Block(result := empty_strided_cpu(shape, strides, dtype))
            else:
                result = window(block.base, shape, strides, 0)
            block.taken, block.resting = self._takes, False
            blocks.append(block)
            return result

    def _idle_among(self, blocks: list[Block]) -> Block | None:
        """The first that is idle, taken out; and out with those that are not what they were."""
        blocks[:] = [b for b in blocks if b.same()]
        for k, block in enumerate(blocks):
            if block.idle():
                return blocks.pop(k)
        return None

    def _free(self, nbytes: int) -> None:
        """So many bytes of what is idle, or all."""
        idle = sorted((b for b in self.blocks() if b.idle()), key=lambda b: b.taken)
        gone = set()
        for block in idle:
            if nbytes <= 0:
                break
            nbytes -= block.nbytes
            gone.add(block)
        for blocks in list(self._blocks.values()):
            blocks[:] = [b for b in blocks if b not in gone]

    def _end_with(self, program: Program) -> None:
        if program not in self._users:
            self._users.add(program)
            weakref.finalize(program, self.clear).atexit = False

    def rest(self) -> None:
        """Called as a training step begins: what is idle, gradients of the last one above all, may go."""
        with self._lock:
            for block in self.blocks():
                if not block.resting and block.idle():
                    block.rest()

    def clear(self) -> None:
        """Give back what is idle, forget the rest."""
        with self._lock:
            self._blocks.clear()

    def blocks(self) -> Iterator[Block]:
        """What is kept now."""
        return iter([b for blocks in list(self._blocks.values()) for b in blocks])


@functools.cache
def _alone() -> tuple[int, int]:
    """`holders` of a storage that one block alone holds: what torch and Python count then differs by
    version."""
    block = Block(torch.empty(1))
    return block.storage.holders()


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


RESULTS = Results()
