"""Products with a transposed weight, and what follows them element by element, become dicp::linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal
from dicp.ops.library import register
from dicp.passes.facts import aten, is_contiguous, is_tensor, rank, same_dtype, same_shape, value_of
from dicp.passes.narrow_weights import Stored, is_scale, stored, stored_by_groups
from dicp.passes.pack import may_pack
from dicp.passes.rules import Activations, Claims, Emitter, activations_of, finish, sole_user, try_claim


@dataclasses.dataclass(frozen=True)
class Linear:
    """dicp::linear's arguments, and the node whose value the call would compute."""

    root: Node
    x: Node
    w: Node
    b: Node | None = None
    act: str = "none"
    other: Node | None = None
    rows: tuple[Any, ...] | None = None
    """Leading sizes that x: [M, K] is to be viewed with."""
    stored: Stored | None = None
    """Where the weight is of eight bits: what it is made of."""
    transposed: bool = False
    """Whether w is [K, N]."""


def rewrite_linear(gm: GraphModule, vendor: Claims) -> GraphModule:
    """add(gelu(view(addmm(b, view(x), permute(w)))), r)  ->  dicp.linear(x, w, b, r, "gelu")

    x: [..., K], w: [N, K] whatever its strides; mm, or addmm, or a 1-D bias added to mm. Each step is taken
    while the value has one user: what a training forward saves for its backward ends the chain there. Where
    the vendor does not claim the longest chain, the next shorter one is offered, down to the product alone.
    Products with an untransposed weight (GPT-2's Conv1D) take part where something follows them, or where it
    is constant and the vendor may want it in a form of its own. Where the weight is of eight bits and cast,
    scaled before or after the product, the call is dicp.scaled_linear, for a vendor that claims it; where it
    is scaled by groups of its depth, dicp.group_scaled_linear.
    """
    nodes = [n for n in gm.graph.nodes if _products(n)]
    if not nodes:
        return gm
    register()
    activations = activations_of(gm)
    for node in nodes:
        if _rewrite_groups(node, vendor):
            continue
        # asked again: an operand may have become a call meanwhile
        chains = (reversed(list(_chain(start, activations, vendor))) for start in _products(node))
        any(_apply(linear, vendor) for chain in chains for linear in chain)
    return finish(gm)


def _rewrite_groups(node: Node, vendor: Claims) -> bool:
    """addmm(b, x, permute(view((cast(w) - zero) * scale)))  ->  group_scaled_linear(x, w, scale, zero) + b"""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    *b, x, weight = node.args
    groups = stored_by_groups(weight)
    if groups is None:
        return False
    emit, sizes = Emitter(node), value_of(groups.w).shape
    w = emit(aten.view.default, groups.w, [sizes[0], sizes[1] * sizes[2]])
    scale = emit(aten.view.default, groups.scale, list(sizes[:2]))
    zero = None if groups.zero is None else emit(aten.view.default, groups.zero, list(sizes[:2]))
    new = try_claim(vendor, torch.ops.dicp.group_scaled_linear.default, (x, w, scale, zero), at=node)
    if new is None:
        emit.undo()
        return False
    node.replace_all_uses_with(Emitter(node)(aten.add.Tensor, new, *b) if b else new)
    return True


def _apply(linear: Linear, vendor: Claims) -> bool:
    """Put the call in the graph, if it gives the same tensor and the vendor claims it."""
    if not is_contiguous(linear.root):
        return False  # eager's strides are `other`'s
    emit = Emitter(linear.root)
    x = linear.x
    if linear.rows is not None:
        x = emit(aten.view.default, x, [*linear.rows, emit.size(x, 1)])
    ops = torch.ops.dicp
    target = ops.linear.default if linear.stored is None else ops.scaled_linear.default
    w = emit(aten.permute.default, linear.w, [1, 0]) if linear.transposed else linear.w
    weight = (w,) if linear.stored is None else _stored_operands(linear.stored, emit)
    new = try_claim(vendor, target, (x, *weight, linear.b, linear.other, linear.act), at=linear.root)
    if new is None:
        emit.undo()
        return False
    linear.root.replace_all_uses_with(new)
    return True


def _stored_operands(stored: Stored, emit: Emitter) -> tuple[Node, Node | None]:
    """w: [N, K] and its scale, [N] or []."""
    w = stored.w if stored.by_rows else emit(aten.permute.default, stored.w, [1, 0])
    scale = stored.scale
    if isinstance(scale, (int, float)):
        return w, emit(aten.full.default, [], float(scale), dtype=torch.float32, device=value_of(w).device)
    if scale is not None and rank(scale) > 1:
        return w, emit(aten.view.default, scale, [-1])
    return w, scale


def _products(node: Node) -> list[Linear]:
    """The chain's possible starts at a node, the one of a weight of eight bits first."""
    if node.target is aten._weight_int8pack_mm.default:
        x, w, scale = node.args
        return [Linear(node, x, w, stored=Stored(w, True, scale))]  # type: ignore[arg-type]
    if node.target is aten.mm.default:
        (x, weight), b = node.args, None
    elif node.target is aten.addmm.default and not node.kwargs:
        b, x, weight = node.args
    else:
        return []
    assert isinstance(x, Node) and isinstance(weight, Node)
    found = stored(weight)
    starts = [] if found is None else [_start(node, x, weight, b, found)]
    if weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]:  # type: ignore[arg-type]
        starts.append(_start(node, x, weight.args[0], b))
    else:
        starts.append(_start(node, x, weight, b, transposed=True))
    return [start for start in starts if start is not None]


