"""Attention as Triton: a tile of queries meets keys and values in steps, scores never reach memory.

    out[z, h, i] = softmax over j of (scale * q[z, h, i] . k[z, h', j] + mask[z, h, i, j]) @ v[z, h', j]

h' = h // group. A mask has whatever strides it has (0 where it is spread), and is added or, of bools, opens.
causal: j <= i. A row that is closed everywhere gives zeros. Few queries of one group of heads are rows of one
tile, so that keys and values are read once for all of them.

Where there are fewer tiles than multiprocessors (a token at a time over a long cache), keys are split in
parts, a program each: what a part gives, unscaled, goes to scratch memory with its largest score and its sum,
and a second kernel weighs the parts, in a fixed order ("flash decoding", Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.defs import View
from dicp.vendor.cuda_graph.expression import TYPES, host_text, literal
from dicp.vendor.cuda_graph.module import INDENT
from dicp.vendor.cuda_graph.templates import Launched, Operand, make, number

LOG2E = 1.4426950408889634
MERGED = 2048
"""Results of a program that weighs parts."""


@dataclass(frozen=True)
class Tiling:
    """Queries and keys of a tile (powers of two), warps, stages of the pipeline, parts of the keys."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    parts: int = 1

    def __str__(self) -> str:
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"{self.queries} queries, {self.keys} keys{parts}"

    def interpreted(self) -> Tiling:
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


def kernels(
    a: Attention, tiling: Tiling, origins: Sequence[str], interpreted: bool = False
) -> list[Launched]:
    """The launches that compute attention."""
    tiling = tiling.interpreted() if interpreted else tiling
    split = tiling.parts > 1
    operands = [o for o in a.operands if not split or o not in (a.out, a.log_sum)]
    results = _part(a, tiling) if split else _results(a)
    body = [*_place(a, tiling), *_queries(a), *_steps(a, tiling), *results]
    constants = {"BM": tiling.queries, "BN": tiling.keys, "BD": _power_of_two(a.depth)}
    heads = a.heads // a.group if a.packed else a.heads
    grid = f"({host_text(a.batch)}) * {heads} * {_tiles(a)}".replace("BM", str(tiling.queries))
    grid += f" * {tiling.parts}" if split else ""
    scratch = _scratch(a, tiling)
    params = [(o.name, o.dtype, o in (a.out, a.log_sum), o.view.span) for o in operands]
    views: list[View | None] = [o.view for o in operands]
    if split:
        params.append(("scratch", torch.float32, True, scratch))
        views.append(None)
    template = make(
        "attention",
        [*_about(a), str(tiling)],
        params,
        a.extents,
        constants | {"BV": _power_of_two(a.value_depth)},
        body,
        grid,
        origins,
        tiling.warps,
        tiling.stages,
    )
    first = Launched(template, tuple(views), scratch)
    return [first, _merge(a, tiling, origins)] if split else [first]


def _about(a: Attention) -> list[str]:
    """What is computed, for the reader of the module."""
    kind = "bool mask, " if a.mask is not None and a.mask.dtype == torch.bool else "mask, " if a.mask else ""
    return [
        f"attention: {kind}{'causal, ' if a.causal else ''}scale {a.scale}",
        f"z < {host_text(a.batch)}, h < {a.heads}, i < {host_text(a.rows)}, j < {host_text(a.columns)}, "
        f"depth {a.depth}, of values {a.value_depth}, groups of {a.group} heads",
    ]


def _power_of_two(n: int) -> int:
    return max(16, 1 << max(0, n - 1).bit_length())


def _tiles(a: Attention) -> str:
    rows = f"({number(a.rows)} * {a.group})" if a.packed else number(a.rows)
    return f"(({rows} + BM - 1) // BM)"


