"""One spelling for each thing, and nothing that does nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dicp.compat import known_equal
from dicp.ir.meta_keys import ROUNDED
from dicp.ir.verify import insert, same_meta
from dicp.ops.aliases import base_of, is_view, places_in_memory
from dicp.passes.facts import (
    aten,
    erase_dead,
    is_contiguous,
    is_plain_cast,
    is_pure,
    is_tensor,
    mutated_arguments,
    outputs_of,
    prims,
    rank,
    same_shape,
    uniform_value,
    users_through_views,
    value_of,
)

Rule = Callable[[Node], "Node | None"]

# A value of the first dtype survives in each of the others.
_LOSSLESS = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.int32: (torch.int64, torch.float64),
    torch.int16: (torch.int32, torch.int64, torch.float32, torch.float64),
}
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_TAKE_NUMBER = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def canonicalize(gm: GraphModule) -> GraphModule:
    """Drop what does nothing and give views one form.   relu(clone(t(t(x)))) * 1  ->  relu(x)

    Gives: no t, transpose, _unsafe_view, alias, detach; no view of a view or permute of a permute; no copy,
    cast, slice, expand or identity arithmetic that changes nothing; equal pure calls once; no dead pure call.
    Keeps what memory can tell: a copy stays where dropping it would make an output share memory with an input
    or another output, and where the original is written. x + 0.0 stays: it turns -0.0 into 0.0.
    """
    graph = gm.graph
    escaping = {base_of(n) for n in outputs_of(graph)}
    written = {base_of(a) for n in graph.nodes for a in mutated_arguments(n)}
    outputs = set(outputs_of(graph))
    for node in list(graph.nodes):
        while node.op == "call_function" and (found := _first_rule(node)) is not None:
            if not _may_replace(node, found, outputs, escaping, written):
                if found.op == "call_function":
                    _erase_unused(graph, found)
                break
            if base_of(node) in written:
                written.add(base_of(found))
            _replace(graph, node, found, outputs, escaping)
            node = found
    _merge_equal_calls(graph)
    erase_dead(graph)
    return gm


def _first_rule(node: Node) -> Node | None:
    for rule in _RULES.get(node.target, ()):
        found = rule(node)
        if found is not None:
            return found
    return None


def _may_replace(node: Node, new: Node, outputs: set[Node], escaping: set[Node], written: set[Node]) -> bool:
    """Whether nobody outside the graph, and no write inside it, can tell the two apart."""
    if not same_meta(value_of(node), value_of(new)):
        return False
    base = base_of(new)
    if base_of(node) is base:
        # The same memory either way; AOTAutograd tells an input from an alias of it by the node returned.
        return not (node in outputs and (new.op == "placeholder" or new in outputs))
    if any(places_in_memory(u) for u in users_through_views(node)):
        return False  # the other's memory may begin elsewhere
    if base in written or base_of(node) in written:
        return not new.users  # made just now, in the place of the old one: it has memory of its own too
    return base_of(node) not in escaping or not (base.op in ("placeholder", "get_attr") or base in escaping)


def _replace(graph: Graph, node: Node, new: Node, outputs: set[Node], escaping: set[Node]) -> None:
    if base_of(node) in escaping:
        escaping.add(base_of(new))
    if node in outputs:
        outputs.add(new)
    if ROUNDED in node.meta:
        new.meta[ROUNDED] = True
    node.replace_all_uses_with(new)
    _erase_unused(graph, node)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node nobody uses; what it alone used is left to dead code elimination."""
    if not node.users:
        graph.erase_node(node)


# -- rules: each returns the node that can stand for the given one, or None ------------------


def _insert_before(node: Node, target: Any, *args: Any) -> Node:
    with node.graph.inserting_before(node):
        return insert(node.graph, target, args, like=node)


