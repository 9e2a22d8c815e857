"""Linear layers of one operand become dicp::linears, with the RMS norm before them and the gate behind."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal
from dicp.ir.expr import LOW_PRECISION
from dicp.ir.verify import infer, insert
from dicp.ops.aliases import is_view
from dicp.passes.facts import aten, is_plain_cast, is_tensor, prims, rank, same_dtype, same_shape, value_of
from dicp.passes.matcher import Pat, both_ways, const, either, match, op, var
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
    where nothing but such layers reads it: its own rounding to low precision is left out.
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
            normed = _call(j, norm.x, norm, vendor, order) if call is not None and norm is not None else None
            chosen = normed or (call if len(j.layers) > 1 else None)
            if chosen is not None:
                _put(chosen, j, order)
    return finish(gm)


def _layer(node: Node) -> Layer | None:
    _, w, *scale, b, other, act = node.args
    return None if other is not None else Layer(node, w, (*scale, None)[0], b, str(act))  # type: ignore[arg-type]


def _without_views(x: Any) -> Node:
    """What is seen as rows of as many columns."""
    while x.target is aten.view.default and _same_columns(x.args[0], x):
        x = x.args[0]
    return x  # type: ignore[no-any-return]


def _same_columns(x: Node, y: Node) -> bool:
    return min(rank(x), rank(y)) > 0 and known_equal(value_of(x).shape[-1], value_of(y).shape[-1])


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

def _widens(cast: Node) -> bool:
    return is_plain_cast(cast) and value_of(cast).dtype == torch.float32 and _is_low(cast.args[0])


def _narrows(cast: Node) -> bool:
    return is_plain_cast(cast) and _is_low(cast) and value_of(cast.args[0]).dtype == torch.float32


def _is_low(n: Any) -> bool:
    return is_tensor(n) and value_of(n).dtype in LOW_PRECISION


def _of_rows(mean: Node) -> bool:
    dims, keepdim = (*mean.args, False)[1:3]
    last = rank(mean.args[0]) - 1  # type: ignore[arg-type]
    return keepdim is True and len(dims) == 1 and dims[0] in (-1, last)  # type: ignore[arg-type,index]


_CASTS = (aten._to_copy.default, prims.convert_element_type.default)
_x, _weight = var("x"), var("weight", where=lambda n: rank(n) == 1 and value_of(n).dtype.is_floating_point)
_factor = either(op(_CASTS, _weight, where=_widens), _weight)


def _normed(x: Pat) -> Pat:
    """x * rsqrt(mean(x * x) + eps)"""
    square = either(op(aten.pow.Tensor_Scalar, x, 2), both_ways(aten.mul.Tensor, x, x))
    mean = op(aten.mean.dim, square, where=_of_rows)
    plus = both_ways((aten.add.Tensor, aten.add.Scalar), mean, const("eps"))
    return both_ways(aten.mul.Tensor, x, op(aten.rsqrt.default, plus))


_PLAIN = both_ways(aten.mul.Tensor, _normed(_x), _factor)
_wide = _normed(op(_CASTS, _x, where=_widens))
_LOW = either(
    both_ways(aten.mul.Tensor, op(_CASTS, _wide, where=_narrows), _weight),
    op(_CASTS, both_ways(aten.mul.Tensor, _wide, _factor), where=_narrows),
)


def _norm(y: Node) -> Norm | None:
    """Whether y is an RMS norm over the last dim, of float32 statistics, as models write it: of low
    precision, with x widened first and the product rounded, or what it is multiplied by and the result."""
    low = _is_low(y)
    m = match(_LOW if low else _PLAIN, y)
    if m is None:
        return None
    x, weight = m["x"], m["weight"]
    whole = same_shape(x, y) and known_equal(value_of(weight).shape[0], value_of(y).shape[-1])
    exact = same_dtype(x, y) and (low or value_of(y).dtype == torch.float32)
    return Norm(x, weight, float(m["eps"])) if whole and exact else None


def _read_by(x: Node, layers: Collection[Node]) -> bool:
    """Whether those layers are all that reads x."""
    for user in x.users:
        seen_as_rows = user.target is aten.view.default and _same_columns(user, x)
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
    if not all(is_tensor(n) and _is_there(n, first, order) for n in read):
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


def _is_there(n: Node, first: Node, order: dict[Node, int]) -> bool:
    """Whether a node comes before another, or could: what is made of such by a view, a cast or a constant."""
    if order.get(n, -1) < order[first]:
        return True
    movable = is_view(n) or is_plain_cast(n) or n.target is aten.full.default
    return movable and all(_is_there(a, first, order) for a in n.all_input_nodes)


def _move(n: Node, before: Node, order: dict[Node, int]) -> None:
    """Move a node, and what it is made of, to where `_is_there` said that it could be."""
    if order.get(n, -1) < order[before]:
        return
    for a in n.all_input_nodes:
        _move(a, before, order)
    before.prepend(n)
    order[n] = order[before] - 1


def _put(call: Node, j: Joined, order: dict[Node, int]) -> None:
    """Have the results of the call stand for the values."""
    first = min(j.roots, key=order.__getitem__)
    order[call] = order[first]
    for n in call.all_input_nodes:
        _move(n, call, order)
    call.meta["val"] = infer(call)
    with call.graph.inserting_before(call.next):
        for k, root in enumerate(j.roots):
            y, shape = insert(call.graph, operator.getitem, (call, k), like=root), value_of(root).shape
            order[y] = order[call]
            if value_of(y).shape != shape:
                y = insert(call.graph, aten.view.default, (y, list(shape)), like=root)
                order[y] = order[call]
            root.replace_all_uses_with(y)


__all__ = ["rewrite_linears"]
