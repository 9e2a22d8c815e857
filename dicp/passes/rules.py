"""What the rewrites share: the vendor's say, the replacement of a node, the chain of a value's only users."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from dicp.ir.verify import insert
from dicp.passes.facts import aten, erase_dead, is_plain_cast, same_dtype, same_shape, value_of
from dicp.passes.matcher import Match, Pat, both_ways, either, match, op, targets_of, var


class Claims(Protocol):
    """The vendor, as far as a rewrite cares: which dicp::* calls it has code or a library for."""

    def supports(self, target: Any, node: Node) -> bool:
        """Whether the vendor claims the call; `node` is the call as it would stand in the graph."""


Activations = dict[Node, tuple[str, Node]]
"""value -> the name of the one activation that uses it, and the node of its result"""


def try_claim(vendor: Claims, target: Any, args: Sequence[Any], *, at: Node) -> Node | None:
    """`target(*args)`, which gives the tensor that node `at` does, if the vendor claims it.

    The new node stands before `at`; nothing uses it yet.
    """
    with at.graph.inserting_before(at):
        new = insert(at.graph, target, args, like=at, value=value_of(at))
    if vendor.supports(target, new):
        return new
    at.graph.erase_node(new)
    return None


class Emitter:
    """Inserts calls before a node, and takes them back."""

    def __init__(self, at: Node) -> None:
        self._at = at
        self._made: list[Node] = []

    def __call__(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Node:
        """value: the fake result, where it is known."""
        with self._at.graph.inserting_before(self._at):
            self._made.append(insert(self._at.graph, target, args, kwargs, like=self._at, value=value))
        return self._made[-1]

    def size(self, x: Node, dim: int) -> int | Node:
        """The size of a dim, as an argument of a call."""
        size = value_of(x).shape[dim]
        return size if isinstance(size, int) else self(aten.sym_size.int, x, dim)

    def undo(self) -> None:
        for node in reversed(self._made):
            node.graph.erase_node(node)


def replace(node: Node, new: Node) -> None:
    """Have `new` stand for `node`, with what is noted on it, and erase that here: attention, which may drop
    out, is not pure to all who ask."""
    for key, value in node.meta.items():
        if key != "val":
            new.meta[key] = value
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def finish(gm: GraphModule) -> GraphModule:
    """Erase what the rewrites left without a user."""
    erase_dead(gm.graph)
    return gm


def sole_user(node: Node) -> Node | None:
    """The one call that uses the value; None if others do, or the graph returns it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.op == "call_function" else None


# -- activations ------------------

_x = var("x")
_half = both_ways(aten.mul.Tensor, _x, 0.5)
_cube = either(
    op(aten.pow.Tensor_Scalar, _x, 3),
    both_ways(aten.mul.Tensor, both_ways(aten.mul.Tensor, _x, _x), _x),
)
_tanh_argument = both_ways(
    aten.mul.Tensor,
    both_ways(aten.add.Tensor, _x, both_ways(aten.mul.Tensor, _cube, 0.044715)),
    math.sqrt(2 / math.pi),
)
_erf_plus_1 = both_ways(
    aten.add.Tensor, op(aten.erf.default, both_ways(aten.mul.Tensor, _x, math.sqrt(0.5))), 1
)
_tanh_plus_1 = both_ways(aten.add.Tensor, op(aten.tanh.default, _tanh_argument), 1)


def _gelu_of(plus_1: Pat) -> Pat:
    """0.5 * x * (1 + f(x)), however the three factors are grouped."""
    return either(
        both_ways(aten.mul.Tensor, _half, plus_1),
        both_ways(aten.mul.Tensor, _x, both_ways(aten.mul.Tensor, plus_1, 0.5)),
        both_ways(aten.mul.Tensor, both_ways(aten.mul.Tensor, _x, plus_1), 0.5),
    )


def _approximate(kind: str) -> Callable[[Node], bool]:
    return lambda node: node.kwargs.get("approximate", "none") == kind


_PATTERNS: tuple[tuple[str, Pat], ...] = (
    ("relu", op(aten.relu.default, _x)),
    ("relu6", op(aten.hardtanh.default, _x, 0, 6)),
    ("gelu", op(aten.gelu.default, _x, where=_approximate("none"))),
    ("gelu_tanh", op(aten.gelu.default, _x, where=_approximate("tanh"))),
    ("silu", op(aten.silu.default, _x)),
    ("silu", both_ways(aten.mul.Tensor, _x, op(aten.sigmoid.default, _x))),
    ("sigmoid", op(aten.sigmoid.default, _x)),
    ("tanh", op(aten.tanh.default, _x)),
    ("gelu", _gelu_of(_erf_plus_1)),
    ("gelu_tanh", _gelu_of(_tanh_plus_1)),
)


_BY_TARGET: dict[Any, list[tuple[str, Pat]]] = {}
for _name, _pattern in _PATTERNS:
    for _target in targets_of(_pattern):
        _BY_TARGET.setdefault(_target, []).append((_name, _pattern))


def activations_of(gm: GraphModule) -> Activations:
    """For each value that nothing but one activation uses: which one, and where its result is."""
    found: Activations = {}
    for node in gm.graph.nodes:
        for name, pattern in _BY_TARGET.get(node.target, ()):
            m = match(pattern, node)
            if m is None or not _is_only_use(m):
                continue
            # sigmoid(x) inside x * sigmoid(x) is not x's only use, so no value has two entries.
            found[m["x"]] = (name, m.root)
            narrow = _without_casts(m)
            if narrow is not None:
                found[narrow[0]] = (name, narrow[1])
            break
    return found


def _is_only_use(m: Match) -> bool:
    inside, x = {m.root, *m.interior}, m["x"]
    return all(user in inside for user in x.users) and same_shape(m.root, x) and same_dtype(m.root, x)


def _without_casts(m: Match) -> tuple[Node, Node] | None:
    """(y, root) where the activation is cast(act(cast(y: bf16, f32)), bf16), as decompositions write it."""
    wide, back = m["x"], sole_user(m.root)
    if not is_plain_cast(wide) or back is None or not is_plain_cast(back):
        return None
    y = wide.args[0]
    if value_of(y).dtype not in (torch.bfloat16, torch.float16) or not same_dtype(y, back):
        return None
    return (y, back) if value_of(wide).dtype == torch.float32 and len(y.users) == 1 else None
