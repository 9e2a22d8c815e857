"""Memory whose ends nothing can be read or written beyond: what does so dies at once, and the test run says where."""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)


def _protect(address: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0):  # PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect")


def walled(memory: dict[str, torch.Tensor], at_end: bool) -> dict[str, torch.Tensor]:
    """Copies of flat tensors that end (or begin) at a page that cannot be touched, with one such page at the other
    side of their pages; tensors that were one stay one."""
    made: dict[int, torch.Tensor] = {}
    for t in memory.values():
        if id(t) not in made:
            made[id(t)] = _between_walls(t, at_end) if t.numel() else t
    return {name: made[id(t)] for name, t in memory.items()}


def _between_walls(t: torch.Tensor, at_end: bool) -> torch.Tensor:
    inside = -(-t.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)  # the tensor keeps it
    start = mmap.PAGESIZE + (inside - t.nbytes if at_end else 0)
    copy = torch.frombuffer(area, dtype=t.dtype, count=t.numel(), offset=start).copy_(t)
    first = copy.data_ptr() - start
    _protect(first)
    _protect(first + mmap.PAGESIZE + inside)
    return copy
