"""Reductions and scans in Triton: of a row that is one tile, and of one that a loop takes tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dicp.ir.kernel import Reduce, Scan, Statement, identity
from dicp.vendor.cuda_graph.expression import TYPES, Dims, ExpressionWriter, Scope, host_text, literal, typed
from dicp.vendor.cuda_graph.idioms import softmax_totals
from dicp.vendor.cuda_graph.tiles import Tile

ROW: Dims = frozenset("xr")  # the dims of a whole tile
RESULTS: Dims = frozenset("x")
STEPS = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "d.maximum({0}, {1})",
    "min": "d.minimum({0}, {1})",
}


class Accumulators:
    """Writes the statements of a kernel's reductions and scans into the scopes it is given."""

    def __init__(self, tile: Tile, writer: ExpressionWriter, body: Sequence[Statement]) -> None:
        self.tile, self.writer = tile, writer
        self.maxima = _softmax_maxima(body) if tile.contiguous and not tile.persistent else {}
        self.beside = {m.refs[0] for m in self.maxima.values()}
        self.declared: set[str] = set()

    # -- a row in registers ----------------------------------------------------------------------------------

    def reduce_row(self, s: Reduce, scope: Scope) -> None:
        """The result of a reduction, all of its row at hand."""
        value, dtype = self._value(s, scope)
        kind = _kind(s)
        if kind == "welford":
            self._moments_of_row(s, value, dtype, scope)
            return
        kept = self._where_live(value, literal(_identity(s, kind, dtype), dtype), scope)
        if kind.startswith("arg"):
            self._name(s, 0, f"d.row_{kind}({kept}, r).to(tl.int64)", scope)
            return
        self._finish(s, f"d.row_{kind}({kept})", scope)

    def _moments_of_row(self, s: Reduce, value: str, dtype: torch.dtype, scope: Scope) -> None:
        count = host_text(Tile.extent(self.tile.r))
        kept = self._where_live(value, literal(0.0, dtype), scope)
        mean = self._name(s, 0, f"d.div(d.row_sum({kept}), tl.full([], {count}, {TYPES[dtype]}))", scope)
        away = self.writer.fresh("t")
        scope.lines.append(f"{away} = {value} - {mean}")
        away = self._where_live(away, literal(0.0, dtype), scope)
        self._name(s, 1, f"d.row_sum({away} * {away})", scope)

    def scan_row(self, s: Scan, scope: Scope) -> None:
        """The results of a scan, all of its row at hand."""
        value, dtype = self._value(s, scope)
        kind = _kind(s)
        kept = self._where_live(value, literal(_identity(s, kind, dtype), dtype), scope)
        if kind.startswith("arg"):
            position = f"tl.broadcast_to(r.to(tl.int64), {self.writer.shape(ROW)})"
            scope.lines.append(f"{s.refs[0]}, {s.refs[1]} = d.scan_{kind}({kept}, {position})")
            self._known(s)
            return
        self._finish(s, f"d.scan_{kind}({kept})", scope)

    # -- a row in a loop -------------------------------------------------------------------------------------

    def found_beside(self, s: Reduce) -> set[str]:
        """Results that the statement reads and that are found in the same pass all the same."""
        return {self.maxima[s.refs[0]].refs[0]} if s.refs[0] in self.maxima else set()

    def add(self, s: Reduce, inside: Scope, before: Scope) -> None:
        """Declare the accumulator in `before` and add this tile's values to it."""
        if s.refs[0] in self.beside:
            return
        if s.refs[0] in self.maxima:
            self._add_softmax(self.maxima[s.refs[0]], s, inside, before)
            return
        value, dtype = self._value(s, inside)
        kind, acc = _kind(s), _accumulator(s)
        if kind == "welford":
            self._add_moments(acc, value, dtype, inside, before)
            return
        neutral = literal(_identity(s, kind, dtype), dtype)
        self._start(acc, neutral, dtype, before)
        kept = self._where_live(value, neutral, inside)
        if kind.startswith("arg"):
            self._add_position(kind, acc, kept, inside, before)
            return
        note = f"  # {s.note}" if s.note else ""
        inside.lines.append(f"{acc} = {STEPS[kind].format(acc, kept)}{note}")

    def _add_softmax(self, most: Reduce, total: Reduce, inside: Scope, before: Scope) -> None:
        """A maximum, and the sum of exp(x - maximum)."""
        value, dtype = self._value(most, inside)
        kept = self._where_live(value, literal(-math.inf, dtype), inside)
        top, sums = _accumulator(most), _accumulator(total)
        for name, start in ((top, -math.inf), (sums, 0.0)):
            self._declare(name, f"tl.full([X, R // 8], {literal(start, dtype)}, {TYPES[dtype]})", before)
        note = f"  # {total.note}" if total.note else ""
        inside.lines.append(f"{top}, {sums} = d.grow_softmax({top}, {sums}, {kept}, {_short(total)}){note}")

    def _add_moments(self, acc: str, value: str, dtype: torch.dtype, inside: Scope, before: Scope) -> None:
        """Welford's recurrence, one state for each place of the tile; places that are live have all seen as
        many values."""
        for part in ("mean", "m2"):
            self._start(f"{acc}_{part}", literal(0.0, dtype), dtype, before)
        share, away, gap = self.writer.fresh("t"), self.writer.fresh("t"), f"{value} - {acc}_mean"
        if "r" in self.writer.live:  # an infinity beyond the end would be NaN times 0
            gap = f"tl.where(live_r, {gap}, 0)"
        inside.lines += [
            f"{share} = {typed(1.0, dtype)} / (start // R + 1)",
            f"{away} = {gap}",
            f"{acc}_mean += {away} * {share}",
            f"{acc}_m2 += {away} * ({gap})",
        ]

    def _add_position(self, kind: str, acc: str, kept: str, inside: Scope, before: Scope) -> None:
        places = "tl.broadcast_to(tl.arange(0, R)[None, :].to(tl.int64), [X, R])"
        self._declare(f"{acc}_at", places, before)
        better, sign = self.writer.fresh("t"), ">" if kind == "argmax" else "<"
        inside.lines += [
            f"{better} = ({kept} {sign} {acc}) | (({kept} != {kept}) & ({acc} == {acc}))",
            f"{acc}_at = tl.where({better}, r.to(tl.int64), {acc}_at)",
            f"{acc} = tl.where({better}, {kept}, {acc})",
        ]

    def result(self, s: Reduce, scope: Scope) -> None:
        """Name the result of a reduction, after the loop."""
        kind, acc = _kind(s), _accumulator(s)
        if s.refs[0] in self.maxima:
            top = _accumulator(self.maxima[s.refs[0]])
            self._finish(s, f"d.row_softmax({top}, {acc}, {_short(s)})", scope)
        elif kind == "welford":
            mean, m2 = s.refs
            seen = f"({host_text(Tile.extent(self.tile.r))} - tl.arange(0, R)[None, :] + R - 1) // R"
            scope.lines += [
                f"{acc}_n = ({seen}).to({TYPES[s.value.dtype]})",
                f"{mean}, {m2} = d.row_moments({acc}_mean, {acc}_m2, {acc}_n)",
            ]
            self._known(s)
        elif kind.startswith("arg"):
            self._name(s, 0, f"d.row_{kind}({acc}, {acc}_at)", scope)
        else:
            self._finish(s, f"d.row_{kind}({acc})", scope)

    def scan_step(self, s: Scan, phase: int, inside: Scope, before: Scope) -> None:
        """One tile of a scan, continued from what the tiles before came to."""
        value, dtype = self._value(s, inside)
        kind, carried = _kind(s), f"before{phase}_{s.refs[0]}"
        neutral = literal(_identity(s, kind, dtype), dtype)
        kept = self._where_live(value, neutral, inside)
        self._start(carried, neutral, dtype, before, RESULTS)
        column = "tl.arange(0, R)[None, :]"
        if kind.startswith("arg"):
            best, at = s.refs
            self._start(f"{carried}_at", "0", torch.int64, before, RESULTS)
            inside.lines += [
                f"{best}, {at} = d.scan_{kind}({kept}, tl.broadcast_to(r.to(tl.int64), [X, R]))",
                f"{best}, {at} = d.continue_{kind}({carried}, {carried}_at, {best}, {at})",
                f"{carried} = d.row_last({best}, {column}, R - 1)",
                f"{carried}_at = d.row_last({at}, {column}, R - 1)",
            ]
            self._known(s)
            return
        line = self.writer.fresh("t")
        inside.lines += [
            f"{line} = d.continue_{kind}({carried}, d.scan_{kind}({kept}))",
            f"{carried} = d.row_last({line}, {column}, R - 1)",
        ]
        self._finish(s, line, inside)

    # -- their parts -----------------------------------------------------------------------------------------

    def _value(self, s: Reduce | Scan, scope: Scope) -> tuple[str, torch.dtype]:
        """The value over the whole tile, and its dtype: bools count as int32."""
        text, dtype = self.writer.full(s.value, scope, ROW), s.value.dtype
        if _on_bools(s):
            text = text if dtype == torch.bool else f"({text} != 0)"
            text, dtype = f"{text}.to(tl.int32)", torch.int32
        return text, dtype

    def _where_live(self, text: str, other: str, scope: Scope) -> str:
        if "r" not in self.writer.live:
            return text
        name = self.writer.fresh("t")
        scope.lines.append(f"{name} = tl.where(live_r, {text}, {other})")
        return name

    def _start(self, name: str, value: str, dtype: torch.dtype, before: Scope, dims: Dims = ROW) -> None:
        self._declare(name, f"tl.full({self.writer.shape(dims)}, {value}, {TYPES[dtype]})", before)

    def _declare(self, name: str, value: str, before: Scope) -> None:
        """An accumulator, before the first of the loops that add to it."""
        if name not in self.declared:
            self.declared.add(name)
            before.lines.append(f"{name} = {value}")

    def _finish(self, s: Reduce | Scan, text: str, scope: Scope) -> None:
        """Name a result; one of a bool reduction becomes bool again."""
        self._name(s, 0, f"{text} != 0" if _on_bools(s) else text, scope)

    def _name(self, s: Reduce | Scan, k: int, text: str, scope: Scope) -> str:
        ref = s.refs[k]
        scope.lines.append(f"{ref} = {text}" + (f"  # {s.note}" if s.note else ""))
        self._known(s, ref)
        return ref

    def _known(self, s: Reduce | Scan, *refs: str) -> None:
        """Expressions may read these results (all by default) from here on."""
        for ref in refs or s.refs:
            self.writer.refs[ref] = ref
            self.writer.ref_dims[ref] = ROW if isinstance(s, Scan) else RESULTS


