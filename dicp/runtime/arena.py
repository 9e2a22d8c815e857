"""Workspace memory that outlives a call, so that the pages of temporaries are touched once, not every call.

Blocks are shared by all programs of the process: a call takes the block that came back last, the likeliest in
cache, or a fresh one where that is too small, and gives it back when it is done. As many blocks are kept as
calls have run at the same time.
"""

from __future__ import annotations

import torch


class Block:
    """Bytes on the CPU, aligned to 64."""

    __slots__ = ("address", "nbytes", "tensor")

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes + 64, dtype=torch.uint8)
        skip = -self.tensor.data_ptr() % 64
        self.tensor = self.tensor[skip:]
        self.address = self.tensor.data_ptr()
        self.nbytes = nbytes

    def window(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor on the block's memory; `offset` in bytes, strides in elements."""
        flat = self.tensor[
            offset : offset + (self.tensor.numel() - offset) // dtype.itemsize * dtype.itemsize
        ]
        return flat.view(dtype).as_strided(shape, strides)


class Arena:
    """The process's free blocks of CPU memory. What threads share is one list, whose pop and append are
    atomic."""

    def __init__(self) -> None:
        self._free: list[Block] = []

    def take(self, nbytes: int) -> Block:
        """A block of at least nbytes; the caller has it alone until `give`."""
        try:
            block = self._free.pop()
        except IndexError:
            return Block(nbytes)
        return block if block.nbytes >= nbytes else Block(nbytes)

    def give(self, block: Block) -> None:
        self._free.append(block)

    def clear(self) -> None:
        """Free what no call is using."""
        self._free = []


ARENA = Arena()
