"""Attention, as an operator or written out in matmuls and a softmax, becomes dicp::attention."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal
from dicp.ir.verify import same_meta
from dicp.ops.library import register
from dicp.passes.facts import (
    aten,
    is_plain_cast,
    is_tensor,
    prims,
    rank,
    same_dtype,
    same_shape,
    uniform_value,
    value_of,
)
from dicp.passes.matcher import Pat, either, match, op, through, var
from dicp.passes.rules import Claims, Emitter, finish, sole_user

_CASTS = (aten._to_copy.default, prims.convert_element_type.default)
_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_SWAP = {3: [0, 2, 1], 4: [0, 1, 3, 2]}
_FUSED = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@dataclasses.dataclass(frozen=True)
class Mask:
    """Added to the scores: `node`, or -inf where a bool `node` is False ("open") or True ("closed")."""

    node: Node
    kind: str = "add"

    @property
    def finite(self) -> bool:
        return self.kind == "add" and _is_finite(self.node)


@dataclasses.dataclass(frozen=True)
class Operand:
    """q, k or v as found: [B, H, ...] or [B*H, ...]; `swapped`: its last two dims are exchanged."""

    node: Node
    swapped: bool = False
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Attention:
    """What dicp::attention's arguments are made of, and the node the call would compute."""

    root: Node
    q: Operand
    k: Operand
    v: Operand
    mask: Mask | None
    causal: bool
    scale: float | None
    heads: tuple[Any, Any] | None = None
    """B and H as arguments of a view, where operands of three dims must be split."""


def rewrite_attention(gm: GraphModule, vendor: Claims) -> GraphModule:
    """view(bmm(softmax(view(bmm(q, k.T)) * c + mask), v))  ->  dicp.attention(q, k, v, mask, False, c)

    Takes the fused attention operators, where only their result is used; and the written-out form: scale on
    q, on k, on both or on the scores; a mask added or filled in by where; softmax in one call or five; low
    precision computed in float32 between casts. Repeated heads (grouped queries) are handed over unrepeated.
    The mask that results is a float tensor to add, never a bool one.
    A row closed entirely by its mask is 0 in dicp::attention and the fused operators, but NaN in a plain
    softmax: a written-out softmax with a mask is taken only where it treats such rows itself, or where the
    mask is finite. Dropout on the weights, or weights used elsewhere (saved for the backward), prevent it.
    """
    found_any = False
    for node in list(gm.graph.nodes):
        found = _fused_operator(node) or _written_out(node)
        if found is None:
            continue
        register()
        found_any = True
        shared = _share_heads(found)
        if shared is not None and _apply(shared, vendor):
            continue
        _apply(found, vendor)  # heads repeated, for a vendor that does not share them
    return finish(gm) if found_any else gm


# -- the operators ------------------


