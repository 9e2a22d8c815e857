"""What lowering asks of the graph as it was traced: views, dtypes, names for what is computed."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import higher_order_name
from dicp.ir import expr as ex
from dicp.ir.printer import user_location
from dicp.ops.table import expressible, moves, table


def may_be_marked(node: fx.Node) -> bool:
    """Whether a node's tensor may be one whose elements are conjugates or negatives of what lies in memory:
    as traced (Dynamo guards inputs), or whatever a gradient is that autograd gives to a backward."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    if val.is_conj() or val.is_neg():
        return True
    return node.name.startswith("tangents_") and (val.dtype.is_complex or val.dtype.is_floating_point)


def no_elements(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in val.shape) and 0 in val.shape


def shape_env(gm: fx.GraphModule) -> Any | None:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            return val.node.shape_env
        if isinstance(val, torch.Tensor) and getattr(val, "fake_mode", None) is not None:
            if val.fake_mode.shape_env is not None:
                return val.fake_mode.shape_env
    return None


def is_strided(val: torch.Tensor) -> bool:
    return val.layout == torch.strided and not val.is_quantized


def is_token(node: fx.Node) -> bool:
    """Whether an input orders effects: it stands for no tensor."""
    return any(higher_order_name(u.target) == "with_effects" and u.args[0] is node for u in node.users)


def held(dtype: torch.dtype, float8: Collection[torch.dtype]) -> bool:
    """Whether kernels hold elements of a dtype, with those of `float8`; complex ones, say, go to calls."""
    return dtype in float8 if dtype in ex.FLOAT8 else expressible(dtype)


def lowerable(node: fx.Node, float8: Collection[torch.dtype]) -> bool:
    """Whether kernels hold every tensor involved; floats of eight bits are moved and converted, no more."""
    vals = [a.meta.get("val") for a in node.all_input_nodes] + [node.meta.get("val")]
    flat = [x for v in vals for x in (v if isinstance(v, (tuple, list)) else [v])]
    tensors = [v for v in flat if isinstance(v, torch.Tensor)]
    if any(v.dtype in ex.FLOAT8 for v in tensors) and not moves(node.target):
        return False
    return all(held(v.dtype, float8) and is_strided(v) for v in tensors)


def is_reindexed(node: fx.Node) -> bool:
    """Whether each element of the result is one of the operand's, found by its index."""
    row = table().get(node.target)  # type: ignore[call-overload]
    return row is not None and row.kind == "view"


def reduces(node: fx.Node) -> bool:
    row = table().get(node.target)  # type: ignore[call-overload]
    return row is None or row.kind in ("reduction", "contraction")


def piece(node: fx.Node, k: int) -> fx.Node:
    """The node that takes result k of a call with several; the call itself where none does."""
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == k), node)


def note_of(node: fx.Node | None) -> str:
    if node is None:
        return ""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    name = node.target.__name__ if callable(node.target) else str(node.target)
    where = user_location(node)
    return f"{name.removesuffix('.default')}    {where}" if where else name.removesuffix(".default")
