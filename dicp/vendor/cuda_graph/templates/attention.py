"""Attention as Triton: a tile of queries meets keys and values in steps, scores never reach memory.

    out[z, h, i] = softmax over j of (scale * q[z, h, i] . k[z, h', j] + mask[z, h, i, j]) @ v[z, h', j]

h' = h // group. A mask has whatever strides it has (0 where it is spread), and is added or, of bools, opens.
causal: j <= i. A row that is closed everywhere gives zeros. Few queries of one group of heads are rows of one
tile, so that keys and values are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir.index import Index
from dicp.vendor.cuda_graph.expression import TYPES, host_text
from dicp.vendor.cuda_graph.module import INDENT
from dicp.vendor.cuda_graph.templates import Launched, Operand, make, number

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Plan:
    """Queries and keys of a tile (powers of two), warps, stages of the pipeline."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        return f"{self.queries} queries, {self.keys} keys"

    def interpreted(self) -> Plan:
        """The same in small, so that small sizes have tails and several steps."""
        return replace(self, queries=min(self.queries, 32), keys=16)


@dataclass(frozen=True)
class Attention:
    """Sizes and operands. Axes: q, out (z, h, i, depth), k, v (z, h', j, depth), mask (z, h, i, j), log_sum
    (z, h, i).

    log_rows: rows that log_sum has; those beyond the queries become infinity, as closed rows do: exp(score -
    log_sum) is then 0. packed: the queries of a group of heads are rows of one tile.
    """

    batch: Index
    heads: int
    group: int
    rows: Index
    columns: Index
    depth: int
    value_depth: int
    scale: float
    causal: bool
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    mask: Operand | None = None
    log_sum: Operand | None = None
    log_rows: Index = 0
    packed: bool = False
    precision: str = "ieee"

    @property
    def operands(self) -> list[Operand]:
        return [o for o in (self.q, self.k, self.v, self.mask, self.out, self.log_sum) if o is not None]

    @property
    def extents(self) -> list[Index]:
        strides = [s for o in self.operands for s in o.strides]
        return [self.batch, self.rows, self.columns, self.log_rows, *strides]


def kernels(a: Attention, plan: Plan, origins: Sequence[str], interpreted: bool = False) -> list[Launched]:
    """The launch that computes attention."""
    plan = plan.interpreted() if interpreted else plan
    constants = {
        "BM": plan.queries,
        "BN": plan.keys,
        "BD": _power_of_two(a.depth),
        "BV": _power_of_two(a.value_depth),
    }
    body = [*_place(a), *_queries(a), *_steps(a), *_results(a)]
    written = (a.out, a.log_sum)
    params = [(o.name, o.dtype, o in written, o.view.span) for o in a.operands]
    kind = "bool mask, " if a.mask is not None and a.mask.dtype == torch.bool else "mask, " if a.mask else ""
    about = [
        f"attention: {kind}{'causal, ' if a.causal else ''}scale {a.scale}",
        f"z < {host_text(a.batch)}, h < {a.heads}, i < {host_text(a.rows)}, j < {host_text(a.columns)}, "
        f"depth {a.depth}, of values {a.value_depth}, groups of {a.group} heads",
        str(plan),
    ]
    heads = a.heads // a.group if a.packed else a.heads
    grid = f"({host_text(a.batch)}) * {heads} * {_tiles(a)}".replace("BM", str(plan.queries))
    template = make(
        "attention", about, params, a.extents, constants, body, grid, origins, plan.warps, plan.stages
    )
    return [Launched(template, tuple(o.view for o in a.operands))]


def _power_of_two(n: int) -> int:
    return max(16, 1 << max(0, n - 1).bit_length())


def _tiles(a: Attention) -> str:
    rows = f"({number(a.rows)} * {a.group})" if a.packed else number(a.rows)
    return f"(({rows} + BM - 1) // BM)"


def _place(a: Attention) -> list[str]:
    """Names z, head, kv_head and query, of a program or of each row of its tile."""
    heads = a.heads // a.group if a.packed else a.heads
    lines = [
        f"tiles = {_tiles(a)}",
        "program = tl.program_id(0)",
        "tile = program % tiles",
        "row = tile * BM + tl.arange(0, BM)[:, None]",
        f"z = (program // (tiles * {heads})).to(INDEX)",
    ]
    if a.packed:
        return [
            *lines,
            f"kv_head = program // tiles % {heads}",
            f"head = (kv_head * {a.group} + row // {number(a.rows)}).to(INDEX)",
            f"query = (row % {number(a.rows)}).to(INDEX)",
            f"live_q = row < {number(a.rows)} * {a.group}",
        ]
    return [
        *lines,
        f"head = (program // tiles % {heads}).to(INDEX)",
        f"kv_head = head // {a.group}" if a.group != 1 else "kv_head = head",
        "query = row.to(INDEX)",
        f"live_q = query < {host_text(a.rows)}",
    ]


