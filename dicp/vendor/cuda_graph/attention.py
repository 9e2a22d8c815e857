"""Who computes attention: a kernel that torch ships, or the template (templates/attention.py).

torch's serve what they were made for. The template comes first where they would be given copies: a mask of
bools, of another dtype, or besides causal; values of another depth; a mask with grouped heads. And where a
mask meets few queries and many keys (a token with a static cache): of torch's kernels only those without
masks split keys among multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.schedule.defs import Buffer, Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph.products import FLOATS, multiprocessors, precision
from dicp.vendor.cuda_graph.templates import Launched, Operand, claim
from dicp.vendor.cuda_graph.templates.attention import Attention, Tiling, kernels

aten = torch.ops.aten
MAX_DEPTH = 256
PACKED_ROWS = 16
"""Queries up to which those of a group of heads are one tile."""
MAX_PARTS = 32


def arguments(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """(q, k, v, mask, causal, scale, dropout) of a call of attention."""
    if target is torch.ops.dicp.attention.default:
        q, k, v, mask, causal, scale = (*args, *[None] * 6)[:6]
        return q, k, v, mask, bool(causal), scale, 0.0
    if target is aten._scaled_dot_product_efficient_attention.default:
        q, k, v, mask, _, dropout, causal = (*args, *[False] * 7)[: max(len(args), 7)][:7]
    else:
        q, k, v, dropout, causal = (*args, *[False] * 5)[:5]
        mask = kwargs.get("attn_mask")
    return q, k, v, mask or None, bool(causal), kwargs.get("scale"), float(dropout or 0.0)


def candidates(node: fx.Node, config: Config, library: Claim) -> list[Claim]:
    """The claims of attention, the one to take without measuring first."""
    q, k, v, mask, causal, _, dropout = arguments(node.target, node.args, node.kwargs)
    if config.numerics == "eager" or dropout != 0.0:
        return [library]
    vals = [a.meta["val"] for a in (q, k, v)]
    if not all(t.dim() == 4 and t.dtype == vals[0].dtype and t.dtype in FLOATS for t in vals):
        return [library]
    known = [vals[0].shape[1], vals[1].shape[1], vals[0].shape[3], vals[2].shape[3]]
    if not all(isinstance(n, int) and n for n in known) or known[0] % known[1] or max(known[2:]) > MAX_DEPTH:
        return [library]
    given = None if mask is None else mask.meta["val"]
    if given is not None and not (given.dtype == torch.bool or given.dtype.is_floating_point):
        return [library]
    cuts = tilings(*vals)
    made = [_template(node, config, tiling) for tiling in cuts]
    copies = given is not None and (causal or given.dtype != vals[0].dtype or known[0] != known[1])
    split = given is not None and cuts[0].parts > 1 and _tile_rows(vals[0], vals[1]) <= PACKED_ROWS
    first = copies or split or known[2] != known[3]
    return [made[0], library, *made[1:]] if first else [library, *made]


def tilings(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Tiling]:
    """Ways to cut attention, best first."""
    whole = _whole_tilings(q, k, v)
    parts = _parts(q, k, whole[0])
    return [replace(whole[0], parts=parts), *whole] if parts > 1 else whole


def _parts(q: torch.Tensor, k: torch.Tensor, tiling: Tiling) -> int:
    """Parts of the keys until there are two programs for each multiprocessor, each of at least two steps."""
    heads = k.shape[1] if _packs(q, k) else q.shape[1]
    programs = size_hint(q.shape[0]) * heads * -(-_tile_rows(q, k) // tiling.queries)
    parts = 1
    while (
        parts < MAX_PARTS
        and programs * parts < 2 * multiprocessors()
        and size_hint(k.shape[2]) >= 4 * parts * tiling.keys
    ):
        parts *= 2
    return parts


def _whole_tilings(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Tiling]:
    rows, depth = _tile_rows(q, k), max(q.shape[3], v.shape[3])
    most = 128 if q.dtype != torch.float32 and depth <= 128 else 64 if depth <= 128 else 32
    queries = next((n for n in (16, 32, 64) if n >= rows and n <= most), most)
    keys = 64 if q.dtype != torch.float32 and depth <= 128 else 32
    out = [Tiling(queries, keys, 8 if queries == 128 else 4), Tiling(queries, keys // 2)]
    return out + ([Tiling(queries // 2, keys)] if queries > 16 else [])


def _packs(q: Any, k: Any) -> bool:
    rows = q.shape[2]
    return q.shape[1] != k.shape[1] and isinstance(rows, int) and rows <= PACKED_ROWS


def _tile_rows(q: torch.Tensor, k: torch.Tensor) -> int:
    return size_hint(q.shape[2]) * (q.shape[1] // k.shape[1] if _packs(q, k) else 1)


def _template(node: fx.Node, config: Config, tiling: Tiling) -> Claim:
    def made(c: Call) -> Sequence[Launched]:
        return kernels(_attention(c), tiling, (c.note,) if c.note else (), config.interpret)

    return claim(f"attention: Triton {tiling}", made)


def _attention(c: Call) -> Attention:
    q, k, v, mask, causal, scale, _ = arguments(c.node.target, c.args, c.kwargs)
    results = [b for b in c.results if isinstance(b, Buffer)]
    log_sum = _log_sum(c)
    packed = _packs(q, k) and log_sum is None
    return Attention(
        q.shape[0],
        q.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        causal,
        Operand("q", q, q.strides),
        Operand("k", k, k.strides),
        Operand("v", v, v.strides),
        _whole("out", results[0]),
        None if mask is None else Operand("mask", mask, _spread(mask)),
        log_sum,
        log_sum.view.shape[2] if log_sum is not None else 0,
        packed,
        precision(),
    )


def _log_sum(c: Call) -> Operand | None:
    """The second result, where somebody wants it."""
    if c.node.target is torch.ops.dicp.attention.default or not isinstance(c.results[1], Buffer):
        return None
    return (
        _whole("log_sum", c.results[1]) if len(c.results[1].shape) == 3 and c.results[1].numel != 0 else None
    )


def _whole(name: str, b: Buffer) -> Operand:
    return Operand(name, View(b, b.shape, b.strides), b.strides)


def _spread(mask: View) -> tuple[Any, ...]:
    """A mask's strides along (z, h, i, j); 0 where it has one element for all."""
    strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.strides, strict=True)]
    return (*[0] * (4 - len(strides)), *strides)


__all__ = ["candidates", "tilings"]
