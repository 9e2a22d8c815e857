"""Channels of a convolution's input filled up with zeros, for vendors that load several at once.

An image of three channels is read one element at a time otherwise, where those of four are a vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import fake_mode_of, quiet_shapes
from dicp.passes.facts import aten, value_of
from dicp.passes.rules import Emitter
from dicp.vendor.base import VendorBase


def pad_channels(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """dicp.conv(x, w)  ->  dicp.conv(pad(x), pad(w)), to as many channels as the vendor says."""
    convolutions = [n for n in gm.graph.nodes if n.target is torch.ops.dicp.conv.default]
    mode = fake_mode_of([value_of(n) for n in convolutions])
    if mode is None:
        return gm
    for node in convolutions:
        with mode, quiet_shapes(mode):
            _pad(node, vendor.padded_channels(node))
    return gm


def _pad(node: Node, channels: int | None) -> None:
    if channels is None:
        return
    emit = Emitter(node)
    for k in (0, 1):
        operand: Any = node.args[k]
        more = channels - value_of(operand).shape[1]
        if more:
            node.update_arg(k, emit(aten.constant_pad_nd.default, operand, [0, 0, 0, 0, 0, more], 0))


__all__ = ["pad_channels"]
