"""Complex arithmetic as arithmetic of real and imaginary parts, which kernels compute and fuse.

    z = mul(view_as_complex(x), f)         re, im = x[..., 0], x[..., 1];  c, s = those of f
    y = view_as_real(z)               ->   y = stack([re * c - im * s, re * s + im * c], -1)

Kernels hold no complex numbers: each such operator would be a library's call, whose result goes through
memory. What is connected is rewritten together, where that spares more calls than it takes conversions of
parts to complex tensors: in rotary embeddings, not in a product of spectra between two transforms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ops.aliases import base_of
from dicp.passes.facts import aten, prims, value_of
from dicp.passes.rules import Emitter, finish
from dicp.vendor.base import VendorBase, takes_graphs

_COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Parts:
    """Of a value: nodes or numbers; an imaginary part of None is zero."""

    re: Any
    im: Any


Split = Callable[[Emitter, Node, list[Parts]], Parts]
"""The parts of a node's result, given those of its operands."""


def rewrite_complex(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """Rewrite what pays, for vendors that have kernels: the toolchain of another takes graphs as they are."""
    if takes_graphs(vendor) or not any(map(_is_complex, gm.graph.nodes)):
        return gm
    returned = Counter(map(base_of, gm.graph.find_nodes(op="output")[0].all_input_nodes))
    for group in _groups(gm):
        if _pays(group) and not _shown(group, returned):
            _rewrite(group)
    return finish(gm)


def _is_complex(x: Any) -> bool:
    val = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype in _COMPLEX


# -- what is rewritten together ----------------------------------------------------------------------------


def _groups(gm: GraphModule) -> list[list[Node]]:
    """Nodes with parts, those that complex values connect together; in the graph's order."""
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    group: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        marked = any(_is_marked(x) and x not in group for x in node.all_input_nodes)
        if marked or not _has_parts(node):
            continue
        joined = {id(group[x]): group[x] for x in node.all_input_nodes if x in group and _is_complex(x)}
        mine = next(iter(joined.values()), [])
        if len(joined) > 1:
            mine = sorted((n for g in joined.values() for n in g), key=place.__getitem__)
        mine.append(node)
        group.update(dict.fromkeys(mine if len(joined) > 1 else [node], mine))
    return list({id(g): g for g in group.values()}.values())


def _has_parts(node: Node) -> bool:
    if node.target in _READ:
        return _is_complex(node.args[0])
    if node.target not in _SPLIT or not _is_complex(node) or any(map(_is_half, node.all_input_nodes)):
        return False
    if node.target not in _MIXED and not _is_complex(node.args[0]):
        return False
    if node.target is aten.complex.default:
        return all(_fills(x, node) for x in node.args)
    if node.target in _ARITHMETIC and node.kwargs:
        return False
    if node.target is aten.div.Tensor:
        return not _is_complex(node.args[1]) and not isinstance(node.args[1], complex)
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return True
    x, y = node.args  # an imaginary part may be one operand's alone
    return all(_fills(z, node) for z in (x, y) if _is_complex(z)) and (_is_complex(x) or isinstance(y, Node))


def _is_half(x: Node) -> bool:
    """Whether it is of complex numbers whose parts would be computed in another precision than theirs."""
    val = x.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype.is_complex and val.dtype not in _COMPLEX


def _is_marked(x: Any) -> bool:
    """Whether elements are conjugates, or negatives, of what lies in memory."""
    return _is_complex(x) and bool(value_of(x).is_conj() or value_of(x).is_neg())


def _fills(x: Node, node: Node) -> bool:
    """Whether each element of an operand is read at one of the result alone."""
    return tuple(value_of(x).shape) == tuple(value_of(node).shape)


def _pays(group: list[Node]) -> bool:
    """Whether more calls go than conversions come; what is not made here is read where it lies."""
    inside = set(group)
    calls = sum(n.target not in _VIEWS and n.target is not aten._conj.default for n in group)
    conversions = sum(_is_complex(n) and not inside.issuperset(n.users) for n in group)
    return calls > conversions and any(n.target in _ARITHMETIC for n in group)


def _shown(group: list[Node], returned: Counter[Node]) -> bool:
    """Whether results share memory that the rewritten ones would not."""
    roots = {base_of(n) for n in group}
    if any(_is_marked(n) and any(user.op == "output" for user in n.users) for n in group):
        return True  # the caller gets the mark, and the memory of what was conjugated
    return any(returned[r] > (0 if r.op == "placeholder" else 1) for r in roots)


# -- the rewriting -----------------------------------------------------------------------------------------


def _rewrite(group: list[Node]) -> None:
    inside, parts = set(group), dict[Node, Parts]()

    def of(emit: Emitter, x: Any, node: Node) -> Parts:
        if not isinstance(x, Node):
            return Parts(x.real, x.imag) if isinstance(x, complex) else Parts(x, None)
        if _is_complex(x) and x not in parts:
            parts[x] = _taken_apart(emit, emit(aten.view_as_real.default, x))
        if node.target in _ARITHMETIC and x not in parts:
            return Parts(_as_part(emit, x, value_of(node).dtype.to_real()), None)
        return parts.get(x, Parts(x, None))

    for node in group:
        emit = Emitter(node)
        operands = [of(emit, x, node) for x in node.args]
        if node.target in _READ:
            node.replace_all_uses_with(_READ[node.target](emit, operands[0], value_of(node.args[0])))
            continue
        parts[node] = _SPLIT[node.target](emit, node, operands)
        others = [user for user in node.users if user not in inside]
        if others:
            whole = emit(aten.view_as_complex.default, _joined(emit, parts[node], value_of(node)))
            for user in others:
                user.replace_input_with(node, whole)


def _as_part(emit: Emitter, x: Node, dtype: torch.dtype) -> Node:
    """A real operand in the dtype of the parts: beside a number, or a tensor of no dims, products would have
    the operand's own."""
    return x if value_of(x).dtype == dtype else emit(prims.convert_element_type.default, x, dtype)


def _taken_apart(emit: Emitter, pairs: Node) -> Parts:
    return Parts(emit(aten.select.int, pairs, -1, 0), emit(aten.select.int, pairs, -1, 1))


def _joined(emit: Emitter, x: Parts, value: torch.Tensor) -> Node:
    """Pairs of the parts, in the order in memory of `value`, the fake complex result: a caller may have been
    promised it."""
    strides = value.stride()
    order = list(range(value.dim()))
    if all(isinstance(s, int) for s in strides):
        order.sort(key=lambda d: -strides[d])
    if order == sorted(order):
        return emit(aten.stack.default, [x.re, x.im], -1)
    parts = [emit(aten.permute.default, part, order) for part in (x.re, x.im)]
    back = [order.index(d) for d in range(len(order))]
    return emit(aten.permute.default, emit(aten.stack.default, parts, -1), [*back, len(order)])


def _plus(emit: Emitter, target: Any, a: Any, b: Any) -> Any:
    """a + b or a - b."""
    if a is None and b is not None:
        return b if target is aten.add.Tensor else emit(aten.neg.default, b)
    return a if b is None else emit(target, a, b)


def _times(emit: Emitter, a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    return emit(aten.mul.Tensor, *((a, b) if isinstance(a, Node) else (b, a)))


def _sum(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    a, b = x
    return Parts(_plus(emit, node.target, a.re, b.re), _plus(emit, node.target, a.im, b.im))


def _product(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    a, b = x
    re = _plus(emit, aten.sub.Tensor, _times(emit, a.re, b.re), _times(emit, a.im, b.im))
    return Parts(re, _plus(emit, aten.add.Tensor, _times(emit, a.re, b.im), _times(emit, a.im, b.re)))


def _quotient(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    a, b = x
    return Parts(emit(aten.div.Tensor, a.re, b.re), emit(aten.div.Tensor, a.im, b.re))


def _polar(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    size, angle = x[0].re, x[1].re
    re, im = (emit(aten.mul.Tensor, size, emit(f, angle)) for f in (aten.cos.default, aten.sin.default))
    return Parts(re, im)


def _conjugate(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    return Parts(x[0].re, emit(aten.neg.default, x[0].im))


def _each(emit: Emitter, node: Node, x: list[Parts]) -> Parts:
    """What the node does, done to each part; their strides may have no such view."""
    merges = node.target in (aten.view.default, aten._unsafe_view.default)
    target = aten.reshape.default if merges else node.target
    re, im = (emit(target, part, *node.args[1:], **node.kwargs) for part in (x[0].re, x[0].im))
    return Parts(re, im)


_VIEWS = frozenset((
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int,
))
_MIXED = frozenset((
    aten.view_as_complex.default, aten.complex.default, aten.polar.default,
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor,
))  # whose first operand may be real
_COPIES = frozenset((aten.clone.default, aten.alias.default, aten.detach.default))
_CONJUGATES = (aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)

_ARITHMETIC: dict[Any, Split] = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.neg.default: _each,
    aten.sum.dim_IntList: _each,
}
_SPLIT: dict[Any, Split] = {
    aten.view_as_complex.default: lambda emit, node, x: _taken_apart(emit, x[0].re),
    aten.complex.default: lambda emit, node, x: Parts(x[0].re, x[1].re),
    aten.polar.default: _polar,
    aten.index.Tensor: _each,
    aten.index_select.default: _each,
    **_ARITHMETIC,
    **dict.fromkeys(_CONJUGATES, _conjugate),
    **dict.fromkeys(_VIEWS, _each),
    **dict.fromkeys(_COPIES, lambda emit, node, x: x[0]),
}
_READ: dict[Any, Callable[[Emitter, Parts, torch.Tensor], Node]] = {
    aten.view_as_real.default: _joined,
    aten.abs.default: lambda emit, x, value: emit(aten.hypot.default, x.re, x.im),
    aten.angle.default: lambda emit, x, value: emit(aten.atan2.default, x.im, x.re),
}
"""What is real, from the parts and the fake value of the complex operand."""

__all__ = ["rewrite_complex"]
