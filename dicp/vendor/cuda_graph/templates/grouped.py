"""Products of groups as Triton: of which experts a token went to, say.

`offsets` has where each group ends along one of the axes; what lies behind the last is left as it is:

    m    out[m, n] = sum over k of a[m, k] * b[g, k, n]            m in group g
    n    out[m, n] = sum over k of a[g, m, k] * b[k, n]            n in group g
    k    out[g, m, n] = sum over the k of group g of a[m, k] * b[k, n]

A program finds out on the device which group its tile is of, so that no one waits for the offsets: there are
as many programs as tiles could be needed, and those that are left over have nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dicp.ir.index import Index
from dicp.vendor.cuda_graph.expression import host_text
from dicp.vendor.cuda_graph.module import INDENT
from dicp.vendor.cuda_graph.templates import Launched, Operand, number
from dicp.vendor.cuda_graph.templates.product import Product, Tiling, Writer

Axis = Literal["m", "n", "k"]


@dataclass(frozen=True)
class Grouped(Product):
    """A product of `batch` groups along `axis`; operands without groups have stride 0 along them."""

    offsets: Operand | None = None
    axis: Axis = "m"

    @property
    def operands(self) -> list[Operand]:
        assert self.offsets is not None
        return [self.offsets, *super().operands]

    @property
    def formula(self) -> str:
        groups = f"{host_text(self.batch)} groups along {self.axis}, whose ends are in offsets"
        return f"{super().formula}; {groups}"


def kernels(p: Grouped, tiling: Tiling, origins: Sequence[str], interpreted: bool = False) -> list[Launched]:
    """The launch that computes a product of groups. tiling: a `tile`, not split."""
    return [_Writer(p, tiling.interpreted() if interpreted else tiling).launched(origins)]


class _Writer(Writer):
    p: Grouped

    @property
    def _z(self) -> str:
        return "z"

    def _grid(self) -> str:
        return " * ".join(self._counts())

    def _counts(self) -> list[str]:
        """(of tiles along m and n, of groups), as many as could be needed."""
        p, tiling, groups = self.p, self.tiling, number(self.p.batch)
        tiles = {"m": self._tiles(p.m, tiling.m), "n": self._tiles(p.n, tiling.n)}
        if p.axis == "k":
            return [*tiles.values(), groups]
        extent, block = (p.m, tiling.m) if p.axis == "m" else (p.n, tiling.n)
        tiles[p.axis] = f"({self._whole(extent, block)} + {groups})"  # a group may end inside of a tile
        return list(tiles.values())

    @staticmethod
    def _whole(extent: Index, block: int) -> str:
        return str(extent // block) if isinstance(extent, int) else f"{number(extent)} // {block}"

    def _place(self) -> None:
        """Names tile_m and tile_n, neighbours reading the same columns of b, and z, the group."""
        rows, columns, *_ = self._counts()
        self.lines += [
            "tile = tl.program_id(0)",
            f"tile_m, tile_n = tile % {rows}, tile // {rows} % {columns}",
        ]
        if self.p.axis == "k":
            self.lines += [
                f"z = (tile // ({rows} * {columns})).to(INDEX)",
                "begin = tl.load(offsets + z - 1, mask=z > 0, other=0)",
                f"end = tl.minimum(tl.load(offsets + z), {host_text(self.p.k)})",
            ]
        else:
            self._find_group()

    def _find_group(self) -> None:
        """Names z, and the part [first, last) of the axis that is left of its group from this tile on."""
        axis, block = self.p.axis, f"B{self.p.axis.upper()}"
        extent = host_text(self.p.m if axis == "m" else self.p.n)
        inside = [
            f"end = tl.minimum(tl.load(offsets + g), {extent})",
            f"tiles = (tl.maximum(end - begin, 0) + {block} - 1) // {block}",
            f"here = (tile_{axis} >= before) & (tile_{axis} < before + tiles)",
            "z = tl.where(here, g, z)",
            f"first = tl.where(here, begin + (tile_{axis} - before) * {block}, first)",
            "last = tl.where(here, end, last)",
            "before += tiles",
            "begin = end",
        ]
        self.lines += [
            f"{name} = tl.full([], 0, tl.int32)" for name in ("before", "begin", "first", "last", "z")
        ]
        self.lines += [
            f"for g in range(0, {host_text(self.p.batch)}):",
            *(INDENT + line for line in inside),
            "z = z.to(INDEX)",
            f"stop = tl.where(first < last, {host_text(self.p.k)}, 0)  # a program left over reads nothing",
        ]

    def _positions(self) -> tuple[str | None, str | None]:
        p, tiling = self.p, self.tiling
        if p.axis == "k":
            return super()._positions()
        masks: list[str | None] = []
        for axis, extent, size in (("m", p.m, tiling.m), ("n", p.n, tiling.n)):
            block = f"B{axis.upper()}"
            start = "first" if axis == p.axis else f"tile_{axis} * {block}"
            self.lines.append(f"{axis} = ({start} + tl.arange(0, {block})).to(INDEX)")
            if axis == p.axis:
                self.lines.append(f"live_{axis} = {axis} < last")
                masks.append(f"live_{axis}")
            else:
                masks.append(self._live(axis, extent, size, axis))
        return masks[0], masks[1]

    @property
    def _end(self) -> str:
        return "end" if self.p.axis == "k" else super()._end

    def _steps(self) -> tuple[str, str, bool]:
        if self.p.axis == "k":
            return "begin", "end", True
        return "0", "stop", super()._steps()[2]


__all__ = ["Axis", "Grouped", "kernels"]
