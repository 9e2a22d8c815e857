"""Products as Triton, with what follows them in the same kernel.

    out[z, m, n] = act(alpha * sum over k of a[z, m, k] * b[z, k, n] + beta * bias + residual) + other

b may be stored in eight bits, with a scale in alpha's place: it is converted where it is multiplied.

Two forms. `tile`: a program computes a tile of the result on the tensor cores; programs follow each other
down groups of rows of tiles, so that what they read of b is still in L2. `rows`: for up to MAX_ROWS rows,
where reading b is all the time there is; a program multiplies rows of a into the columns it reads, without
tensor cores, and asks for the next before it does. Either may be split along k where there are fewer tiles
than multiprocessors: partial sums go to scratch memory, and a second kernel adds them, in a fixed order, and
does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.defs import View
from dicp.vendor.cuda_graph.expression import host_text, narrowed, widened
from dicp.vendor.cuda_graph.module import INDENT, WAIT
from dicp.vendor.cuda_graph.templates import Launched, Operand, make, number

MAX_ROWS = 4
GROUP = 8  # rows of tiles that share columns of b
FINISH = 1024  # results of a program that adds partial sums

ACTIVATIONS = {
    "none": (),
    "relu": ("y = d.maximum(y, tl.full([], 0.0, tl.float32))",),
    "relu6": (
        "y = d.maximum(y, tl.full([], 0.0, tl.float32))",
        "y = d.minimum(y, tl.full([], 6.0, tl.float32))",
    ),
    "sigmoid": ("y = d.sigmoid(y)",),
    "tanh": ("y = d.tanh(y)",),
    "silu": ("y = y * d.sigmoid(y)",),
    "gelu": ("y = y * 0.5 * (1 + d.erf(y * 0.7071067811865476))",),
    "gelu_tanh": ("y = y * 0.5 * (1 + d.tanh(0.7978845608028654 * (y + 0.044715 * y * y * y)))",),
}
SHORT = {
    "gelu": ("y = y * 0.5 * d.one_plus_erf(y * 0.7071067811865476)",),
    "gelu_tanh": ("y = y * 0.5 * d.one_plus_tanh(0.7978845608028654 * (y + 0.044715 * y * y * y))",),
}
"""The same where the result is rounded to low precision (idioms.py)."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut: form, blocks (powers of two), parts along k, warps, stages of the pipeline."""

    form: str
    m: int
    n: int
    k: int
    split: int = 1
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        parts = f", {self.split} parts" if self.split > 1 else ""
        return f"{self.form} {self.m}x{self.n}x{self.k}{parts}"

    def interpreted(self) -> Tiling:
        """The same with small blocks, so that small sizes have tails and several steps."""
        small = (min(self.m, 32), min(self.n, 32), 32)
        return replace(self, m=small[0], n=small[1], k=small[2])


@dataclass(frozen=True)
class Product:
    """Sizes and operands; axes are (z, m, n), those of a (z, m, k), those of b (z, k, n). b: of a's dtype, or
    of NARROW_WEIGHTS."""

    stem: str
    batch: Index
    m: Index
    n: Index
    k: Index
    a: Operand
    b: Operand
    out: Operand
    bias: Operand | None = None
    residual: Operand | None = None
    other: Operand | None = None
    alpha: float = 1
    beta: float = 1
    act: str = "none"
    precision: str = "ieee"
    scale: Operand | None = None

    @property
    def operands(self) -> list[Operand]:
        optional = (self.scale, self.bias, self.residual, self.other)
        return [o for o in (self.a, self.b, *optional, self.out) if o is not None]

    @property
    def extents(self) -> list[Index]:
        strides = [s for o in self.operands for s in o.strides]
        return [self.batch, self.m, self.n, self.k, *strides]

    @property
    def formula(self) -> str:
        """What is computed, for the reader of the module."""
        inner = "sum over k of a[m, k] * b[k, n]"
        inner = inner if self.alpha == 1 else f"{self.alpha} * {inner}"
        inner = inner if self.scale is None else f"scale[n] * {inner}"
        if self.bias is not None:
            inner += " + bias" if self.beta == 1 else f" + {self.beta} * bias"
        inner += " + residual[m, n]" if self.residual is not None else ""
        inner = inner if self.act == "none" else f"{self.act}({inner})"
        return f"out[m, n] = {inner}" + (" + other[m, n]" if self.other is not None else "")

    @property
    def sizes_text(self) -> str:
        batch = f"z < {host_text(self.batch)}, " if self.batch != 1 else ""
        return f"{batch}m < {host_text(self.m)}, n < {host_text(self.n)}, k < {host_text(self.k)}"


