"""Which nodes share memory, as the schemas of their operators say."""

from __future__ import annotations

import operator

import torch.fx as fx


def view_root(node: fx.Node) -> fx.Node:
    """The node whose memory eager's result shares, going back through views."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        maker = node.args[0] if node.target is operator.getitem else node  # a piece of a split, say
        if not returns_views(maker) or not isinstance(maker.args[0], fx.Node):
            break
        node = maker.args[0]
    return node


def returns_views(node: fx.Node) -> bool:
    """Whether results of the node share memory with what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


__all__ = ["returns_views", "view_root"]