def _respell(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Another call that gives the very same tensor."""
    with node.graph.inserting_before(node):
        return insert(node.graph, target, args, kwargs, like=node, value=value_of(node))


def _input(node: Node) -> Node | None:
    """alias(x), detach(x), clone(x), expand(x, x.shape), ...  ->  x   where the metas are equal"""
    x = node.args[0]
    return x if isinstance(x, Node) and same_meta(value_of(node), value_of(x)) else None


def _transpose_to_permute(node: Node) -> Node | None:
    """t(x)  ->  permute(x, [1,0]);   transpose(x, -1, -2)  ->  permute(x, [..., n-1, n-2])"""
    x = node.args[0]
    assert isinstance(x, Node)
    dims = list(range(rank(x)))
    if len(dims) < 2:
        return x
    a, b = node.args[1:] if node.target is aten.transpose.int else (0, 1)
    dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return _respell(node, aten.permute.default, x, dims)


def _unsafe_view_to_view(node: Node) -> Node | None:
    """_unsafe_view(x, s)  ->  view(x, s)"""
    return _respell(node, aten.view.default, *node.args)


def _permute_of_permute(node: Node) -> Node | None:
    """permute(permute(x, p), q)  ->  permute(x, p[q])  ->  x"""
    x, dims = node.args
    order = _dims(dims)
    inner = x
    if isinstance(x, Node) and x.target is aten.permute.default:
        inner, below = x.args[0], _dims(x.args[1])
        order = [below[d] for d in order]
    assert isinstance(inner, Node)
    if order == list(range(len(order))):
        return inner
    return None if inner is x else _respell(node, aten.permute.default, inner, order)


def _permute_of_unsqueeze(node: Node) -> Node | None:
    """permute(unsqueeze(x, d), p)  ->  unsqueeze(permute(x, q), e)   (einsum writes the left side)"""
    inner, dims = node.args[0], _dims(node.args[1])
    if not isinstance(inner, Node) or inner.target is not aten.unsqueeze.default:
        return None
    x, new = inner.args[0], inner.args[1] % len(dims)  # type: ignore[operator]
    order = [d - (d > new) for d in dims if d != new]
    assert isinstance(x, Node)
    if order != list(range(len(order))):
        x = _insert_before(node, aten.permute.default, x, order)
    return _respell(node, aten.unsqueeze.default, x, dims.index(new))


def _permute_of_unit_dims(node: Node) -> Node | None:
    """permute(x: [A,1,B], [0,2,1])  ->  view(x, [A,B,1])"""
    shape, dims = list(value_of(node).shape), _dims(node.args[1])
    moved = [d for d, size in zip(dims, shape) if not known_equal(size, 1)]
    if moved != sorted(moved) or not all(isinstance(size, int) for size in shape):
        return None
    return _respell(node, aten.view.default, node.args[0], shape)


def _dims(dims: Any) -> list[int]:
    return [d % len(dims) for d in dims]


def _view_of_view(node: Node) -> Node | None:
    """view(view(x, s), r), view(unsqueeze(x, d), r)  ->  view(x, r)"""
    inner, shape = node.args
    if not isinstance(inner, Node) or inner.target not in (aten.view.default, aten.unsqueeze.default):
        return None
    x = inner.args[0]
    assert isinstance(x, Node)
    if same_meta(value_of(node), value_of(x)):
        return x
    if is_contiguous(x):
        return _respell(node, aten.view.default, x, shape)
    try:
        return _insert_before(node, aten.view.default, x, shape)
    except (RuntimeError, ValueError):  # x's strides allow it in two steps only
        return None


def _window_of_memory(node: Node) -> Node | None:
    """as_strided(view(x), size, stride, at)  ->  as_strided(x, size, stride, at)
    as_strided_scatter(view(x), src, ...)  ->  as_strided(as_strided_scatter(x, src, ...), as the view lies)

    Places are those of x's memory, of which a view may show a part.
    """
    view: Any = node.args[0]
    base, scatters = base_of(view), node.target is aten.as_strided_scatter.default
    if base is view or base.op != "call_function" or not _count_alike(value_of(view), value_of(base)):
        return None
    size, stride, start = value_of(view).shape, value_of(view).stride(), value_of(view).storage_offset()
    count = 4 if scatters else 3
    at = node.args[count] if len(node.args) > count and node.args[count] is not None else start
    numbers = (at, *size, *stride, start) if scatters else (at,)
    if any(isinstance(n, torch.SymInt) for n in numbers):  # which would need nodes
        return None
    with node.graph.inserting_before(node):
        new = insert(node.graph, node.target, (base, *node.args[1:count], at), like=node)
        if not scatters:
            return new
        return insert(node.graph, aten.as_strided.default, (new, list(size), list(stride), start), like=node)


def _count_alike(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether places in the memory of the two are counted alike, and hold the elements as they are read."""
    marked = any(v.is_conj() or v.is_neg() for v in (view, base))
    return view.dtype == base.dtype and not marked


def _whole_slice(node: Node) -> Node | None:
    """slice(x, d, 0, size or max)  ->  x"""
    start, step = _argument(node, 2, 0), _argument(node, 4, 1)
    return _input(node) if start in (0, None) and step == 1 else None


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _cast_of_lossless_cast(node: Node) -> Node | None:
    """cast(cast(x: bf16, f32), bf16)  ->  x;   cast(cast(x: bf16, f32), f64)  ->  cast(x, f64)"""
    inner = node.args[0]
    if not is_plain_cast(node) or not isinstance(inner, Node) or not is_plain_cast(inner):
        return None
    x = inner.args[0]
    if not is_tensor(x) or not isinstance(x, Node):
        return None
    if value_of(inner).dtype not in _LOSSLESS.get(value_of(x).dtype, ()):
        return None
    if value_of(node).dtype == value_of(x).dtype:
        return x
    return _respell(node, prims.convert_element_type.default, x, value_of(node).dtype)


def _identity_arithmetic(node: Node) -> Node | None:
    """x * 1, x / 1, x - 0, x + 0 (integers), x ** 1, x & True  ->  x"""
    x, y = node.args[:2]
    if node.target in _COMMUTATIVE and uniform_value(x) is not None:
        x, y = y, x
    if not is_tensor(x) or not isinstance(x, Node):
        return None
    number = uniform_value(y)
    if number is None or not same_meta(value_of(node), value_of(x)):
        return None
    return x if _is_neutral(node, value_of(x).dtype, number) else None


def _is_neutral(node: Node, dtype: torch.dtype, number: complex | bool) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    if name in ("aten::mul", "aten::pow"):
        return number == 1
    if name == "aten::div":
        return number == 1 and node.kwargs.get("rounding_mode") is None
    if name == "aten::sub":
        if isinstance(number, complex) or number != 0 or node.kwargs.get("alpha", 1) != 1:
            return False
        return math.copysign(1, number) > 0
    if name == "aten::add":
        return number == 0 and not dtype.is_floating_point and not dtype.is_complex
    if name in ("aten::bitwise_and", "aten::logical_and"):
        return dtype == torch.bool and bool(number)
    return False


def _constant_operand(node: Node) -> Node | None:
    """add(x, full([], 2))  ->  add(x, 2)"""
    x, y = node.args[:2]
    if node.target in _COMMUTATIVE and uniform_value(x) is not None and node.kwargs.get("alpha", 1) == 1:
        x, y = y, x
    if not is_tensor(x) or not isinstance(y, Node) or isinstance(value_of(y), torch.SymInt):
        return None
    number = uniform_value(y)
    if number is None:
        return None
    with node.graph.inserting_before(node):
        new = insert(node.graph, node.target, (x, number, *node.args[2:]), node.kwargs, like=node)
    if same_meta(value_of(node), value_of(new)):
        return new
    # A number takes no part in type promotion where the tensor did.
    _erase_unused(node.graph, new)
    return None


def _filled(node: Node, like: Node, number: int | float | bool) -> Node | None:
    """full(sizes, number) in place of a call whose result has the sizes of `like`, one of its operands."""
    value = value_of(node)
    if not same_shape(like, node) or not is_contiguous(node):
        return None
    with node.graph.inserting_before(node):
        sizes = [
            n if isinstance(n, int) else insert(node.graph, aten.sym_size.int, (like, d), {}, like=node)
            for d, n in enumerate(value.shape)
        ]
        how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        return insert(node.graph, aten.full.default, (sizes, number), how, like=node)


def _constant_like(node: Node) -> Node | None:
    """zeros_like(x)  ->  full(x's sizes, 0)"""
    x = node.args[0]
    assert isinstance(x, Node)
    return _filled(node, x, int(node.target is aten.ones_like.default))


def _known_comparison(node: Node) -> Node | None:
    """arange(n) >= 0  ->  full([n], True)"""
    x, number = node.args
    if not isinstance(x, Node) or not isinstance(number, (int, float)):
        return None
    least = _least(x)
    if least is None or not (least > number or (least == number and node.target is aten.ge.Scalar)):
        return None
    return _filled(node, x, True)


def _least(node: Node) -> int | float | None:
    """A number that no element of the range behind views is below."""
    while node.target in _VIEWS_AND_COPIES and isinstance(node.args[0], Node):
        node = node.args[0]
    if value_of(node).dtype not in (torch.int64, torch.int32, torch.float32, torch.float64):
        return None  # a narrow integer wraps
    if node.target is aten.arange.default:
        return 0
    ranged = node.target in (aten.arange.start, aten.arange.start_step) and not any(
        isinstance(a, Node) for a in (node.args[0], *node.args[2:])
    )
    upwards = ranged and (len(node.args) < 3 or node.args[2] > 0)  # type: ignore[operator]
    if not upwards:
        return None
    start: Any = node.args[0]
    return start if value_of(node).dtype.is_floating_point else int(start)


def _decided_where(node: Node) -> Node | None:
    """where(full([n], True), a, b)  ->  a"""
    condition, *choices = node.args
    known = uniform_value(condition)
    if known is None:
        return None
    chosen = choices[0 if known else 1]
    if not isinstance(chosen, Node):
        return None
    if same_meta(value_of(node), value_of(chosen)):
        return chosen
    number = uniform_value(chosen)
    like = next((a for a in node.args if isinstance(a, Node) and same_shape(a, node)), None)
    return None if number is None or like is None else _filled(node, like, number)


def _copy_of_copy(node: Node) -> Node | None:
    """clone(permute(clone(x), p), contiguous)  ->  clone(permute(x, p), contiguous)"""
    if node.kwargs.get("memory_format") is not torch.contiguous_format:
        return None
    below, dims = node.args[0], None
    assert isinstance(below, Node)
    if below.target is aten.permute.default:
        below, dims = below.args  # type: ignore[assignment]
    if below.target is not aten.clone.default:
        return None
    x = below.args[0] if dims is None else _insert_before(node, aten.permute.default, below.args[0], dims)
    return _respell(node, node.target, x, **node.kwargs)


_ALIASES: tuple[Rule, ...] = (_input,)
_VIEWS_AND_COPIES = (
    aten.view.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.clone.default,
)
_RULES: dict[Any, tuple[Rule, ...]] = {
    aten.alias.default: _ALIASES,
    aten.detach.default: _ALIASES,
    aten.lift_fresh_copy.default: _ALIASES,
    aten.lift_fresh.default: _ALIASES,
    aten.clone.default: (_input, _copy_of_copy),
    aten.expand.default: _ALIASES,
    aten.t.default: (_transpose_to_permute,),
    aten.transpose.int: (_transpose_to_permute,),
    aten._unsafe_view.default: (_unsafe_view_to_view,),
    aten.permute.default: (_permute_of_permute, _permute_of_unsqueeze, _permute_of_unit_dims),
    aten.view.default: (_input, _view_of_view),
    aten.slice.Tensor: (_whole_slice,),
    aten.as_strided.default: (_window_of_memory,),
    aten.as_strided_scatter.default: (_window_of_memory,),
    aten._to_copy.default: (_input, _cast_of_lossless_cast),
    prims.convert_element_type.default: (_input, _cast_of_lossless_cast),
    aten.zeros_like.default: (_constant_like,),
    aten.ones_like.default: (_constant_like,),
    aten.ge.Scalar: (_known_comparison,),
    aten.gt.Scalar: (_known_comparison,),
    aten.where.self: (_decided_where,),
    aten.mul.Scalar: (_identity_arithmetic,),
    aten.div.Scalar: (_identity_arithmetic,),
    aten.pow.Tensor_Scalar: (_identity_arithmetic,),
    aten.bitwise_and.Tensor: (_identity_arithmetic,),
    aten.logical_and.default: (_identity_arithmetic,),
    **dict.fromkeys(_TAKE_NUMBER, (_identity_arithmetic, _constant_operand)),
}


# -- equal calls ------------------


def _merge_equal_calls(graph: Graph) -> None:
    """y = f(x); z = f(x)  ->  y for both, unless both leave the graph or a write lies between."""
    escaping = {base_of(n) for n in outputs_of(graph)}
    outputs = set(outputs_of(graph))
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if mutated_arguments(node):
            seen.clear()
        if node.op not in ("call_function", "get_attr") or not is_pure(node):
            continue
        if node.meta.get("unbacked_bindings"):
            continue  # a size has a name of its own in each, which others go by
        first = seen.setdefault(_key(node), node)
        if first is node or value_of(node) is None:
            continue
        both_leave = (
            node in outputs and first in outputs
            if is_view(node)
            else _leaves(node, escaping) and _leaves(first, escaping)
        )
        if not both_leave:
            _replace(graph, node, first, outputs, escaping)


def _leaves(node: Node, escaping: set[Node]) -> bool:
    """Whether the caller gets memory that the call made: its result, or one of its results."""
    results = [u for u in node.users if u.target is operator.getitem]
    return base_of(node) in escaping or any(r in escaping for r in results)


def _key(node: Node) -> Any:
    """Equal for calls that compute the same; numbers are told from equal numbers of another type or sign."""
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, (int, float)):
        return type(value), repr(value)
    return value
