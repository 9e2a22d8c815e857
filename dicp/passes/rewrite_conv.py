"""Convolutions, and what follows them channel by channel and element by element, become dicp::conv."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.compat import known_equal
from dicp.ir.expr import LOW_PRECISION
from dicp.ir.verify import same_meta
from dicp.ops.conv_call import ConvCall, the_conv_call
from dicp.ops.library import register
from dicp.ops.misuse import is_misuse
from dicp.passes.facts import (
    aten,
    bytes_of,
    is_contiguous,
    is_tensor,
    prims,
    rank,
    same_dtype,
    same_shape,
    value_of,
)
from dicp.passes.freeze import constants_of
from dicp.passes.rules import Activations, Claims, Emitter, activations_of, finish, sole_user, try_claim

_PER_CHANNEL = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
}
_BROADCASTS = (aten.unsqueeze.default, aten.view.default, aten.expand.default)


@dataclasses.dataclass(frozen=True)
class Step:
    """One per-channel operation on the result: name is add, sub, mul or div; operand is [N]."""

    name: str
    operand: Node


@dataclasses.dataclass(frozen=True)
class Norm:
    """Batch normalisation by given statistics, all [N]: (y - mean) / sqrt(var + eps) * weight + bias."""

    weight: Node | None
    bias: Node | None
    mean: Node
    var: Node
    eps: float


@dataclasses.dataclass(frozen=True)
class Conv:
    """dicp::conv's arguments, with what to fold into weight and bias, and the node the call would compute."""

    call: ConvCall
    root: Node
    affine: tuple[Step | Norm, ...] = ()
    other: Node | None = None
    act: str = "none"

    @property
    def scales(self) -> bool:
        return any(isinstance(s, Norm) or s.name in ("mul", "div") for s in self.affine)


def rewrite_conv(gm: GraphModule, vendor: Claims) -> GraphModule:
    """relu(add(batch_norm(conv(x, w), ...), r))  ->  dicp.conv(x, w * scale, shift, r, ..., "relu")

    Folds, at each call since weights may change between calls: per-channel adds into the bias; batch norm by
    running statistics (the operator, or its arithmetic on [N,1,1] operands) into weight and bias. Then one
    residual of the same shape, then one activation. Each step needs the value to have no other user.
    Scaling the weight reads and writes it once more, and spares the result one more read and write, so it
    is done where the weight is the smaller of the two, by the sizes seen while tracing, and where all that
    takes part is frozen, so that it happens once. In low precision the weight is rounded once more, for the
    result which is not rounded in between, and the bias stays float32 where nothing else is added and the
    vendor takes it, as oneDNN does: rounded, it alone may cost what eager's rounding of the result does.
    Transposed convolutions stay. Chains the vendor does not claim are shortened from their end.
    """
    calls = [n for n in gm.graph.nodes if n.target is aten.convolution.default]
    nodes = [n for n in calls if not the_conv_call(n).transposed and not is_misuse(n)]  # refused as it stands
    if not nodes:
        return gm
    register()
    activations, constants = activations_of(gm), constants_of(gm)
    for node in nodes:
        for conv in reversed(list(_chain(Conv(the_conv_call(node), node), activations))):
            if conv.scales and not _folding_pays(conv, constants):
                continue
            if _apply(conv, vendor):
                break
    return finish(gm)


def _chain(conv: Conv, activations: Activations) -> Iterator[Conv]:
    """The convolution, then each longer chain it is the start of."""
    step: Conv | None = conv
    while step is not None:
        yield step
        step = _normalise(step) or _affine(step) or _add_other(step) or _activate(step, activations)


def _normalise(conv: Conv) -> Conv | None:
    """batch_norm(conv(x, w), ...)[0]"""
    user = sole_user(conv.root)
    if conv.other is not None or conv.act != "none" or user is None:
        return None
    if user.target is not aten._native_batch_norm_legit_no_training.default or user.args[0] is not conv.root:
        return None
    result = sole_user(user)
    if result is None or result.args[1] != 0:
        return None
    weight, bias, mean, var, _, eps = user.args[1:]
    if any(v is not None and not same_dtype(v, conv.root) for v in (weight, bias, mean, var)):
        return None  # float32 statistics of a bfloat16 activation
    norm = Norm(weight, bias, mean, var, eps)  # type: ignore[arg-type]
    return dataclasses.replace(conv, root=result, affine=(*conv.affine, norm))


def _affine(conv: Conv) -> Conv | None:
    """conv(x, w) * s[:, None, None] + b[:, None, None]"""
    user = sole_user(conv.root)
    if conv.other is not None or conv.act != "none" or user is None or user.target not in _PER_CHANNEL:
        return None
    if user.kwargs or not same_shape(user, conv.root) or not same_dtype(user, conv.root):
        return None
    name = _PER_CHANNEL[user.target]
    a, b = user.args[:2]
    if name in ("sub", "div") and a is not conv.root:
        return None
    operand = _channel_vector(b if a is conv.root else a, conv.root)
    if operand is None:
        return None
    return dataclasses.replace(conv, root=user, affine=(*conv.affine, Step(name, operand)))


def _channel_vector(operand: Any, y: Node) -> Node | None:
    """s where the operand is s: [N] broadcast over y: [B, N, ...]."""
    if not is_tensor(operand) or not same_dtype(operand, y):
        return None
    shape, dims = value_of(operand).shape, rank(y)
    channel = len(shape) - (dims - 1)
    if channel not in (0, 1) or any(size != 1 for d, size in enumerate(shape) if d != channel):
        return None
    channels = value_of(y).shape[1]
    node = operand
    while node.target in _BROADCASTS and rank(node) > 1:
        node = node.args[0]
    if rank(node) == 1 and known_equal(value_of(node).shape[0], channels):
        return node  # type: ignore[no-any-return]
    return None


