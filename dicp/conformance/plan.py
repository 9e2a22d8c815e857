"""Which units a run consists of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import opdb
from .cases import Mode
from .unit import Unit, dtype_named

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64")
# What differs between dtypes shows in the static forward run; sizes and gradients are tried where they
# differ.
DYNAMIC_DTYPES = ("float32", "int64")
GRADIENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Plan:
    """A run's extent. ops: a regular expression searched in full names; shard: (number, of), counted from
    one.
    """

    ops: str = ""
    dtypes: tuple[str, ...] = ()
    dynamic: bool = False
    gradient: bool = False
    samples: int = 8
    shard: tuple[int, int] = (1, 1)
    device: str = "cpu"
    case: str | None = None
    static: bool = True
    forward: bool = True

    def units(self) -> list[Unit]:
        """Every unit of this run, operators in order."""
        number, of = self.shard
        return [u for i, u in enumerate(self._all()) if i % of == number - 1]

    def _all(self) -> Iterator[Unit]:
        pattern = re.compile(self.ops)
        shapes = ([False] if self.static else []) + ([True] if self.dynamic else [])
        every: tuple[tuple[Mode, bool], ...] = (("forward", self.forward), ("gradient", self.gradient))
        modes = [mode for mode, wanted in every if wanted]
        for op in opdb.operators(self.device).values():
            if not pattern.search(op.name):
                continue
            for mode in modes:
                for dynamic in shapes:
                    for name in self._dtypes(op, mode, dynamic):
                        samples = max(self.samples // 2, 1) if dynamic else self.samples
                        yield Unit(op.name, name, mode, dynamic, samples, self.device, self.case)

    def _dtypes(self, op: opdb.Operator, mode: Mode, dynamic: bool) -> list[str]:
        wanted = self.dtypes or (
            GRADIENT_DTYPES if mode == "gradient" else DYNAMIC_DTYPES if dynamic else DTYPES
        )
        if mode == "gradient" and dynamic and not self.dtypes:
            wanted = ("float32",)
        able = op.grad_dtypes if mode == "gradient" else op.dtypes
        found = [name for name in wanted if dtype_named(name) in able]
        # An operator of complex numbers only, say, is still tried dynamic and with gradients.
        if not found and not self.dtypes and able:
            found = sorted(str(d).removeprefix("torch.") for d in able)[:1]
        return found
