"""Weights that never change go to the vendor's library in the form that it computes with."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dicp.ops.library import register
from dicp.passes.facts import is_channels_last, value_of
from dicp.passes.freeze import constants_of, is_constant
from dicp.passes.rules import Claims, Emitter
from dicp.vendor.asking import has
from dicp.vendor.base import VendorBase


def packed_form(vendor: VendorBase, node: Node, constants: frozenset[Node]) -> str | None:
    """The form in which the vendor would rather have the weight of a dicp::linear or dicp::conv, if the
    weight is constant; None where it would not (`VendorBase.packs`)."""
    if not constants or node.target not in (torch.ops.dicp.linear.default, torch.ops.dicp.conv.default):
        return None
    return vendor.packs(node) if node.args[1] in constants else None


def may_pack(vendor: Claims, weight: Node) -> bool:
    """Whether the vendor may have a form for a weight (`packed_form` of the call says which)."""
    return has(vendor, VendorBase.packs) and is_constant(weight)


def pack_weights(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """linear(x, w, ...)  ->  linear(x, pack(w, form), ...), where w is constant and the vendor has a form.

    For convolutions only channels-last ones: in their packed forms libraries answer in that order.
    """
    constants = constants_of(gm)
    if not constants:
        return gm
    register()
    for node in list(gm.graph.nodes):
        form = packed_form(vendor, node, constants)
        if form is None:
            continue
        ends = (value_of(node.args[0]), value_of(node))
        if node.target is torch.ops.dicp.conv.default and not all(map(is_channels_last, ends)):
            continue
        node.update_arg(1, Emitter(node)(torch.ops.dicp.pack.default, node.args[1], form))
    return gm


__all__ = ["may_pack", "pack_weights", "packed_form"]
