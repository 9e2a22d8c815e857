"""Convolutions of images as Triton, with what follows them in the same kernel.

    out[i, n, y, x] = act(bias[n] + residual[i, n, y, x] + sum over r, s, c of
        x[i, c, y * stride - padding + r * dilation, x * stride - padding + s * dilation] * w[n, c, r, s])

A product whose rows m are the result's pixels (i, y, x) and whose sums run over k = (r, s, c), c innermost.
Nothing is copied to make it one: addresses are computed where a tile is loaded, and the padding is read as 0.
Operands may lie in any order; channels-last ones have neighbours along k, and along n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.defs import View
from dicp.vendor.cuda_graph.expression import host_text
from dicp.vendor.cuda_graph.templates import Launched, Operand, number
from dicp.vendor.cuda_graph.templates.product import Product, Tiling, Writer, load


@dataclass(frozen=True)
class Image(Operand):
    """A tensor [image, channel, y, x] that is addressed by pixel and channel."""

    def at(self, *positions: str, full: bool = False) -> str:
        """(z, m, n), of which m is named apart: image, py and px of a pixel."""
        z, m, n = positions
        spread = m.removeprefix("m")
        at = {f"image{spread}": 0, n: 1, f"py{spread}": 2, f"px{spread}": 3}
        return " + ".join([self.name, *_terms(at, self.view.strides)])


def image(name: str, v: View) -> Image:
    """Of a tensor with four dims. Its stride along m only says whether it has one."""
    moving = [s for d, s in enumerate(v.strides) if d != 1 and s != 0]
    return Image(name, v, (0, moving[-1] if moving else 0, v.strides[1]))


def _terms(at: dict[str, int], strides: Sequence[Index]) -> list[str]:
    return [p if strides[d] == 1 else f"{p} * {number(strides[d])}" for p, d in at.items() if strides[d] != 0]


@dataclass(frozen=True)
class Convolution(Product):
    """`a` and `out` are Images, b is the weight; m counts the result's pixels, k the terms of a sum."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def extents(self) -> list[Index]:
        images = [o.view for o in self.operands if isinstance(o, Image)]
        sizes = [n for v in (*images, self.b.view) for n in (*v.shape, *v.strides)]
        return [*super().extents, *sizes]

    @property
    def formula(self) -> str:
        window = "x".join(host_text(n) for n in self.b.view.shape[2:])
        how = f"stride {self.stride}, padding {self.padding}, dilation {self.dilation}"
        return f"{super().formula}; m: pixels, k: of a window of {window}, {how}"


def convolution(
    x: View,
    w: View,
    bias: View | None,
    residual: View | None,
    out: View,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    act: str,
    precision: str,
) -> Convolution:
    """Of images [B, C, H, W] and a weight [N, C, R, S], in one group."""
    pixels = ix.product((out.shape[0], *out.shape[2:]))
    return Convolution(
        "convolution" if act == "none" else f"convolution_{act}",
        1,
        pixels,
        w.shape[0],
        ix.product(w.shape[1:]),
        image("x", x),
        Operand("w", w, (0, 0, w.strides[0])),
        image("out", out),
        None if bias is None else Operand("bias", bias, (0, 0, bias.strides[0])),
        None if residual is None else image("residual", residual),
        act=act,
        precision=precision,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )


def kernels(
    p: Convolution, tiling: Tiling, origins: Sequence[str], interpreted: bool = False
) -> list[Launched]:
    """The launch that computes a convolution. tiling: a `tile`, not split."""
    return [_Writer(p, tiling.interpreted() if interpreted else tiling).launched(origins)]


class _Writer(Writer):
    p: Convolution

    def _positions(self) -> tuple[str | None, str | None]:
        live = super()._positions()
        height, width = (number(n) for n in self.p.out.view.shape[2:])
        self.lines += [
            f"px = m % {width}",
            f"py = m // {width} % {height}",
            f"image = m // ({width} * {height})",
            f"top = py * {self.p.stride[0]} - {self.p.padding[0]}",
            f"side = px * {self.p.stride[1]} - {self.p.padding[1]}",
        ]
        return live

    def _loads(self, live_m: str | None, live_n: str | None, live_k: str | None) -> list[str]:
        """Of what lies in the window of each pixel, and of the weight."""
        p, x, w = self.p, self.p.a.view, self.p.b.view
        channels, span = (number(n) for n in (w.shape[1], w.shape[3]))
        lines = [f"c = k % {channels}", f"r = k // ({channels} * {span})", f"s = k // {channels} % {span}"]
        if any(p.padding) or any(self._reaches_out(d) for d in (0, 1)):
            inside = [
                f"(0 <= {place}) & ({place} < {host_text(n)})"
                for place, n in zip(("row", "column"), x.shape[2:], strict=True)
            ]
            live = " & ".join(["live_x", *([f"{live_m}[:, None]"] if live_m else [])])
            masked = [f"live_x = {' & '.join(inside)}"]
        else:
            live, masked = (f"{live_m}[:, None]" if live_m else ""), []
        live = " & ".join(filter(None, [live, f"{live_k}[None, :]" if live_k else ""]))
        pixel = {"image[:, None]": 0, "c[None, :]": 1, "row": 2, "column": 3}
        tap = {"n[None, :]": 0, "c[:, None]": 1, "r[:, None]": 2, "s[:, None]": 3}
        right = " & ".join(
            filter(None, [f"{live_k}[:, None]" if live_k else "", f"{live_n}[None, :]" if live_n else ""])
        )
        return [
            *lines,
            f"row = top[:, None] + r[None, :] * {p.dilation[0]}",
            f"column = side[:, None] + s[None, :] * {p.dilation[1]}",
            *masked,
            f"left = {load(' + '.join([p.a.name, *_terms(pixel, x.strides)]), live or None)}",
            f"right = {load(' + '.join([p.b.name, *_terms(tap, w.strides)]), right or None)}",
        ]

    def _reaches_out(self, d: int) -> bool:
        """Whether windows may end behind the image, as those of an output size rounded up would."""
        p = self.p
        out, window = p.out.view.shape[2 + d], p.b.view.shape[2 + d]
        last = (out - 1) * p.stride[d] - p.padding[d] + (window - 1) * p.dilation[d]
        rest = p.a.view.shape[2 + d] - 1 - last
        return not isinstance(rest, int) or rest < 0


__all__ = ["Convolution", "Image", "convolution", "image", "kernels"]
