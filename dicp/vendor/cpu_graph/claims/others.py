"""Pooling, sorting and dropout by functions of ATen's C interface."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from dicp.config import Config
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import (
    SHIM,
    aten,
    channels_last,
    full_args,
    in_layout,
    lists,
    order_in_memory,
)
from dicp.vendor.cpu_graph.claims.images import CHANNELS_LAST


def pool(node: fx.Node, config: Config) -> Claim | None:
    """ATen's, where it is not behind a generated kernel: the backward, and channels-last images of which the
    places are wanted as well. Of row-major ones, and where nobody asks for places, it is: scripts/pools.py.
    """
    backward = node.target is aten.max_pool2d_with_indices_backward.default
    if not backward and not (_wants_places(node) and order_in_memory(node.args[0]) == CHANNELS_LAST):
        return None

    def emit(w: Any, c: Call) -> None:
        args = full_args(node.target, c.args, c.kwargs)
        tensors = 2 if backward else 1
        kernel, stride, pad, dilation, ceil = args[tensors : tensors + 5]
        pair = [list(x) * (2 // len(x)) if x else [] for x in (kernel, stride, pad, dilation)]
        handles = [w.tensor(t) for t in args[:tensors]]
        rest = [w.tensor(args[7])] if backward else []
        w.call(
            c,
            f"{SHIM}max_pool2d_with_indices{'_backward' if backward else ''}",
            [*handles, *lists(w, *pair), str(int(ceil)), *rest],
        )

    def strides(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Any:
        from dicp.schedule.strides import dense_strides

        val = n.meta["val"]
        vals = val if isinstance(val, (tuple, list)) else [val]
        x = args[1 if backward else 0]
        d = vals[0].dim()
        order = (0, *range(2, d), 1) if d == 4 and channels_last(x) else tuple(range(d))
        return [dense_strides(tuple(lowering.index(s) for s in v.shape), order) for v in vals]

    def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        count = 2 if backward else 1
        return (*(in_layout(lowering, n, args, k) for k in range(count)), *args[count:])

    return Claim("max_pool2d", emit, strides=strides, prepare=prepare)


def _wants_places(node: fx.Node) -> bool:
    return any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users)


def dropout(node: fx.Node, config: Config) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        x, p, train = full_args(node.target, c.args, c.kwargs)
        flag = "nullptr"
        if train is not None:
            w.lines.append(f"int32_t train = {int(train)};")
            flag = "&train"
        w.call(c, SHIM + "native_dropout", [w.tensor(x), repr(float(p)), flag])

    return Claim("native_dropout: eager's generator", emit)


def sort(node: fx.Node, config: Config) -> Claim | None:
    stable = node.target is aten.sort.stable

    def emit(w: Any, c: Call) -> None:
        args = full_args(node.target, c.args, c.kwargs)
        if not stable:
            x, dim, descending = args
            w.call(c, SHIM + "sort", [w.tensor(x), str(int(dim)), str(int(descending))])
            return
        x, flag, dim, descending = args
        w.lines.append(f"int32_t stable = {int(bool(flag))};")
        w.call(c, SHIM + "sort_stable", [w.tensor(x), "&stable", str(int(dim)), str(int(descending))])

    return Claim("sort", emit)


def topk(node: fx.Node, config: Config) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        x, k, dim, largest, in_order = full_args(node.target, c.args, c.kwargs)
        w.call(
            c, SHIM + "topk", [w.tensor(x), w.text(k), str(int(dim)), str(int(largest)), str(int(in_order))]
        )

    return Claim("topk", emit)
