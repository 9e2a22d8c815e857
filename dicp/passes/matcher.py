"""Patterns over FX graphs, indifferent to shapes and dtypes.

A pattern is built from a few combinators and matched at the node that computes its result:

    x = var("x")
    SILU = either(op(aten.silu.default, x), both_ways(aten.mul.Tensor, x, op(aten.sigmoid.default, x)))
    found = match(SILU, node)
    found["x"], found.interior   # the node x stands for, and the calls that would go away

A variable that occurs twice must meet the same node twice. A match holds only if nobody outside it uses a
value inside it: such a value has to be computed anyway, so rewriting would do its work twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.fx import Node

from dicp.passes.facts import is_pure, is_tensor, uniform_value

Target = Any


class Pat:
    """A pattern: what an argument of a call may be."""

    def matches(self, value: Any, state: State) -> Iterator[State]:
        """Every way to match, each as the state it leads to."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class State:
    """Bindings so far, and the calls matched so far."""

    bindings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    constants: tuple[Node, ...] = ()

    def bind(self, name: str, value: Any) -> State | None:
        if name in self.bindings:
            same = self.bindings[name] is value or self.bindings[name] == value
            return self if same else None
        return dataclasses.replace(self, bindings={**self.bindings, name: value})

    def take(self, node: Node) -> State:
        return dataclasses.replace(self, nodes=(*self.nodes, node))


@dataclasses.dataclass(frozen=True)
class Match:
    """Where a pattern holds: its variables, and the nodes that compute nothing but its root."""

    root: Node
    bindings: Mapping[str, Any]
    interior: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.bindings.get(name, default)


@dataclasses.dataclass(frozen=True)
class Var(Pat):
    name: str
    where: Callable[[Node], bool] | None = None

    def matches(self, value: Any, state: State) -> Iterator[State]:
        if not is_tensor(value) or (self.where is not None and not self.where(value)):
            return
        bound = state.bind(self.name, value)
        if bound is not None:
            yield bound


@dataclasses.dataclass(frozen=True)
class Const(Pat):
    name: str | None
    number: float | None

    def matches(self, value: Any, state: State) -> Iterator[State]:
        number = uniform_value(value)
        if number is None or (self.number is not None and not _close(number, self.number)):
            return
        bound = state if self.name is None else state.bind(self.name, number)
        if bound is not None:
            made = (value,) if isinstance(value, Node) else ()
            yield dataclasses.replace(bound, constants=(*bound.constants, *made))


@dataclasses.dataclass(frozen=True)
class Exactly(Pat):
    value: Any

    def matches(self, value: Any, state: State) -> Iterator[State]:
        if not isinstance(value, Node) and value == self.value:
            yield state


@dataclasses.dataclass(frozen=True)
class Op(Pat):
    targets: tuple[Target, ...]
    args: tuple[Pat, ...]
    commutative: bool = False
    where: Callable[[Node], bool] | None = None
    name: str | None = None

    def matches(self, value: Any, state: State) -> Iterator[State]:
        if not isinstance(value, Node) or value.target not in self.targets or not is_pure(value):
            return
        if len(value.args) < len(self.args) or (self.where is not None and not self.where(value)):
            return
        inner = state.take(value) if self.name is None else state.take(value).bind(self.name, value)
        if inner is None:
            return
        yield from _match_all(self.args, value.args, inner)
        if self.commutative:
            yield from _match_all(self.args, (value.args[1], value.args[0]), inner)


@dataclasses.dataclass(frozen=True)
class Either(Pat):
    choices: tuple[Pat, ...]

    def matches(self, value: Any, state: State) -> Iterator[State]:
        for choice in self.choices:
            yield from choice.matches(value, state)


@dataclasses.dataclass(frozen=True)
class Through(Pat):
    """The pattern, possibly behind calls of the given targets (each a function of its first argument)."""

    targets: tuple[Target, ...]
    inner: Pat

    def matches(self, value: Any, state: State) -> Iterator[State]:
        yield from self.inner.matches(value, state)
        if isinstance(value, Node) and value.target in self.targets and is_pure(value):
            yield from self.matches(value.args[0], state.take(value))


def var(name: str, where: Callable[[Node], bool] | None = None) -> Pat:
    """Any tensor, for which `where` holds."""
    return Var(name, where)


def const(name: str | None = None, number: float | None = None) -> Pat:
    """A Python number, or a tensor all of whose elements are one (a full, a cast of a full, ...)."""
    return Const(name, number)


def op(
    target: Target | tuple[Target, ...],
    *args: Any,
    where: Callable[[Node], bool] | None = None,
    name: str | None = None,
) -> Pat:
    """A call of the target (or one of them); leading arguments given as patterns or as plain values."""
    return Op(_targets(target), _patterns(args), where=where, name=name)


def both_ways(target: Target | tuple[Target, ...], a: Any, b: Any) -> Pat:
    """A call of a commutative target, its two arguments in either order, nothing scaled by alpha."""
    return Op(_targets(target), _patterns((a, b)), commutative=True, where=_no_alpha)


def either(*choices: Pat) -> Pat:
    """The first of the patterns that leads to a match."""
    return Either(choices)


def through(targets: Target | tuple[Target, ...], inner: Pat) -> Pat:
    """The pattern behind any number of calls of the targets: casts, clones, views."""
    return Through(_targets(targets), inner)


def match(pattern: Pat, node: Node) -> Match | None:
    """The first way the pattern holds at `node` with no interior value used outside."""
    for state in pattern.matches(node, State()):
        inside = set(state.nodes)
        # A constant used elsewhere stays there; one used here only (full_like(x) uses x) goes as well.
        own = [c for c in state.constants if inside.issuperset(c.users)]
        inside.update(own)
        interior = tuple(n for n in dict.fromkeys((*state.nodes, *own)) if n is not node)
        if all(user in inside for n in interior for user in n.users):
            return Match(node, state.bindings, interior)
    return None


def targets_of(pattern: Pat) -> tuple[Target, ...]:
    """The targets a call needs to have to match, for patterns that are an `op` or a choice of some."""
    if isinstance(pattern, Either):
        return tuple(dict.fromkeys(t for choice in pattern.choices for t in targets_of(choice)))
    assert isinstance(pattern, Op), "the pattern has no root of its own"
    return pattern.targets


def _match_all(patterns: tuple[Pat, ...], values: Any, state: State) -> Iterator[State]:
    if not patterns:
        yield state
        return
    for next_state in patterns[0].matches(values[0], state):
        yield from _match_all(patterns[1:], values[1:], next_state)


def _targets(target: Target | tuple[Target, ...]) -> tuple[Target, ...]:
    return target if isinstance(target, tuple) else (target,)


def _patterns(args: tuple[Any, ...]) -> tuple[Pat, ...]:
    numbers = (int, float)
    return tuple(
        a
        if isinstance(a, Pat)
        else Const(None, a)
        if isinstance(a, numbers) and not isinstance(a, bool)
        else Exactly(a)
        for a in args
    )


def _no_alpha(node: Node) -> bool:
    return bool(node.kwargs.get("alpha", 1) == 1)


def _close(a: float, b: float) -> bool:
    """Equal up to the rounding of a constant to bfloat16 or float32 by whoever wrote it."""
    return a == b or math.isclose(a, b, rel_tol=1e-6)
