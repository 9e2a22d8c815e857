"""Linear layers of the same few rows, with a norm before them or a gate behind: one launch of a template
(templates/linears.py), where reading the weights is all the time there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from dicp.config import Config
from dicp.ir.value import Value
from dicp.ops.library import NARROW_WEIGHTS
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph import products
from dicp.vendor.cuda_graph.templates import Launched, Operand, claim
from dicp.vendor.cuda_graph.templates.linears import Linears, kernels
from dicp.vendor.cuda_graph.templates.product import MAX_ROWS, Tiling

MOST = 6  # weights of a launch


def supports(node: fx.Node) -> bool:
    """Whether the call is ahead of one for each layer: rows are few, and weights are dense."""
    x, norm, ws, scales, bs = (map_arg(node.args[k], lambda n: n.meta["val"]) for k in (0, 1, 3, 4, 5))
    k, dtype = x.shape[-1], x.dtype
    sizes = (*x.shape, *(n for v in (*ws, *scales, *bs) for n in v.shape))
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    if math.prod(x.shape[:-1]) > MAX_ROWS or len(ws) > MOST:
        return False
    if (norm is not None and tuple(norm.shape) != (k,)) or any(v.dim() > 1 for v in scales):
        return False
    if _cut(x, ws).split > 1:  # a few narrow layers of a deep operand, each in parts along it
        return False
    added = [*scales, *bs, *([] if norm is None else [norm])]
    floats = dtype in products.FLOATS and all(v.dtype in products.FLOATS for v in added)
    dense = all(v.dtype in (dtype, *NARROW_WEIGHTS) and tuple(v.stride()) == (k, 1) for v in ws)
    return floats and dense


def candidates(node: fx.Node, config: Config) -> list[Claim]:
    """The claims of the call, the one to take without measuring first."""
    return [_template(node, config, tiling) for tiling in _tilings(node)]


def _tilings(node: fx.Node) -> list[Tiling]:
    """As a product's of as many columns; gated, half of them from each of two weights."""
    x, ws = (map_arg(node.args[k], lambda n: n.meta["val"]) for k in (0, 3))
    cuts = [_cut(x, ws, wide) for wide in (False, True)]
    share = 2 if node.args[7] else 1
    return list(dict.fromkeys(replace(p, n=max(1, p.n // share), split=1) for p in cuts))


def _cut(x: torch.Tensor, ws: Sequence[torch.Tensor], wide: bool = False) -> Tiling:
    """How a product of all the columns is cut."""
    rows, columns = math.prod(x.shape[:-1]), sum(w.shape[0] for w in ws)
    return products.few_rows(rows, columns, x.shape[-1], 1, ws[0].dtype, True, wide)


def _template(node: fx.Node, config: Config, tiling: Tiling) -> Claim:
    def made(c: Call) -> Sequence[Launched]:
        return kernels(_linears(c), tiling, (c.note,) if c.note else (), config.interpret)

    return claim(f"linears: Triton {tiling}", made, prepare=_dense)


def _dense(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """Every operand row-major."""

    def dense(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return [dense(each) for each in a]
        return lowering.operand(a, dense=True) if isinstance(a, Value) else a

    return [dense(a) for a in args]


def _linears(c: Call) -> Linears:
    x, norm, eps, w, scale, b, act, gated = c.args
    m, k = math.prod(x.shape[:-1]), x.shape[-1]

    def named(stem: str, views: Sequence[View], *strides: int) -> tuple[Operand, ...]:
        return tuple(Operand(f"{stem}{i}", v, strides) for i, v in enumerate(views))

    results = [View(y, y.shape, y.strides) for y in c.outputs]
    return Linears(
        m,
        k,
        Operand("x", x, (k, 1)),
        None if norm is None else Operand("norm", norm, (1,)),
        eps,
        named("w", w, k, 1),
        tuple(Operand(f"scale{i}", v, tuple(v.strides) or (0,)) for i, v in enumerate(scale)),
        named("bias", b, 1),
        named("out", results, 1),
        act,
        gated,
    )


__all__ = ["candidates", "supports"]
