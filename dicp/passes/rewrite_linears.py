"""Linear layers of one operand become dicp::linears, with the RMS norm before them and the gate behind."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from dicp.ir.verify import infer, insert
from dicp.passes.facts import aten, is_tensor, prims, rank, same_dtype, same_shape, value_of
from dicp.passes.matcher import both_ways, const, either, match, op, through, var
from dicp.passes.rules import Claims, finish, sole_user


class Layer(NamedTuple):
    """A dicp::linear or dicp::scaled_linear without `other`."""

    node: Node
    w: Node
    scale: Node | None
    b: Node | None
    act: str

    @property
    def kind(self) -> Any:
        """The same of layers that one call may compute."""
        scale = None if self.scale is None else (rank(self.scale), value_of(self.scale).dtype)
        return value_of(self.w).dtype, scale, self.b is None


class Joined(NamedTuple):
    """What one call is to compute: the layers, and the nodes whose values it gives."""

    layers: list[Layer]
    roots: list[Node]
    gated: bool = False


class Norm(NamedTuple):
    """x * rsqrt(mean(x * x) + eps) * weight"""

    x: Node
    weight: Node
    eps: float


def rewrite_linears(gm: GraphModule, vendor: Claims) -> GraphModule:
    """silu(linear(n(x), v)) * linear(n(x), w)  ->  dicp.linears(x, norm, eps, [v, w], [], [], "silu", True)
    linear(x, v), linear(x, w), ...  ->  dicp.linears(x, None, 0.0, [v, w, ...], [], [], "none", False)

    For a vendor that claims it, where one call is ahead of several because rows are few. The norm goes along
    where nothing but these layers reads it: its own rounding to low precision is left out.
    """
    ours = [n for n in gm.graph.nodes if getattr(n.target, "namespace", None) == "dicp"]
    layers: dict[Node, list[Node]] = {}
    for node in ours:
        if node.target in (torch.ops.dicp.linear.default, torch.ops.dicp.scaled_linear.default):
            layers.setdefault(_without_views(node.args[0]), []).append(node)
    if not layers:
        return gm
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    for readers in layers.values():
        found = [layer for layer in map(_layer, readers) if layer is not None]
        gated = _gated(found)
        taken = {layer.node for j in gated for layer in j.layers}
        joined = [*gated, *_side_by_side(layer for layer in found if layer.node not in taken)]
        x = _without_views(readers[0].args[0])  # what was there may have become a result of such a call
        calls = [(j, _call(j, x, None, vendor, order)) for j in joined]
        if all(call is None for _, call in calls):
            continue
        known = {layer.node for j in joined for layer in j.layers}.union(c for _, c in calls if c)
        norm = _norm(x) if _read_by(x, known) else None
        for j, call in calls:
            better = None if call is None or norm is None else _call(j, norm.x, norm, vendor, order)
            if better is not None or len(j.layers) > 1:
                _put(better or call, j)
    return finish(gm)


def _layer(node: Node) -> Layer | None:
    x, w, *scale, b, other, act = node.args
    del x
    return None if other is not None else Layer(node, w, (*scale, None)[0], b, str(act))  # type: ignore[arg-type]


def _without_views(x: Any) -> Node:
    """What is seen as rows of as many columns."""
    while x.target is aten.view.default and _columns(x.args[0]) == _columns(x):
        x = x.args[0]
    return x  # type: ignore[no-any-return]


def _columns(x: Node) -> Any:
    return value_of(x).shape[-1] if rank(x) > 0 else None


def _gated(layers: Sequence[Layer]) -> list[Joined]:
    """act(linear(x, w0, b0)) * linear(x, w1, b1)"""
    known = {layer.node: layer for layer in layers}
    made = []
    for first in layers:
        user = sole_user(first.node)
        if first.act == "none" or user is None or user.target is not aten.mul.Tensor:
            continue
        a, b = user.args
        second = known.get(b if a is first.node else a)  # type: ignore[arg-type]
        if second is None or second.act != "none" or sole_user(second.node) is not user:
            continue
        alike = all(same_shape(n, user) and same_dtype(n, user) for n in (first.node, second.node))
        if alike and first.kind == second.kind:
            made.append(Joined([first, second], [user], gated=True))
    return made


def _side_by_side(layers: Iterable[Layer]) -> list[Joined]:
    """By activation, and what they are made of."""
    kinds: dict[Any, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault((layer.act, layer.kind), []).append(layer)
    return [Joined(each, [layer.node for layer in each]) for each in kinds.values()]


# -- the norm ------------------------------------------------------------------------------------------------

_CASTS = (aten._to_copy.default, prims.convert_element_type.default)


def _of_rows(mean: Node) -> bool:
    dims, keepdim = (*mean.args, False)[1:3]
    last = rank(mean.args[0]) - 1  # type: ignore[arg-type]
    return keepdim is True and len(dims) == 1 and dims[0] in (-1, last)  # type: ignore[arg-type,index]


_wide = through(_CASTS, var("x", where=lambda n: n.target not in _CASTS))
_square = either(op(aten.pow.Tensor_Scalar, _wide, 2), both_ways(aten.mul.Tensor, _wide, _wide))
_mean = op(aten.mean.dim, _square, where=_of_rows)
_rstd = op(aten.rsqrt.default, both_ways((aten.add.Tensor, aten.add.Scalar), _mean, const("eps")))
_normed = through(_CASTS, both_ways(aten.mul.Tensor, _wide, _rstd))
_vector = var("weight", where=lambda n: rank(n) == 1 and n.target not in _CASTS)
_RMS_NORM = through(_CASTS, both_ways(aten.mul.Tensor, _normed, through(_CASTS, _vector)))


def _norm(y: Node) -> Norm | None:
    """Whether y is an RMS norm over the last dim, of float32 statistics, as models write it."""
    m = match(_RMS_NORM, y)
    if m is None:
        return None
    x, weight = m["x"], m["weight"]
    statistics = next(n for n in m.interior if n.target is aten.rsqrt.default)
    plain = same_shape(x, y) and same_dtype(x, y) and value_of(weight).dtype.is_floating_point
    exact = value_of(statistics).dtype == torch.float32
    return Norm(x, weight, float(m["eps"])) if plain and exact else None


def _read_by(x: Node, layers: Collection[Node]) -> bool:
    """Whether those layers are all that reads x."""
    for user in x.users:
        seen_as_rows = user.target is aten.view.default and _columns(user) == _columns(x)
        if user not in layers and not (seen_as_rows and _read_by(user, layers)):
            return False
    return True


# -- the call ------------------------------------------------------------------------------------------------


def _call(j: Joined, x: Node, norm: Norm | None, vendor: Claims, order: dict[Node, int]) -> Node | None:
    """The call, before the first of the values that it gives, if what it reads is there by then and the
    vendor claims it."""
    first = min(j.roots, key=order.__getitem__)
    ws = [layer.w for layer in j.layers]
    scales = [layer.scale for layer in j.layers if layer.scale is not None]
    bs = [layer.b for layer in j.layers if layer.b is not None]
    read = [x, *ws, *scales, *bs, *([norm.weight] if norm is not None else [])]
    if any(order.get(n, -1) >= order[first] for n in read) or not all(map(is_tensor, read)):
        return None
    vals = [value_of(root) for root in j.roots]
    if any(not isinstance(n, int) for val in vals for n in val.shape):
        return None
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    args = (x, weight, eps, ws, scales, bs, j.layers[0].act, j.gated)
    with first.graph.inserting_before(first):  # `value`: what is not used is not inferred
        call = insert(first.graph, torch.ops.dicp.linears.default, args, like=first, value=vals)
    if vendor.supports(call.target, call):
        return call
    first.graph.erase_node(call)
    return None


def _put(call: Node | None, j: Joined) -> None:
    """Have the results of the call stand for the values."""
    if call is None:
        return
    call.meta["val"] = infer(call)
    with call.graph.inserting_before(call.next):
        for k, root in enumerate(j.roots):
            y, shape = insert(call.graph, operator.getitem, (call, k), like=root), value_of(root).shape
            if value_of(y).shape != shape:
                y = insert(call.graph, aten.view.default, (y, list(shape)), like=root)
            root.replace_all_uses_with(y)


__all__ = ["rewrite_linears"]