def kernels(p: Product, tiling: Tiling, origins: Sequence[str], interpreted: bool = False) -> list[Launched]:
    """The launches that compute a product."""
    tiling = tiling.interpreted() if interpreted else tiling
    first = Writer(p, tiling).launched(origins)
    if tiling.split == 1:
        return [first]
    return [first, _finish(p, tiling, origins)]


class Writer:
    """The first kernel: all there is, or the partial sums."""

    def __init__(self, p: Product, tiling: Tiling) -> None:
        self.p, self.tiling = p, tiling
        self.lines: list[str] = []

    def launched(self, origins: Sequence[str]) -> Launched:
        p, tiling = self.p, self.tiling
        self._place()
        if tiling.form == "rows":
            self._rows()
        else:
            self._tile()
        constants = (
            {"BN": tiling.n, "BK": tiling.k}
            if tiling.form == "rows"
            else {"BM": tiling.m, "BN": tiling.n, "BK": tiling.k}
        )
        operands = [p.a, p.b] if tiling.split > 1 else p.operands
        written = None if tiling.split > 1 else p.out
        params = [(o.name, o.dtype, o is written, o.view.span) for o in operands]
        views: list[View | None] = [o.view for o in operands]
        if tiling.split > 1:
            params.append(("scratch", torch.float32, True, _scratch(p, tiling)))
            views.append(None)
        about = [p.formula, p.sizes_text, str(tiling)]
        template = make(
            p.stem,
            about,
            params,
            p.extents,
            constants,
            self.lines,
            self._grid(),
            origins,
            tiling.warps,
            tiling.stages,
        )
        scratch = _scratch(p, tiling) if tiling.split > 1 else 0
        return Launched(template, tuple(views), scratch, ahead=(1,) if tiling.form == "rows" else ())

    # -- which part of the result ------------------------------------------------------------------------

    def _tiles(self, extent: Index, block: int) -> str:
        if isinstance(extent, int):
            return str(-(-extent // block))
        return f"(({host_text(extent)} + {block - 1}) // {block})"

    def _grid(self) -> str:
        rows = "1" if self.tiling.form == "rows" else self._tiles(self.p.m, self.tiling.m)
        factors = [
            rows,
            self._tiles(self.p.n, self.tiling.n),
            f"({host_text(self.p.batch)})",
            str(self.tiling.split),
        ]
        return " * ".join(f for f in factors if f not in ("1", "(1)")) or "1"

    def _place(self) -> None:
        """Names z, part, tile_m and tile_n of a program."""
        p, tiling = self.p, self.tiling
        columns = self._tiles(p.n, tiling.n)
        rows = "1" if tiling.form == "rows" else self._tiles(p.m, tiling.m)
        self.lines.append("tile = tl.program_id(0)")
        if tiling.split > 1:
            self.lines += [f"part = tile % {tiling.split}", f"tile = tile // {tiling.split}"]
        if p.batch != 1:
            count = f"({rows} * {columns})" if rows != "1" else columns
            self.lines += [f"z = (tile // {count}).to(INDEX)", f"tile = tile % {count}"]
        if tiling.form == "rows":
            self.lines.append("n = tile.to(INDEX) * BN + tl.arange(0, BN)[:, None]")
        elif rows == "1":
            self.lines.append("tile_m, tile_n = 0, tile")
        else:
            self.lines += [
                f"group = tile // ({GROUP} * {columns})",
                f"inside = tile % ({GROUP} * {columns})",
                f"height = tl.minimum({rows} - group * {GROUP}, {GROUP})",
                f"tile_m, tile_n = group * {GROUP} + inside % height, inside // height",
            ]

    @property
    def _z(self) -> str:
        return "z" if self.p.batch != 1 else "0"

    def _steps(self) -> tuple[str, str, bool]:
        """(where a program's steps along k begin, and end, whether the last may reach beyond all of them)"""
        k, block, split = self.p.k, self.tiling.k, self.tiling.split
        if split == 1:
            return "0", host_text(k), not isinstance(k, int) or k % block != 0
        if isinstance(k, int):
            chunk = -(-k // (block * split)) * block
            self.lines.append(f"begin = part * {chunk}")
            return "begin", f"begin + {chunk}", chunk * split != k
        whole = block * split
        self.lines.append(f"chunk = ({host_text(k)} + {whole - 1}) // {whole} * BK")
        return "part * chunk", "(part + 1) * chunk", True

    def _live(self, name: str, extent: Index, block: int, position: str) -> str | None:
        """The mask of a tile dim, named, where its last tile may reach beyond the end."""
        if isinstance(extent, int) and extent % block == 0:
            return None
        self.lines.append(f"live_{name} = {position} < {host_text(extent)}")
        return f"live_{name}"

    # -- a tile on the tensor cores ------------------------------------------------------------------------

    def _positions(self) -> tuple[str | None, str | None]:
        """Names m and n, the rows and columns of a tile, and returns their masks."""
        p, tiling = self.p, self.tiling
        self.lines += [f"{x} = (tile_{x} * B{X} + tl.arange(0, B{X})).to(INDEX)" for x, X in ("mM", "nN")]
        return self._live("m", p.m, tiling.m, "m"), self._live("n", p.n, tiling.n, "n")

    @property
    def _end(self) -> str:
        """Of the terms of a sum."""
        return host_text(self.p.k)

    def _tile(self) -> None:
        p, tiling = self.p, self.tiling
        live_m, live_n = self._positions()
        self.lines.append("acc = tl.full([BM, BN], 0.0, tl.float32)")
        begin, end, tail = self._steps()
        live_k = "live_k" if tail else None
        inside = [
            "k = (start + tl.arange(0, BK)).to(INDEX)",
            *([f"live_k = k < {self._end}"] if tail else []),
            *self._loads(live_m, live_n, live_k),
            f'acc = d.dot(left, right, acc, "{p.precision}")',
        ]
        self.lines += [f"for start in range({begin}, {end}, BK):", *(INDENT + line for line in inside)]
        live = {"m": "live_m[:, None]"} if live_m else {}
        live |= {"n": "live_n[None, :]"} if live_n else {}
        if tiling.split > 1:
            self._store_part("acc", "m[:, None]", "n[None, :]", " & ".join(live.values()))
        else:
            self.lines += ["y = acc", *epilogue(p, self._z, "m[:, None]", "n[None, :]", live)]

    def _loads(self, live_m: str | None, live_n: str | None, live_k: str | None) -> list[str]:
        """Name left and right, the tiles of a step; live: the masks along their dims."""
        p = self.p
        left = p.a.at(self._z, "m[:, None]", "k[None, :]", full=True)
        right = p.b.at(self._z, "k[:, None]", "n[None, :]", full=True)
        read = load(right, _both(live_k, "[:, None]", live_n, "[None, :]"))
        if p.b.dtype != p.a.dtype:
            read = narrowed(as_float(read, p.b.dtype), p.a.dtype)
        return [
            f"left = {load(left, _both(live_m, '[:, None]', live_k, '[None, :]'))}",
            f"right = {read}",
        ]

    def _store_part(self, value: str, m: str, n: str, live: str | None) -> None:
        p = self.p
        batch = f"part.to(INDEX) * {number(p.batch)} + z" if p.batch != 1 else "part.to(INDEX)"
        row = f"({batch}) * {number(p.m)}" if m == "0" else f"(({batch}) * {number(p.m)} + {m})"
        at = f"scratch + {row} * {number(p.n)} + {n}"
        self.lines.append(f"tl.store({at}, {value}{_mask(live)})")

    # -- few rows ------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        p = self.p
        assert isinstance(p.m, int)
        live_n = self._live("n", p.n, self.tiling.n, "n")
        self.lines += [f"acc{m} = tl.full([BN, BK], 0.0, tl.float32)" for m in range(p.m)]
        begin, end, tail = self._steps()
        limit = f" & (following < {host_text(p.k)})" if tail else ""
        live_k = f"(k < {host_text(p.k)})" if tail else None
        first = load(p.b.at(self._z, "k", "n", full=True), _both(live_n, "", live_k, ""))
        more = _both(live_n, "", f"(following < {end}){limit}", "")
        self.lines += [
            f"k = ({begin} + tl.arange(0, BK)[None, :]).to(INDEX)",
            f"right = {first}",
            WAIT,
            f"for start in range({begin}, {end}, BK):",
        ]
        where = p.b.at(self._z, "following", "n", full=True)
        inside = ["following = k + BK", f"ahead = {load(where, more)}"]
        for m in range(p.m):
            left = load(p.a.at(self._z, str(m), "k", full=True), live_k, p.a.dtype)
            inside.append(f"acc{m} += {as_float('right', p.b.dtype)} * {left}")
        self.lines += [INDENT + line for line in [*inside, "k, right = following, ahead"]]
        for m in range(p.m):
            if self.tiling.split > 1:
                self._store_part(f"d.row_sum(acc{m})", str(m), "n", live_n)
            else:
                self.lines += [
                    f"y = d.row_sum(acc{m})",
                    *epilogue(p, self._z, str(m), "n", {"n": live_n} if live_n else {}),
                ]


def epilogue(p: Product, z: str, m: str, n: str, live: dict[str, str]) -> list[str]:
    """What becomes of y, the sums at positions m and n; live: masks by the axes they are of."""
    lines = [] if p.alpha == 1 else [f"y = y * {p.alpha!r}"]
    if p.scale is not None:
        lines.append(f"y = y * {load(p.scale.at(z, m, n), _limited(p.scale, live), p.scale.dtype)}")
    if p.bias is not None and p.beta != 0:
        value = load(p.bias.at(z, m, n), _limited(p.bias, live), p.bias.dtype)
        lines.append(f"y = y + {value}" if p.beta == 1 else f"y = y + {p.beta!r} * {value}")
    if p.residual is not None:
        lines.append(f"y = y + {load(p.residual.at(z, m, n), _limited(p.residual, live), p.residual.dtype)}")
    short = SHORT if p.out.dtype in ex.LOW_PRECISION else {}
    lines += short.get(p.act, ACTIVATIONS[p.act])
    if p.other is not None:
        lines.append(f"y = y + {load(p.other.at(z, m, n), _limited(p.other, live), p.other.dtype)}")
    kept = narrowed("y", p.out.dtype)
    return [*lines, f"tl.store({p.out.at(z, m, n, full=True)}, {kept}{_mask(' & '.join(live.values()))})"]


def _limited(o: Operand, live: dict[str, str]) -> str | None:
    """The part of a mask along the axes that an operand has."""
    has = dict(zip(("z", "m", "n"), (s != 0 for s in o.strides), strict=True))
    kept = dict.fromkeys(mask for axes, mask in live.items() if any(has[a] for a in axes))
    return " & ".join(kept) or None


def _both(a: str | None, spread_a: str, b: str | None, spread_b: str) -> str | None:
    """The masks of two dims of a tile, spread over it, as one."""
    return " & ".join(mask + spread for mask, spread in ((a, spread_a), (b, spread_b)) if mask) or None


def _mask(live: str | None) -> str:
    return f", mask={live}" if live else ""


def load(address: str, live: str | None, dtype: torch.dtype | None = None) -> str:
    """The elements at an address, 0 where they are not live. dtype: theirs, for float32 of them."""
    text = f"tl.load({address}, mask={live}, other=0)" if live else f"tl.load({address})"
    return text if dtype is None else as_float(text, dtype)


def as_float(text: str, dtype: torch.dtype) -> str:
    """Elements of a dtype as float32."""
    return widened(text, dtype) if dtype.is_floating_point else f"{text}.to(tl.float32)"


# -- partial sums --------------------------------------------------------------------------------------------


def _scratch(p: Product, tiling: Tiling) -> Index:
    return ix.product((p.batch, p.m, p.n)) * tiling.split


def _finish(p: Product, tiling: Tiling, origins: Sequence[str]) -> Launched:
    """Adds the parts, and does what follows a product."""
    total = ix.product((p.batch, p.m, p.n))
    m, n = number(p.m), number(p.n)
    parts = [f"tl.load(scratch + x + {s} * {number(total)}, mask=live, other=0)" for s in range(tiling.split)]
    parts[0] = "tl.load(scratch + x, mask=live, other=0)"
    body = [
        "x = tl.program_id(0).to(INDEX) * X + tl.arange(0, X)",
        f"live = x < {host_text(total)}",
        f"n = x % {n}",
        f"m = x // {n} % {m}",
        *([f"z = x // ({n} * {m})"] if p.batch != 1 else []),
        f"y = {parts[0]}",
        *(f"y = y + {part}" for part in parts[1:]),
        *epilogue(p, "z" if p.batch != 1 else "0", "m", "n", {"zmn": "live"}),
    ]
    operands = [o for o in (p.scale, p.bias, p.residual, p.other, p.out) if o is not None]
    params = [("scratch", torch.float32, False, _scratch(p, tiling))]
    params += [(o.name, o.dtype, o is p.out, o.view.span) for o in operands]
    grid = f"(({host_text(total)}) + {FINISH - 1}) // {FINISH}"
    about = [f"{tiling.split} parts of the sums over k: {p.formula}", p.sizes_text]
    template = make(f"{p.stem}_finish", about, params, p.extents, {"X": FINISH}, body, grid, origins, 4)
    return Launched(template, (None, *(o.view for o in operands)), _scratch(p, tiling))


__all__ = ["ACTIVATIONS", "MAX_ROWS", "Tiling", "Product", "Writer", "kernels", "load", "widened"]
