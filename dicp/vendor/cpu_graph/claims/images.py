"""What the templates of convolutions share: operands that are images whose channels are dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from dicp.passes.layout import CHANNELS_LAST
from dicp.schedule.defs import View


def threads(lowering: Any) -> int:
    return int(lowering.vendor.machine(lowering.config).threads)


def strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    first = val[0] if isinstance(val, (tuple, list)) else val
    found = dense_strides(tuple(lowering.index(s) for s in first.shape), CHANNELS_LAST)
    return [found, None, None] if first is not val else [found]


def prepare(*images: int, bias: int | None = None) -> Callable[..., Sequence[Any]]:
    """Images whose channels are dense, a dense bias, and all else however it lies."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        out = list(args)
        for k in images:
            if args[k] is not None:
                view = lowering.operand(args[k], order=CHANNELS_LAST)
                out[k] = view if view.strides[1] == 1 else lowering.in_order(args[k], CHANNELS_LAST)
        if bias is not None and args[bias] is not None:
            out[bias] = lowering.operand(args[bias], dense=True)
        return out

    return prepare


def pitch(v: View | None) -> list[Any]:
    """Strides per image, row and column."""
    return [0, 0, 0] if v is None else [v.strides[0], v.strides[2], v.strides[3]]


__all__ = ["CHANNELS_LAST", "pitch", "prepare", "strides", "threads"]
