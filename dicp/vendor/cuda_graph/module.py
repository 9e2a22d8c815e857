"""An emitted kernel: a module of Python text with one Triton function, and what a launch of it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dicp.ir import index as ix
from dicp.ir.kernel import Kernel, Param, Store, expressions
from dicp.vendor.cuda_graph.expression import host_text
from dicp.vendor.cuda_graph.tiles import Blocks, Tile

INDENT = "    "
WAIT = "d.grid_wait(PDL)"
"""Where a kernel that is launched early waits for the one before it."""


@dataclass(frozen=True)
class Source:
    """An emitted kernel: the module's text, the function in it, and what a launch needs to know."""

    name: str
    text: str
    kernel: Kernel
    tile: Tile
    blocks: Blocks
    checks: bool

    stages = None  # of a software pipeline: Triton's own choice
    contracted = False
    """Products and sums to one instruction: copies of an expression in two kernels, which are compared with
    each other, would differ by where the compiler does so."""

    @property
    def params(self) -> tuple[Param, ...]:
        return self.kernel.params

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.kernel.sizes)

    @property
    def constants(self) -> dict[str, int]:
        """Tile sizes by the names they have in the text."""
        b = self.blocks
        plane = {"Y": b.y} if self.tile.form == "plane" else {}
        vector = {} if self.tile.begin is None else {"V": b.v}
        return {"X": b.x} | plane | ({"R": b.r} if self.tile.r else {}) | vector

    @property
    def warps(self) -> int:
        return self.blocks.warps

    @property
    def registers(self) -> int | None:
        return self.blocks.registers

    @property
    def grid(self) -> str:
        """Programs of a launch, as Python text over the sizes."""
        t, b = self.tile, self.blocks
        parts = []
        for axes, block in ((t.x, b.x), (t.y, b.y), (t.single, 1)):
            extent = Tile.extent(axes)
            if isinstance(extent, int):
                parts.append(str(-(-extent // block)))
            else:
                parts.append(f"-(-({host_text(extent)}) // {block})")
        return " * ".join(p for p in parts if p != "1") or "1"

    @property
    def origins(self) -> tuple[str, ...]:
        return self.kernel.origins


# -- text ----------------------------------------------------------------------------------------------------


def module_text(
    name: str,
    origins: Sequence[str],
    about: Sequence[str],
    function: Sequence[str],
    example: dict[str, Any],
    sizes: Sequence[str],
) -> str:
    """A module: what it is about, the function, and at the end a run of it alone on random inputs.

    example: what launch.try_alone is given.
    """
    lines = [
        f'"""{name}',
        "",
        *(INDENT + o for o in origins),
        "",
        *about,
        '"""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from dicp.vendor.cuda_graph import device as d",
        "",
        "",
        *function,
        "",
        "",
        'if __name__ == "__main__":',
        INDENT + "from dicp.vendor.cuda_graph.launch import try_alone",
        "",
        INDENT + f"try_alone({name}, {example!r})" + (f"  # sizes: {', '.join(sizes)}" if sizes else ""),
        "",
    ]
    return "\n".join(lines)


def kernel_text(source: Source, function: Sequence[str]) -> str:
    """The module of a kernel."""
    kernel, t = source.kernel, source.tile
    axes = ", ".join(f"{a.var} < {a.size}" + (" reduced" if a.reduced else "") for a in kernel.axes) or "once"
    about = [f"{t.form}{'' if t.persistent else ', looped'}: {axes}"]
    return module_text(source.name, kernel.origins, about, function, example(source), source.sizes)


def example(source: Source) -> dict[str, Any]:
    """What the module needs alone: buffers as (dtype, elements, written), sizes, grid and constants."""
    kernel = source.kernel
    sizes: dict[ix.Atom, int] = dict.fromkeys(kernel.sizes, 64)
    reach = {p.name: 1 for p in kernel.params}
    for s in kernel.body:
        spots = [(e.args[0], e.args[1]) for e in expressions(s) if e.op == "load"]
        for name, i in [*spots, *([(s.buffer, s.index)] if isinstance(s, Store) else [])]:
            top = ix.limit(i, upper=True)
            last = 0 if top is None else int(ix.evaluate(top, lambda a: sizes.get(a, 1)))
            reach[name] = max(reach[name], last + 1)
    return {
        "buffers": [(str(p.dtype).removeprefix("torch."), reach[p.name], p.written) for p in kernel.params],
        "sizes": [64] * len(kernel.sizes),
        "flags": source.checks,
        "programs": int(eval(source.grid, dict.fromkeys(source.sizes, 64))),
        "constants": source.constants,
        "warps": source.warps,
    } | ({} if source.registers is None else {"registers": source.registers})