def _place(a: Attention, tiling: Tiling) -> list[str]:
    """Names part, z, head, kv_head and query, of a program or of each row of its tile."""
    heads = a.heads // a.group if a.packed else a.heads
    parts = [f"part = program % {tiling.parts}", f"program = program // {tiling.parts}"]
    lines = [
        f"tiles = {_tiles(a)}",
        "program = tl.program_id(0)",
        *(parts if tiling.parts > 1 else []),
        "tile = program % tiles",
        "row = tile * BM + tl.arange(0, BM)[:, None]",
        f"z = (program // (tiles * {heads})).to(INDEX)",
    ]
    if a.packed:
        return [
            *lines,
            f"kv_head = (program // tiles % {heads}).to(INDEX)",
            f"head = kv_head * {a.group} + row // {number(a.rows)}",
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


def _range(a: Attention, tiling: Tiling) -> tuple[list[str], str]:
    """(lines, the loop over keys): all that are open to the tile, of the program's part."""
    columns, begin, end = host_text(a.columns), "0", host_text(a.columns)
    lines = []
    if tiling.parts > 1:
        begin, end = "begin", "end"
        lines = [
            f"chunk = ({columns} + {tiling.parts} * BN - 1) // ({tiling.parts} * BN) * BN",
            "begin = part * chunk",
            f"end = tl.minimum(begin + chunk, {columns})",
        ]
    if a.causal and not a.packed:
        lines.append(f"end = tl.minimum((tile + 1) * BM, {end})  # keys beyond are closed")
        end = "end"
    return lines, f"for start in range({begin}, {end}, BN):"


def _steps(a: Attention, tiling: Tiling) -> list[str]:
    columns = host_text(a.columns)
    before, loop = _range(a, tiling)
    k = a.k.at("z", "kv_head", "key", "deep", full=True)
    v = a.v.at("z", "kv_head", "position", "wide", full=True)
    low = a.v.dtype in ex.LOW_PRECISION
    scale = literal(a.scale, torch.float32)
    weights = f"d.narrow(weights, {TYPES[a.v.dtype]})" if low else "weights"
    inside = [
        "key = (start + tl.arange(0, BN)[None, :]).to(INDEX)",
        f"live_k = key < {columns}",
        f"keys = {_masked(k, ['live_k', *_deep(a.depth, 'deep')])}",
        f'scores = d.dot(queries, keys, tl.full([BM, BN], 0.0, tl.float32), "{a.precision}") * {scale}',
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
        *before,
        loop,
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


def _results(a: Attention, live_row: str = "") -> list[str]:
    """From what was summed to the results; live_row: what besides the sums' rows limits a program's."""
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
    rows = live_row or f"query < {host_text(a.log_rows)}"
    return [
        *lines,
        f'log_sums = tl.where({beyond}, best + d.log(tl.where(total == 0, 1.0, total)), float("inf"))',
        f"tl.store({where}, log_sums, mask={rows})",
    ]


# -- parts of the keys ---------------------------------------------------------------------------------------


def _record(a: Attention) -> int:
    """Floats that a part leaves of a row: its values, its largest score, its sum; rows begin at 16 bytes."""
    return -(-(a.value_depth + 2) // 4) * 4


def _scratch(a: Attention, tiling: Tiling) -> Index:
    rows = ix.product((a.batch, a.heads, a.rows))
    return rows * (tiling.parts * _record(a)) if tiling.parts > 1 else 0


def _kept(a: Attention) -> str:
    """Names where a part's records of the rows lie."""
    rows = number(ix.product((a.batch, a.heads, a.rows)))
    row = f"(z * {a.heads} + head) * {number(a.rows)} + query"
    return f"record = scratch + (part * {rows} + {row}).to(INDEX) * {_record(a)}"


def _part(a: Attention, tiling: Tiling) -> list[str]:
    """What a part has found out goes to scratch memory."""
    live = " & ".join(["live_q", *_deep(a.value_depth, "wide")])
    return [
        _kept(a),
        f"tl.store(record + wide, acc, mask={live})",
        f"tl.store(record + {a.value_depth}, best, mask=live_q)",
        f"tl.store(record + {a.value_depth + 1}, total, mask=live_q)",
    ]


def _merge(a: Attention, tiling: Tiling, origins: Sequence[str]) -> Launched:
    """Weighs the parts and writes the results."""
    tall = a.rows if a.log_sum is None else a.log_rows
    rows = ix.product((a.batch, a.heads, tall))
    width = _power_of_two(a.value_depth)
    height = max(1, MERGED // width)
    loop = [f"for part in range({tiling.parts}):", INDENT + _kept(a)]
    largest = f'tl.load(record + {a.value_depth}, mask=live_q, other=float("-inf"))'
    values = _masked("record + wide", ["live_q", *_deep(a.value_depth, "wide")])
    body = [
        "row = (tl.program_id(0).to(INDEX) * BM + tl.arange(0, BM))[:, None]",
        f"z = row // {number(ix.product((a.heads, tall)))}",
        f"head = row // {number(tall)} % {a.heads}",
        f"query = row % {number(tall)}",
        f"live_q = (row < {number(rows)}) & (query < {host_text(a.rows)})",
        "wide = tl.arange(0, BV)[None, :].to(INDEX)",
        'best = tl.full([BM, 1], float("-inf"), tl.float32)',
        "total = tl.full([BM, 1], 0.0, tl.float32)",
        "acc = tl.full([BM, BV], 0.0, tl.float32)",
        *loop,
        f"{INDENT}best = d.maximum(best, {largest})",
        'base = tl.where(best == float("-inf"), 0.0, best)',
        *loop,
        f"{INDENT}fade = tl.exp2(({largest} - base) * {LOG2E!r})",
        f"{INDENT}total += fade * {_masked(f'record + {a.value_depth + 1}', ['live_q'])}",
        f"{INDENT}acc += fade * {values}",
        *_results(a, f"row < {number(rows)}"),
    ]
    operands = [o for o in (a.out, a.log_sum) if o is not None]
    params = [("scratch", torch.float32, False, _scratch(a, tiling))]
    params += [(o.name, o.dtype, True, o.view.span) for o in operands]
    template = make(
        "attention_merge",
        [*_about(a), f"the {tiling.parts} parts of the keys, weighed"],
        params,
        a.extents,
        {"BM": height, "BV": width},
        body,
        f"({host_text(rows)} + {height - 1}) // {height}",
        origins,
        4,
    )
    return Launched(template, (None, *(o.view for o in operands)), _scratch(a, tiling))


__all__ = ["Attention", "Tiling", "kernels"]