def _fused_operator(node: Node) -> Attention | None:
    """_scaled_dot_product_*(q, k, v, ...)[0]"""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    call = node.args[0]
    assert isinstance(call, Node)
    if call.target not in _FUSED or any(user.args[1] != 0 and user.users for user in call.users):
        return None
    given = _arguments(call)
    if given["dropout_p"] != 0 or given.get("return_debug_mask"):
        return None
    q, k, v = (Operand(given[name]) for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    adds = mask is not None and uniform_value(mask) != 0
    return Attention(node, q, k, v, Mask(mask) if adds else None, given["is_causal"], given["scale"])


def _arguments(call: Node) -> dict[str, Any]:
    """The call's arguments by name, the schema's defaults filled in."""
    assert isinstance(call.target, torch._ops.OpOverload)
    values = {}
    for i, argument in enumerate(call.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        values[argument.name] = (
            call.args[i] if i < len(call.args) else call.kwargs.get(argument.name, default)
        )
    return values


# -- written out ------------------

_scores = var("scores")
_exp = op(aten.exp.default, op(aten.sub.Tensor, _scores, op(aten.amax.default, _scores, [-1], True)))
_SOFTMAX: Pat = either(
    op(aten._softmax.default, _scores, where=lambda n: n.args[1] in (-1, rank(n) - 1)),
    op(aten.div.Tensor, _exp, op(aten.sum.dim_IntList, _exp, [-1], True)),
)
_is_closed = op(aten.eq.Scalar, _scores, -math.inf)
_is_open = op(aten.logical_not.default, _is_closed)
_closed_rows = either(
    op(aten.logical_not.default, op(aten.any.dim, _is_open, -1, True)),
    op(aten.all.dim, _is_closed, -1, True),
)
_SAFE_SOFTMAX: Pat = op(aten.where.self, _closed_rows, 0, through(_CASTS, _SOFTMAX), name="safe")
_WEIGHTS: Pat = through(_CASTS, either(_SAFE_SOFTMAX, _SOFTMAX))


def _written_out(outer: Node) -> Attention | None:
    """Peel bmm(softmax(view(bmm(q, k.T)) * c + mask), v) off from the outside."""
    if outer.target is not aten.bmm.default:
        return None
    user = sole_user(outer)
    # Merged with the views that follow it, the view to [B, H, Sq, Dv] may be missing: then bmm is the root.
    root = user if user is not None and _batched_matmul(user) is outer else outer
    inside = [outer]  # of the size of the scores: computed for nothing unless nobody else uses them
    weights = _without_regrouping(outer.args[0], inside)
    softmax = match(_WEIGHTS, weights)
    if softmax is None:
        return None
    inside += [weights, *softmax.interior]
    scores, mask, scale = _peel_scores(softmax["scores"], inside)
    inner = _batched_matmul(scores)
    if inner is None or (mask is not None and not (softmax.get("safe") or mask.finite)):
        return None
    inside += [scores, inner]
    if any(
        user not in inside and user is not root for node in inside if node is not root for user in node.users
    ):
        return None
    q, k, v = _operand(inner.args[0]), _operand(inner.args[1]), _operand(outer.args[1])
    k = dataclasses.replace(k, swapped=not k.swapped)  # the product took k.T
    scale *= q.scale * k.scale
    heads = _leading(scores)
    end = _after_casts(root, q.node)
    if (
        v.scale != 1
        or heads is None
        or end is None
        or not (same_dtype(q.node, k.node) and same_dtype(q.node, v.node))
        or (mask is not None and not _is_held(mask, q.node))
        or (mask is not None and not all(_grouped_as(scores, o.node) for o in (q, k, v)))
    ):
        return None
    return Attention(end, q, k, v, mask, False, scale, heads)


def _grouped_as(scores: Node, operand: Node) -> bool:
    """Whether an operand's batch and heads are those of the scores, to which a mask is added."""
    sizes = zip(value_of(scores).shape[:2], value_of(operand).shape[:2])
    return rank(operand) != 4 or all(known_equal(a, b) for a, b in sizes)


def _batched_matmul(node: Node) -> Node | None:
    """The bmm of view(bmm(a, b), [B, H, M, N])."""
    if node.target is not aten.view.default or rank(node) != 4:
        return None
    bmm = node.args[0]
    assert isinstance(bmm, Node)
    return bmm if bmm.target is aten.bmm.default and _keeps_matrices(node) else None


def _keeps_matrices(view: Node) -> bool:
    """Whether a view regroups leading dims only."""
    old, new = value_of(view.args[0]).shape, value_of(view).shape
    return min(len(old), len(new)) >= 2 and all(known_equal(a, b) for a, b in zip(old[-2:], new[-2:]))


def _without_regrouping(node: Any, inside: list[Node]) -> Node:
    """x of view(clone(x), [B*H, M, N])"""
    while node.target is aten.clone.default or (node.target is aten.view.default and _keeps_matrices(node)):
        inside.append(node)
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _peel_scores(scores: Node, inside: list[Node]) -> tuple[Node, Mask | None, float]:
    """(s, mask, c) where the scores are cast(s * c + mask); what is peeled off is added to `inside`."""
    mask: Mask | None = None
    scale = 1.0
    scaled = False
    while True:
        masked = None if scaled or mask is not None else _masked(scores)
        if masked is not None:
            below, mask = masked
        elif is_plain_cast(scores) or _adds_nothing(scores):
            below = scores.args[0]  # type: ignore[assignment]
        elif (product := _scaled(scores)) is not None:
            below, factor = product
            scale, scaled = scale * factor, True
        else:
            return scores, mask, scale
        inside.append(scores)
        scores = below


def _adds_nothing(node: Node) -> bool:
    """Whether the node is s + 0, as of a mask that is open everywhere."""
    return (
        node.target is aten.add.Tensor
        and uniform_value(node.args[1]) == 0
        and is_tensor(node.args[0])
        and _is_scores(node.args[0], node)
    )


def _scaled(node: Node) -> tuple[Node, float] | None:
    """(x, c) where the node is x * c, x / (1/c)"""
    if node.target not in _SCALINGS or not is_tensor(node.args[0]) or node.kwargs:
        return None
    x, number = node.args[0], uniform_value(node.args[1])
    assert isinstance(x, Node)
    if number is None or number == 0 or not same_shape(x, node) or not same_dtype(x, node):
        return None
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    return x, 1 / number if divides else number


def _masked(node: Node) -> tuple[Node, Mask] | None:
    """(s, mask) where the node is s + mask, where(open, s, -inf) or where(closed, -inf, s)"""
    if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        for s, mask in (node.args[:2], reversed(node.args[:2])):
            if is_tensor(mask) and uniform_value(mask) != 0 and _is_scores(s, node):
                return s, Mask(mask)  # type: ignore[arg-type]
    if node.target is aten.where.self:
        condition, a, b = node.args
        if uniform_value(b) == -math.inf and _is_scores(a, node):
            return a, Mask(condition, "open")  # type: ignore[arg-type]
        if uniform_value(a) == -math.inf and _is_scores(b, node):
            return b, Mask(condition, "closed")  # type: ignore[arg-type]
    return None


def _is_scores(node: Any, masked: Node) -> bool:
    if not is_tensor(node) or not same_shape(node, masked):
        return False
    while is_plain_cast(node) or _scaled(node) is not None:
        node = node.args[0]
    return _batched_matmul(node) is not None


def _is_held(mask: Mask, q: Node) -> bool:
    """Whether attention's dtypes hold what is added: of float64, the least number is no float32."""
    return value_of(mask.node).dtype != torch.float64 or value_of(q).dtype == torch.float64


def _is_finite(node: Node) -> bool:
    """Whether no element of an added mask can be infinite, as far as the graph tells."""
    number = uniform_value(node)
    if number is not None:
        return math.isfinite(number)
    if node.target in (aten.expand.default, aten.view.default, aten.clone.default, aten.unsqueeze.default):
        return _is_finite(node.args[0])  # type: ignore[arg-type]
    if node.target is aten.where.self:
        return all(is_tensor(n) and _is_finite(n) for n in node.args[1:])  # type: ignore[arg-type]
    return False


def _operand(node: Any) -> Operand:
    """What an operand of a bmm is without its scale, copies, widening casts and regrouped leading dims."""
    swapped, scale = False, 1.0
    while True:
        if (product := _scaled(node)) is not None:
            scale *= product[1]
        elif node.target is aten.permute.default and list(node.args[1]) == _SWAP.get(rank(node)):
            swapped = not swapped
        elif not (node.target is aten.clone.default or _is_widening(node) or _regroups(node)):
            return Operand(node, swapped, scale)
        node = node.args[0]


def _is_widening(node: Node) -> bool:
    low = (torch.bfloat16, torch.float16)
    return (
        is_plain_cast(node) and value_of(node).dtype == torch.float32 and value_of(node.args[0]).dtype in low
    )


def _regroups(node: Node) -> bool:
    return node.target is aten.view.default and rank(node.args[0]) in (3, 4) and _keeps_matrices(node)  # type: ignore


def _leading(view: Node) -> tuple[Any, Any] | None:
    """B and H of view(x, [B, H, M, N]), as arguments."""
    sizes = []
    for given, size in zip(view.args[1][:2], value_of(view).shape):  # type: ignore[index]
        sizes.append(size if isinstance(size, int) else given)
    return None if -1 in [s for s in sizes if isinstance(s, int)] else (sizes[0], sizes[1])


def _after_casts(root: Node, q: Node) -> Node | None:
    """The node with q's dtype: the root, or the cast back that is its only user."""
    if same_dtype(root, q):
        return root
    user = sole_user(root)
    return user if user is not None and is_plain_cast(user) and same_dtype(user, q) else None


# -- building the call ------------------


def _share_heads(found: Attention) -> Attention | None:
    """view(expand(unsqueeze(k, 2), [B, Hkv, R, ...]), [B, Hkv*R, ...])  ->  k, and v alike"""
    k, v = _unrepeated(found.k.node), _unrepeated(found.v.node)
    if k is None or v is None:
        return None
    return dataclasses.replace(
        found, k=dataclasses.replace(found.k, node=k), v=dataclasses.replace(found.v, node=v)
    )


def _unrepeated(node: Node) -> Node | None:
    while node.target is aten.clone.default or (node.target is aten.view.default and _keeps_matrices(node)):
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.expand.default or rank(node) != 5:
        return None
    inner = node.args[0]
    assert isinstance(inner, Node)
    if inner.target is not aten.unsqueeze.default or inner.args[1] not in (2, -3) or rank(inner) != 5:
        return None
    only_repeats = all(
        known_equal(a, b)
        for d, (a, b) in enumerate(zip(value_of(inner).shape, value_of(node).shape))
        if d != 2
    )
    return inner.args[0] if only_repeats else None  # type: ignore[return-value]


def _apply(found: Attention, vendor: Claims) -> bool:
    """Put the call in the graph, if the vendor claims it."""
    emit = Emitter(found.root)
    q, k, v = (_split_heads(emit, o, found.heads) for o in (found.q, found.k, found.v))
    if not _grouped_alike(q, k, v):
        emit.undo()
        return False
    mask = None if found.mask is None else _added_mask(emit, found.mask, q)
    target = torch.ops.dicp.attention.default
    call = emit(target, q, k, v, mask, found.causal, found.scale)
    result = call
    if not same_meta(value_of(call), value_of(found.root)):
        result = emit(aten.clone.default, call, memory_format=torch.contiguous_format)
    if rank(found.root) == 3:
        result = emit(aten.view.default, result, [-1, emit.size(q, 2), emit.size(v, 3)])
    if not same_meta(value_of(result), value_of(found.root)) or not vendor.supports(target, call):
        emit.undo()
        return False
    found.root.replace_all_uses_with(result)
    call = found.root.args[0]  # type: ignore[assignment]
    if call.target in _FUSED:
        # It draws random numbers for a dropout that is not there: dead code elimination would keep it.
        for dead in (*call.users, call):
            dead.graph.erase_node(dead)
    return True


def _grouped_alike(q: Node, k: Node, v: Node) -> bool:
    """Whether operands have the same batch, and heads of keys serve as many heads of queries each: views may
    have regrouped them, each in another way."""
    (batch, heads), *others = (value_of(n).shape[:2] for n in (q, k, v))
    if not all(known_equal(batch, b) for b, _ in others) or not known_equal(others[0][1], others[1][1]):
        return False
    shared = others[0][1]
    repeats = isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared == 0
    return repeats or known_equal(heads, shared)


def _split_heads(emit: Emitter, operand: Operand, heads: tuple[Any, Any] | None) -> Node:
    """The operand as [B, H, rows, columns]."""
    node = operand.node
    if rank(node) == 3:
        assert heads is not None
        rows, columns = (emit.size(node, d) for d in (1, 2))
        node = emit(aten.view.default, node, [*heads, rows, columns])
    return emit(aten.permute.default, node, _SWAP[4]) if operand.swapped else node


def _added_mask(emit: Emitter, mask: Mask, q: Node) -> Node:
    value = value_of(q)
    if mask.kind == "add":
        if value_of(mask.node).dtype in (value.dtype, torch.float32):
            return mask.node
        wide = torch.promote_types(value.dtype, torch.float32)
        return emit(prims.convert_element_type.default, mask.node, wide)
    zero, closed = (
        emit(aten.full.default, [], number, dtype=value.dtype, device=value.device)
        for number in (0.0, -math.inf)
    )
    pair = (zero, closed) if mask.kind == "open" else (closed, zero)
    return emit(aten.where.self, mask.node, *pair)
