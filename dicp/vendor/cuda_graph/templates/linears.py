"""Linear layers of the same few rows as one kernel: the form `rows` of a product (product.py) over several
weights.

    out_i[m, n] = act(rstd[m] * scale_i[n] * sum over k of x[m, k] * norm[k] * w_i[n, k] + b_i[n])
    out[m, n]   = act(... w_0 ...) * (... w_1 ...)                                       gated

Side by side, a program finds by its number which weight it reads; gated, it reads the same columns of both.
rstd is 1 / sqrt(mean over k of x[m, k] ** 2 + eps), which a program finds on the same way along k, without
reading x before: it is a factor of all terms. scale: of weights stored in eight bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir.index import Index
from dicp.vendor.cuda_graph.expression import narrowed
from dicp.vendor.cuda_graph.module import INDENT, WAIT
from dicp.vendor.cuda_graph.templates import Launched, Operand, make, number
from dicp.vendor.cuda_graph.templates.product import ACTIVATIONS, SHORT, Tiling, as_float, load


@dataclass(frozen=True)
class Linears:
    """Sizes and operands: x: [m, k], w: each [n, k], scale and bias: none, or for each w, out: [m, n], dense
    but for scales, which may be the same for all n."""

    m: int
    k: int
    x: Operand
    norm: Operand | None
    eps: float
    w: tuple[Operand, ...]
    scale: tuple[Operand, ...]
    bias: tuple[Operand, ...]
    out: tuple[Operand, ...]
    act: str
    gated: bool

    @property
    def columns(self) -> list[int]:
        """Of each result."""
        return [int(o.view.shape[-1]) for o in self.out]  # type: ignore[arg-type]

    @property
    def operands(self) -> list[Operand]:
        return [self.x, *([self.norm] if self.norm else []), *self.w, *self.scale, *self.bias, *self.out]

    @property
    def formula(self) -> str:
        """What is computed, for the reader of the module."""
        left = "x[m, k]" if self.norm is None else "x[m, k] * norm[k]"
        rstd = "" if self.norm is None else f"rsqrt(mean over k of x[m, k]**2 + {self.eps}) * "

        def layer(i: str, act: str) -> str:
            bias = f" + bias{i}[n]" if self.bias else ""
            scale = f"scale{i}[n] * " if self.scale else ""
            inner = f"{rstd}{scale}sum over k of {left} * w{i}[n, k]{bias}"
            return inner if act == "none" else f"{act}({inner})"

        if self.gated:
            return f"out0[m, n] = {layer('0', self.act)} * ({layer('1', 'none')})"
        return f"out_i[m, n] = {layer('_i', self.act)}"


def kernels(p: Linears, tiling: Tiling, origins: Sequence[str], interpreted: bool = False) -> list[Launched]:
    """The launch that computes the layers. tiling: of form `rows`, not in parts; its columns are those of one
    weight."""
    return [_Writer(p, tiling.interpreted() if interpreted else tiling).launched(origins)]


class _Writer:
    def __init__(self, p: Linears, tiling: Tiling) -> None:
        self.p, self.tiling = p, tiling
        self.tiles = [-(-n // tiling.n) for n in p.columns]
        self.read = ["w0", "w1"] if p.gated else ["w"]  # the weights of a program
        self.tail = p.k % tiling.k != 0

    def launched(self, origins: Sequence[str]) -> Launched:
        p, tiling = self.p, self.tiling
        body = [*self._place(), *self._sums(), *self._results()]
        params: list[tuple[str, torch.dtype, bool, Index]] = [
            (o.name, o.dtype, o in p.out, o.view.span) for o in p.operands
        ]
        about = [p.formula, f"m < {p.m}, n < {', '.join(map(str, p.columns))}, k < {p.k}", str(tiling)]
        constants = {"BN": tiling.n, "BK": tiling.k}
        stem = "gated_linear" if p.gated else "linears"
        stem = stem if p.norm is None else f"rms_norm_{stem}"
        programs = str(sum(self.tiles))
        template = make(
            stem, about, params, (), constants, body, programs, origins, tiling.warps, tiling.stages
        )
        weights = tuple(k for k, o in enumerate(p.operands) if o in p.w)
        return Launched(template, tuple(o.view for o in p.operands), ahead=weights)

    def _place(self) -> list[str]:
        """Names n, the columns of a program, and what is read and written there."""
        p = self.p
        first = [sum(self.tiles[:i]) for i in range(len(self.tiles))]

        def of(values: Sequence[object]) -> str:
            text = str(values[-1])
            for value, beyond in zip(values[-2::-1], first[:0:-1], strict=True):
                text = f"tl.where(tile < {beyond}, {value}, {text})"
            return text

        read = {} if p.gated else {"w": p.w, "scale": p.scale, "bias": p.bias}
        lines = ["tile = tl.program_id(0)"]
        used = {name: each for name, each in (read | {"out": p.out}).items() if each}
        lines += [f"{name} = {of([o.name for o in each])}" for name, each in used.items()]
        if len(p.out) > 1:
            lines += [f"columns = {of(p.columns)}"] if self._columns == "columns" else []
            lines.append(f"tile = tile - {of(first)}")
        lines.append("n = tile.to(INDEX) * BN + tl.arange(0, BN)[:, None]")
        return [*lines, *([f"live_n = n < {self._columns}"] if self._live_n else [])]

    @property
    def _columns(self) -> str:
        """How many the result has that a program writes to."""
        return "columns" if len(set(self.p.columns)) > 1 else str(self.p.columns[0])

    @property
    def _live_n(self) -> str | None:
        """The mask of columns, where a program's may reach beyond the last."""
        return "live_n" if any(n % self.tiling.n for n in self.p.columns) else None

    def _mask(self, *live: str | None) -> str | None:
        return " & ".join(f"({x})" if " " in x else x for x in live if x) or None

    def _sums(self) -> list[str]:
        p, k = self.p, self.p.k
        rows = range(p.m)
        lines = [f"{w}_sum{m} = tl.full([BN, BK], 0.0, tl.float32)" for w in self.read for m in rows]
        if p.norm is not None:
            lines += [f"squares{m} = tl.full([1, BK], 0.0, tl.float32)" for m in rows]
        live_k, more = (f"k < {k}" if self.tail else None), f"following < {k}"
        lines.append("k = tl.arange(0, BK)[None, :].to(INDEX)")
        lines += [
            f"right_{w} = {load(f'{w} + n * {number(k)} + k', self._mask(self._live_n, live_k))}"
            for w in self.read
        ]
        inside = ["following = k + BK"]
        inside += [
            f"ahead_{w} = {load(f'{w} + n * {number(k)} + following', self._mask(self._live_n, more))}"
            for w in self.read
        ]
        if p.norm is not None:
            inside.append(f"norm_k = {load('norm + k', live_k, p.norm.dtype)}")
        inside += [f"wide_{w} = {as_float(f'right_{w}', p.w[0].dtype)}" for w in self.read]
        for m in rows:
            inside.append(f"left = {load(f'x + {m * k} + k' if m else 'x + k', live_k, p.x.dtype)}")
            if p.norm is not None:
                inside += [f"squares{m} += left * left", "left = left * norm_k"]
            inside += [f"{w}_sum{m} += wide_{w} * left" for w in self.read]
        inside += [f"right_{w} = ahead_{w}" for w in self.read] + ["k = following"]
        return [*lines, WAIT, f"for start in range(0, {k}, BK):", *(INDENT + line for line in inside)]

    def _results(self) -> list[str]:
        p = self.p
        mask = f", mask={self._live_n}" if self._live_n else ""
        short = SHORT if p.out[0].dtype in ex.LOW_PRECISION else {}
        lines = []
        for m in range(p.m):
            if p.norm is not None:
                lines.append(f"rstd = d.rsqrt(d.row_sum(squares{m}) / {float(p.k)!r} + {p.eps!r})")
            for w in self.read:
                y = "y" if w != "w1" else "times"
                lines.append(f"{y} = d.row_sum({w}_sum{m})" + (" * rstd" if p.norm is not None else ""))
                for of, how, stem in ((p.scale, "*", "scale"), (p.bias, "+", "bias")):
                    if of:
                        at = replace(of[0], name=stem + w[1:]).at("n")
                        live = self._live_n if of[0].strides != (0,) else None
                        lines.append(f"{y} = {y} {how} {load(at, live, of[0].dtype)}")
            lines += short.get(p.act, ACTIVATIONS[p.act])
            lines += ["y = y * times"] if p.gated else []
            kept = narrowed("y", p.out[0].dtype)
            row = f"{m} * {self._columns} + " if m else ""
            lines.append(f"tl.store(out + {row}n, {kept}{mask})")
        return lines


__all__ = ["Linears", "kernels"]