def _softmax_maxima(body: Sequence[Statement]) -> dict[str, Reduce]:
    """By the names of sums of exp(x - m): the maximum m of the same x, one sum for each."""
    maxima = {s.refs[0]: s for s in body if isinstance(s, Reduce) and s.kind == "max"}
    totals = softmax_totals(body).items()
    return {total: maxima.pop(m) for total, (_, m) in totals if m in maxima}


def _short(total: Reduce) -> bool:
    """Whether a softmax's exponentials have the shorter form (idioms.py)."""
    return total.value.op == "exp_below"


def _accumulator(s: Reduce) -> str:
    return f"acc_{s.refs[0]}"


def _on_bools(s: Reduce | Scan) -> bool:
    return s.value.dtype == torch.bool or s.kind in ("any", "all")


def _kind(s: Reduce | Scan) -> str:
    """The kind, in the words of device/; bools reduce as int32 zeros and ones."""
    if s.kind in ("any", "all"):
        return {"any": "max", "all": "min"}[s.kind]
    if s.value.dtype == torch.bool:
        return {"sum": "max", "prod": "min"}.get(s.kind, s.kind)
    return s.kind


def _identity(s: Reduce | Scan, kind: str, dtype: torch.dtype) -> bool | int | float:
    return identity(kind, torch.bool if _on_bools(s) and kind in ("max", "min") else dtype)