def _add_other(conv: Conv) -> Conv | None:
    """add(conv(x, w), r)"""
    user = sole_user(conv.root)
    if conv.other is not None or conv.act != "none" or user is None or user.target is not aten.add.Tensor:
        return None
    a, b = user.args[:2]
    other = b if a is conv.root else a
    if other is conv.root or not is_tensor(other) or user.kwargs.get("alpha", 1) != 1:
        return None
    if not same_shape(other, conv.root) or not same_dtype(other, conv.root):
        return None
    assert isinstance(other, Node)
    return dataclasses.replace(conv, root=user, other=other)


def _activate(conv: Conv, activations: Activations) -> Conv | None:
    """relu(conv(x, w) + r)"""
    if conv.act != "none" or conv.root not in activations:
        return None
    act, root = activations[conv.root]
    return dataclasses.replace(conv, root=root, act=act)


def _folding_pays(conv: Conv, constants: frozenset[Node]) -> bool:
    weight, result = value_of(conv.call.weight), value_of(conv.call.node)
    return constants.issuperset(_folded(conv)) or bytes_of(weight) < bytes_of(result)


def _folded(conv: Conv) -> Iterator[Any]:
    """What weight and bias of the convolution would be made of."""
    yield from (a for a in (conv.call.weight, conv.call.bias) if a is not None)
    for step in conv.affine:
        parts = (step.operand,) if isinstance(step, Step) else (step.weight, step.bias, step.mean, step.var)
        yield from (p for p in parts if p is not None)


def _apply(conv: Conv, vendor: Claims) -> bool:
    """Put the call in the graph, if it gives the same tensor and the vendor claims it."""
    call = conv.call
    if not same_meta(value_of(call.node), value_of(conv.root)):
        return False  # eager's strides are `other`'s
    emit = Emitter(conv.root)
    weight, bias = _fold(emit, conv, call.weight, call.bias)
    target = torch.ops.dicp.conv.default
    rest = (conv.other, call.stride, call.padding, call.dilation, call.groups, conv.act)
    new = try_claim(vendor, target, (call.x, weight, bias, *rest), at=conv.root)
    dtype = value_of(conv.root).dtype
    if new is None and bias is not None and value_of(bias).dtype != dtype:
        rounded = emit(prims.convert_element_type.default, bias, dtype)
        new = try_claim(vendor, target, (call.x, weight, rounded, *rest), at=conv.root)
    if new is None:
        emit.undo()
        return False
    conv.root.replace_all_uses_with(new)
    return True


def _fold(emit: Emitter, conv: Conv, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Weight and bias of the convolution that does the steps itself.

    So far the steps make y * scale + shift: vectors of N elements, None standing for 1 and 0.
    """
    dtype, steps = value_of(weight).dtype, conv.affine
    if conv.scales and dtype in LOW_PRECISION:
        weight, bias, steps = (_widened(emit, x) for x in (weight, bias, steps))
    scale, shift = None, bias
    for step in (s for norm_or_step in steps for s in _steps(emit, norm_or_step)):
        like = _vector_value(step.operand)
        if step.name in ("add", "sub"):
            shift = _shifted(emit, shift, step)
        else:
            factor = step.operand
            if step.name == "div":
                factor = emit(aten.reciprocal.default, factor, value=like)
            scale = factor if scale is None else emit(aten.mul.Tensor, scale, factor, value=like)
            shift = None if shift is None else emit(aten.mul.Tensor, shift, factor, value=like)
    if scale is not None:
        spread = emit(aten.view.default, scale, [-1] + [1] * (rank(weight) - 1))
        dense = value_of(weight) if is_contiguous(weight) else None
        weight = emit(aten.mul.Tensor, weight, spread, value=dense)
        if value_of(weight).dtype != dtype:
            weight = emit(prims.convert_element_type.default, weight, dtype)
    if shift is not None and conv.other is not None and value_of(shift).dtype != dtype:
        shift = emit(prims.convert_element_type.default, shift, dtype)
    return weight, shift


def _widened(emit: Emitter, x: Any) -> Any:
    """A tensor, or the tensors of steps, in float32."""
    if isinstance(x, Node):
        return emit(prims.convert_element_type.default, x, torch.float32)
    if isinstance(x, tuple):
        return tuple(_widened(emit, step) for step in x)
    if isinstance(x, (Step, Norm)):
        nodes = {k: v for k, v in vars(x).items() if isinstance(v, Node)}
        return dataclasses.replace(x, **{k: _widened(emit, v) for k, v in nodes.items()})
    return x


def _vector_value(vector: Node) -> Any:
    """What elementwise calls on vectors of N elements give, if that needs no inferring."""
    return value_of(vector) if is_contiguous(vector) else None


def _steps(emit: Emitter, step: Step | Norm) -> list[Step]:
    """batch_norm  ->  sub mean, mul weight * rsqrt(var + eps), add bias"""
    if isinstance(step, Step):
        return [step]
    like = _vector_value(step.var)
    factor = emit(aten.rsqrt.default, emit(aten.add.Tensor, step.var, step.eps, value=like), value=like)
    factor = factor if step.weight is None else emit(aten.mul.Tensor, factor, step.weight, value=like)
    steps = [Step("sub", step.mean), Step("mul", factor)]
    return steps if step.bias is None else [*steps, Step("add", step.bias)]


def _shifted(emit: Emitter, shift: Any, step: Step) -> Any:
    like = _vector_value(step.operand)
    if shift is not None:
        return emit(
            aten.add.Tensor if step.name == "add" else aten.sub.Tensor, shift, step.operand, value=like
        )
    return step.operand if step.name == "add" else emit(aten.neg.default, step.operand, value=like)