def _masked(address: str, live: Sequence[str]) -> str:
    return f"tl.load({address}, mask={' & '.join(live)}, other=0)" if live else f"tl.load({address})"


def _deep(size: int, name: str) -> list[str]:
    """The mask along a depth that is no power of two."""
    return [f"({name} < {size})"] if size != _power_of_two(size) else []


def _queries(a: Attention) -> list[str]:
    q = _masked(a.q.at("z", "head", "query", "depth", full=True), ["live_q", *_deep(a.depth, "depth")])
    return [
        "depth = tl.arange(0, BD)[None, :].to(INDEX)",
        f"queries = {q}",
        'best = tl.full([BM, 1], float("-inf"), tl.float32)',
        "total = tl.full([BM, 1], 0.0, tl.float32)",
        "acc = tl.full([BM, BV], 0.0, tl.float32)",
    ]


def _steps(a: Attention) -> list[str]:
    columns = host_text(a.columns)
    causal_end = a.causal and not a.packed
    k = a.k.at("z", "kv_head", "key", "deep", full=True)
    v = a.v.at("z", "kv_head", "position", "wide", full=True)
    low = a.v.dtype in ex.LOW_PRECISION
    weights = f"d.narrow(weights, {TYPES[a.v.dtype]})" if low else "weights"
    inside = [
        "key = (start + tl.arange(0, BN)[None, :]).to(INDEX)",
        f"live_k = key < {columns}",
        f"keys = {_masked(k, ['live_k', *_deep(a.depth, 'deep')])}",
        f'scores = d.dot(queries, keys, tl.full([BM, BN], 0.0, tl.float32), "{a.precision}") * {a.scale!r}',
        *_mask(a),
        f'scores = tl.where({"live_k & (key <= query)" if a.causal else "live_k"}, scores, float("-inf"))',
        "top = d.maximum(best, d.row_max(scores))",
        'base = tl.where(top == float("-inf"), 0.0, top)',
        f"weights = tl.exp2((scores - base) * {LOG2E!r})",
        f"fade = tl.exp2((best - base) * {LOG2E!r})",
        "total = total * fade + d.row_sum(weights)",
        "position = (start + tl.arange(0, BN)[:, None]).to(INDEX)",
        f"values = {_masked(v, [f'(position < {columns})', *_deep(a.value_depth, 'wide')])}",
        f'acc = d.dot({weights}, values, acc * fade, "{a.precision}")',
        "best = top",
    ]
    return [
        "deep = tl.arange(0, BD)[:, None].to(INDEX)",
        "wide = tl.arange(0, BV)[None, :].to(INDEX)",
        *([f"end = tl.minimum((tile + 1) * BM, {columns})  # keys beyond are closed"] if causal_end else []),
        f"for start in range(0, {'end' if causal_end else columns}, BN):",
        *(INDENT + line for line in inside),
    ]


def _mask(a: Attention) -> list[str]:
    if a.mask is None:
        return []
    read = _masked(a.mask.at("z", "head", "query", "key", full=True), ["live_q", "live_k"])
    if a.mask.dtype == torch.bool:
        return [f'scores = tl.where({read}, scores, float("-inf"))']
    if a.mask.dtype in ex.LOW_PRECISION:
        read = f"d.widen({read})"
    elif a.mask.dtype != torch.float32:
        read = f"{read}.to(tl.float32)"
    return [f"scores = scores + {read}"]


def _results(a: Attention) -> list[str]:
    low = a.out.dtype in ex.LOW_PRECISION
    kept = f"d.narrow(y, {TYPES[a.out.dtype]})" if low else "y"
    live = " & ".join(["live_q", *_deep(a.value_depth, "wide")])
    lines = [
        "y = acc / tl.where(total == 0, 1.0, total)",
        f"tl.store({a.out.at('z', 'head', 'query', 'wide', full=True)}, {kept}, mask={live})",
    ]
    if a.log_sum is None:
        return lines
    beyond = "live_q & (total != 0)"
    where = a.log_sum.at("z", "head", "query", full=True)
    return [
        *lines,
        f'log_sums = tl.where({beyond}, best + d.log(tl.where(total == 0, 1.0, total)), float("inf"))',
        f"tl.store({where}, log_sums, mask=query < {host_text(a.log_rows)})",
    ]


__all__ = ["Attention", "Plan", "kernels"]