def _start(
    node: Node, x: Node, w: Any, b: Any, stored: Stored | None = None, transposed: bool = False
) -> Linear | None:
    """mm(x, permute(w, [1,0])), addmm(b, x, permute(w, [1,0])); transposed: mm(x, w), addmm(b, x, w)"""
    assert isinstance(w, Node)
    if b is None:
        return Linear(node, x, w, stored=stored, transposed=transposed)
    assert isinstance(b, Node)
    if _is_bias(b, node):
        return Linear(node, x, w, b, stored=stored, transposed=transposed)
    if same_shape(b, node) and same_dtype(b, node):
        return Linear(node, x, w, other=b, stored=stored, transposed=transposed)
    return None


def _is_bias(b: Node, y: Node) -> bool:
    """Whether b: [N] is added to y: [..., N] column by column."""
    return rank(b) == 1 and same_dtype(b, y) and known_equal(value_of(b).shape[0], value_of(y).shape[-1])


def _chain(linear: Linear, activations: Activations, vendor: Claims) -> Iterator[Linear]:
    """The product, then each longer chain it is the start of."""
    step: Linear | None = linear
    while step is not None:
        alone = step.transposed and step.act == "none" and step.other is None and not may_pack(vendor, step.w)
        if not alone and (step.rows is None or step.root.target is not aten.view.default):
            yield step  # else the view would only move from the result to x
        step = (
            _restore(step)
            or _scale(step)
            or _add_bias(step)
            or _activate(step, activations)
            or _add_other(step)
        )


def _restore(linear: Linear) -> Linear | None:
    """view(f(view(x, [M, K])), [..., N])  ->  f(x) for x: [..., K];  view(f(x), ...)  ->  f(view(x, ...))"""
    user, x = sole_user(linear.root), linear.x
    if user is None or user.target is not aten.view.default or rank(linear.root) != 2:
        return None
    wanted = value_of(user).shape
    if linear.other is not None or not wanted or not known_equal(wanted[-1], value_of(linear.root).shape[-1]):
        return None  # `other` has the product's two dims
    if x.target is aten.view.default and _same_sizes(
        value_of(x.args[0]).shape, [*wanted[:-1], value_of(x).shape[-1]]
    ):
        return dataclasses.replace(linear, root=user, x=x.args[0])
    rows = tuple(user.args[1][:-1])  # type: ignore[index]
    return dataclasses.replace(linear, root=user, rows=rows) if -1 not in _ints(rows) else None


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(known_equal(x, y) for x, y in zip(a, b))


def _ints(sizes: Sequence[Any]) -> list[int]:
    return [s for s in sizes if isinstance(s, int)]


def _scale(linear: Linear) -> Linear | None:
    """mul(mm(x, cast(w).T), scale)  ->  scaled_linear(x, w, scale) for w of eight bits"""
    if linear.stored is None or linear.stored.scale is not None:
        return None
    if linear.b is not None or linear.act != "none" or linear.other is not None:
        return None
    user = sole_user(linear.root)
    if user is None or user.target is not aten.mul.Tensor:
        return None
    a, b = user.args
    scale = b if a is linear.root else a
    if scale is linear.root or not is_scale(scale, linear.root, by_rows=False):
        return None
    if not same_shape(user, linear.root) or not same_dtype(user, linear.root):
        return None
    return dataclasses.replace(linear, root=user, stored=dataclasses.replace(linear.stored, scale=scale))


def _add_bias(linear: Linear) -> Linear | None:
    """add(mm(x, w.T), b)  ->  linear(x, w, b)"""
    if linear.b is not None or linear.act != "none" or linear.other is not None:
        return None
    user, b = _added(linear.root)
    if user is None or b is None or not _is_bias(b, linear.root):
        return None
    return dataclasses.replace(linear, root=user, b=b)


def _activate(linear: Linear, activations: Activations) -> Linear | None:
    """gelu(linear(x, w, b))  ->  linear(x, w, b, "gelu")"""
    if linear.act != "none" or linear.other is not None or linear.root not in activations:
        return None
    act, root = activations[linear.root]
    return dataclasses.replace(linear, root=root, act=act)


def _add_other(linear: Linear) -> Linear | None:
    """add(r, linear(x, w, b, act))  ->  linear(x, w, b, r, act)"""
    if linear.other is not None:
        return None
    user, other = _added(linear.root)
    if user is None or other is None or not same_shape(other, linear.root):
        return None
    return dataclasses.replace(linear, root=user, other=other) if same_dtype(other, linear.root) else None


def _added(node: Node) -> tuple[Node | None, Node | None]:
    """The only user, if it adds something to the node, and what it adds."""
    user = sole_user(node)
    if user is None or user.target is not aten.add.Tensor or user.kwargs.get("alpha", 1) != 1:
        return None, None
    a, b = user.args
    other = b if a is node else a
    if other is node or not is_tensor(other) or not same_shape(user, node) or not same_dtype(user, node):
        return None, None
    assert isinstance(other, Node)
    return user, other
