"""Long reductions with few results, split in two so that every core has work.

    out[c] = sum over (n, h, w) x[n, h, w, c]   ->   part[n, c] = sum over (h, w) x[n, h, w, c];  out[c] =
    sum over n part[n, c]

Splitting also bounds the rounding error of long float sums: partial sums are added pairwise-like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.value import Indices, Shape, Value
from dicp.vendor.base import Machine

MIN_ROW = 4096  # contiguous elements under one result below which a split costs more than it brings
MIN_WORK = 1 << 16  # elements in all
SPLITTABLE = ("sum", "prod", "max", "min", "any", "all", "welford")
LONG_CHAIN = 1024  # values added one after the other above which float error asks for more pieces
MIN_CHAIN = 32  # values a piece has at least: each piece is a result that is read again
COLUMN_VECTORS = 4  # vectors of results a thread takes at a time when they are contiguous


@dataclass(frozen=True)
class Split:
    """`lead` leading dims of the extent become results; with `factor`, the next is cut into that many
    pieces. inside: the parts of a result lie side by side, as what they are of does (a group's channels,
    channels-last), else all results of a part do."""

    lead: int
    factor: int | None
    inside: bool = False

    def build(
        self,
        builder: Any,
        kind: str,
        shape: Shape,
        extent: Shape,
        dtypes: tuple[torch.dtype, ...],
        fn: Callable[[Indices, Indices], Expr],
    ) -> tuple[Value, ...]:
        head, tail = extent[: self.lead], extent[self.lead :]
        if self.factor is not None:
            assert isinstance(tail[0], int)
            piece = tail[0] // self.factor
            head, tail = (*head, self.factor), (piece, *tail[1:])

            def ridx(part: Indices, rest: Indices) -> Indices:
                return (*part[:-1], part[-1] * piece + rest[0], *rest[1:])
        else:

            def ridx(part: Indices, rest: Indices) -> Indices:
                return (*part, *rest)

        at = len(shape) if self.inside else 0
        n = at + len(head)

        def partial(idx: Indices, rest: Indices) -> Expr:
            return fn((*idx[:at], *idx[n:]), ridx(idx[at:n], rest))

        def place(i: Indices, r: Indices) -> Indices:
            return (*i[:at], *r, *i[at:])

        wide = fn(builder.index_vars(shape), builder.index_vars(extent, "r")).dtype
        if kind == "welford":  # few values: kept in double, so that joining them loses nothing
            parts_in = torch.float64
        else:
            parts_in = torch.bool if kind in ("any", "all") else wide
        part_dtypes = tuple(parts_in for _ in dtypes)
        parts = builder.reduction(kind, place(shape, head), tail, part_dtypes, partial)
        if kind == "welford":
            count = ix.product(tail)
            mean, m2 = builder.reduction(
                "welford", shape, head, (dtypes[0], torch.float64), lambda i, r: parts[0](place(i, r))
            )
            (rest,) = builder.reduction(
                "sum", shape, head, (torch.float64,), lambda i, r: parts[1](place(i, r))
            )
            scale = ex.cast(ex.index_value(count), torch.float64)
            return mean, Value(shape, dtypes[1], lambda i: ex.cast(rest(i) + scale * m2(i), wide))
        return tuple(builder.reduction(kind, shape, head, dtypes, lambda i, r: parts[0](place(i, r))))


def split_extent(
    kind: str, shape: Shape, extent: Shape, sample: Expr, buffers: dict[str, Any], machine: Machine
) -> Split | None:
    """How to split, or None. Sizes must be static: a symbolic extent is reduced whole."""
    if kind not in SPLITTABLE or not all(isinstance(n, int) for n in (*shape, *extent)):
        return None
    results, under = _count(shape), _count(extent)
    threads = machine.threads
    if results * under < MIN_WORK or threads == 1:
        return None
    last = next((k for k in range(len(extent) - 1, -1, -1) if extent[k] != 1), 0)
    rows = _rows(sample, Var(f"r{last}", extent[last]), buffers)
    enough = 4 * threads * (1 if rows else COLUMN_VECTORS * machine.lanes)
    if under < (MIN_ROW if rows else machine.split_columns) or results >= enough:
        return None
    total, chosen = 1, 0
    for lead in range(1, len(extent)):
        before, total = total, _count(extent[:lead])
        rest = under // total
        if chosen and (rest < MIN_CHAIN or under // before <= LONG_CHAIN):
            break
        if total > machine.most_pieces:
            break
        if total >= threads and rest >= max(16, machine.least_piece):
            chosen = lead
    if chosen:
        return Split(chosen, None, _lies_inside(sample, shape, extent[:chosen], buffers))
    spare = (machine.most_results if rows else machine.most_columns) * enough // max(results, 1)
    return _cut(extent, threads, min(spare, under // machine.least_piece, machine.most_pieces))


def _cut(extent: Shape, threads: int, most: int) -> Split | None:
    """Leading dims, and the next in parts: at most so many pieces."""
    others = (*range(threads + 1, 65), *range(min(threads, 65) - 1, 1, -1))
    for pieces in (8 * threads, 4 * threads, 2 * threads, threads, *others):
        before = 1
        for lead, n in enumerate(extent):
            assert isinstance(n, int)
            factor, rest = divmod(pieces, before)
            if pieces > most or rest or factor <= 1:
                break
            if n % factor == 0 and n > factor:
                return Split(lead, factor)
            before *= n
    return None


def _count(xs: Shape) -> int:
    out = 1
    for x in xs:
        assert isinstance(x, int)
        out *= x
    return out


def _lies_inside(sample: Expr, shape: Shape, head: Shape, buffers: dict[str, Any]) -> bool:
    """Whether parts are nearer to each other than results are, in most of what is read of both."""
    dims = [k for k, n in enumerate(shape) if n != 1]
    parts = [Var(f"r{k}", n) for k, n in enumerate(head) if n != 1]
    if not dims or not parts:
        return False
    result, votes = Var(f"i{dims[-1]}", shape[dims[-1]]), 0
    for e in ex.walk(sample):
        if e.op == "at" and e.args[0] in buffers:
            flat = buffers[e.args[0]].flat(e.args[1])
            steps = [ix.coefficient(flat, v) for v in (result, parts[-1])]
            apart, near = (s[0] if s is not None and isinstance(s[0], int) else 0 for s in steps)
            if apart and near:
                votes += 1 if abs(near) < abs(apart) else -1
    return votes > 0


def _rows(sample: Expr, inner: Var, buffers: dict[str, Any]) -> bool:
    """Whether the innermost reduced dim is contiguous in (most of) what is read."""
    votes = 0
    for e in ex.walk(sample):
        if e.op == "at" and e.args[0] in buffers:
            at = buffers[e.args[0]].flat(e.args[1])
            if ix.depends(at, inner):  # what does not move along the dim has no say
                votes += 1 if ix.moves_by_one(at, inner) else -1
    return votes > 0
