"""Activations that a backward computes again instead of keeping them: what elementwise code makes of others.

AOTAutograd's min-cut partitioner keeps whatever a backward has to have in memory anyway (the operand of a
product), since reading it takes no longer than writing it again. That counts time alone: a convolution's
result is kept for its batch norm's gradient and the relu of the norm for the next convolution's, a linear's
result and its gelu, the input of a layer norm and its output. Here the second of each pair leaves the
forward's results; the backward makes it from the first, right where it is wanted, so that one of them lives
at a time.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from dicp.compat import fake_mode_of, inputs_mutated_outside, quiet_shapes
from dicp.ops.aliases import base_of, is_view
from dicp.ops.table import table
from dicp.passes.facts import aten, bytes_of, is_pure, is_tensor, mutated_arguments, prims, value_of
from dicp.passes.norms import is_norm, is_statistic, norm_operands, normalise
from dicp.passes.rules import finish

SMALLEST = 1 << 16  # bytes: what is smaller is not worth its code
LONGEST = 12  # calls that one value may take, views not counted


@dataclass
class Remade:
    """What `rematerialize` did: how many values the forward keeps no more, and their bytes at the sizes
    traced."""

    values: int = 0
    nbytes: int = 0


@dataclass
class _Forward:
    """The forward, and what of it may be had in the backward: `kept` are the values saved so far, `given`
    the inputs that nothing writes. `members`: what was saved, by what computes it, in the forward's order.
    `gone`: keys of those that are saved no more."""

    graph: Graph
    visible: int
    kept: set[Node] = field(default_factory=set)
    given: set[Node] = field(default_factory=set)
    members: dict[Node, list[Node]] = field(default_factory=dict)
    gone: set[Node] = field(default_factory=set)

    @property
    def output(self) -> Node:
        return self.graph.output_node()

    @property
    def saved(self) -> list[Node]:
        return list(self.output.args[0][self.visible :])  # type: ignore[index,arg-type]

    def views(self, base: Node) -> list[Node]:
        """The kept views of a value that is not kept itself: as much memory as the value."""
        if base in self.kept or base not in self.members:
            return []
        found = [n for n in self.members[base] if n in self.kept]
        same = all(bytes_of(value_of(n)) == bytes_of(value_of(base)) for n in found)
        return found if same and all(self.takes(n, base) for n in found) else []

    def takes(self, view: Node, base: Node) -> bool:
        """Whether the backward can take a view of the base: it may need sizes that are not kept."""
        while view is not base:
            sizes = [n for n in view.all_input_nodes if n is not view.args[0]]
            if not _is_cheap(view) or not self.kept.issuperset(sizes):
                return False
            view = view.args[0]  # type: ignore[assignment]
        return True


def rematerialize(forward: GraphModule, backward: GraphModule, visible: int) -> Remade:
    """Edit the two graphs of a partition in place (not the modules' code). visible: how many of the forward's
    results, the first, are not for the backward.

    relu = relu(batch_norm(conv)); save conv, mean, rstd, relu    ->    save conv, mean, rstd
    """
    fw = _Forward(forward.graph, visible)
    placeholders = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    saved = fw.saved
    if any("saved_tensor_with_no_vc_check" in n.meta for n in saved if isinstance(n, Node)):
        return Remade()  # AOTAutograd counts those from the end
    mode = fake_mode_of([value_of(n) for n in forward.graph.nodes])
    if mode is None or any(not isinstance(n, Node) or n.name not in placeholders for n in saved):
        return Remade()
    fw.kept, fw.members = set(saved), _members(fw)
    written = {base_of(a) for n in fw.graph.nodes for a in mutated_arguments(n)}
    fw.given = {n for n in fw.graph.nodes if n.op == "placeholder" and is_tensor(n)}
    fw.given -= written | inputs_mutated_outside(forward)
    staying = written | {base_of(n) for n in fw.output.args[0][:visible] if isinstance(n, Node)}  # type: ignore[index,union-attr]
    done = Remade()
    with mode, quiet_shapes(mode):
        for base, members in fw.members.items():
            if base.op != "call_function" or base in staying or bytes_of(value_of(base)) < SMALLEST:
                continue
            fw.kept -= set(members)
            recipe = _recipe(base, fw)
            if recipe is None or not all(fw.takes(n, base) for n in members):
                fw.kept |= set(members)
                continue
            _save(fw, backward, recipe.leaves, placeholders)
            for member in members:
                _make_again(member, fw, backward, placeholders)
            fw.gone.add(base)
            done.values += 1
            done.nbytes += bytes_of(value_of(base))
    if done.values:
        _drop(fw, {n for n in saved if n not in fw.kept}, placeholders)
        finish(forward)
        finish(backward)
    return done


def _members(fw: _Forward) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for node in fw.saved:
        if is_tensor(node):
            found.setdefault(base_of(node), []).append(node)
    order = {n: k for k, n in enumerate(fw.graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


# -- which values, and from what -------------------------------------------------------------------------


@dataclass
class _Recipe:
    """The calls that make a value, in order, and what they read."""

    calls: list[Node] = field(default_factory=list)
    leaves: list[Node] = field(default_factory=list)


def _recipe(node: Node, fw: _Forward) -> _Recipe | None:
    """How the backward can make a value of the forward; None if it cannot, if the value depends on inputs
    alone (a weight cast for a product: it grows with no batch), or if as much would be kept instead."""
    recipe = _Recipe()
    if not _follow(node, fw, recipe):
        return None
    work = [n for n in recipe.calls if not is_view(n)]
    if len(work) > LONGEST or all(n.op == "placeholder" for n in recipe.leaves):
        return None
    instead = sum(bytes_of(value_of(n)) for n in recipe.leaves if n not in fw.kept and not fw.views(n))
    if bytes_of(value_of(node)) - instead < SMALLEST:
        return None
    return recipe


def _follow(node: Node, fw: _Forward, recipe: _Recipe) -> bool:
    if node in recipe.calls or node in recipe.leaves:
        return True
    if node in fw.kept or node in fw.given or is_statistic(node) or fw.views(node):
        recipe.leaves.append(node)
        return True
    if node in fw.gone or len(recipe.calls) > 4 * LONGEST or not (is_norm(node) or _is_cheap(node)):
        return False
    operands = norm_operands(node) if is_norm(node) else node.all_input_nodes
    if not all(_follow(n, fw, recipe) for n in operands):
        return False
    recipe.calls.append(node)
    return True


def _is_cheap(node: Node) -> bool:
    """Whether the call is elementwise, or moves elements."""
    if node.op != "call_function" or not is_pure(node) or not is_tensor(node):
        return False
    if is_view(node) or node.target in (prims.convert_element_type.default, aten._to_copy.default):
        return node.target is not operator.getitem
    row = table().get(node.target)  # type: ignore[call-overload]
    return node.target is aten.clone.default or (row is not None and row.kind == "elementwise")


# -- editing -------------------------------------------------------------------------------------------------


def _save(fw: _Forward, backward: GraphModule, leaves: list[Node], placeholders: dict[str, Node]) -> None:
    """Have the leaves reach the backward, as the first of the saved tensors: it gets saved sizes first. A
    kept view of one becomes a view that the backward takes."""
    made: set[Node] = set()
    for leaf in leaves:
        if leaf in fw.kept or leaf in made:
            continue
        first = next(n for n in fw.saved if is_tensor(n))
        at = fw.visible + fw.saved.index(first)
        with backward.graph.inserting_before(placeholders[first.name]):
            placeholders[leaf.name] = backward.graph.placeholder(leaf.name)
        placeholders[leaf.name].meta = dict(leaf.meta)
        results = _described(fw)
        _return(fw, [*results[:at], (leaf, results[at][1]), *results[at:]])
        views = fw.views(leaf)
        fw.kept = (fw.kept | {leaf}) - set(views)
        made |= set(views)  # one of them may be a leaf, too
        for view in views:
            _make_again(view, fw, backward, placeholders)


def _make_again(member: Node, fw: _Forward, backward: GraphModule, placeholders: dict[str, Node]) -> None:
    """Replace a saved value of the backward by calls that make it, before the first that wants it."""
    old = placeholders[member.name]
    users = set(old.users)
    recipe = _Recipe()
    found = _follow(member, fw, recipe)
    assert found
    first = next(n for n in backward.graph.nodes if n in users)
    here = {leaf: placeholders[leaf.name] for leaf in recipe.leaves}
    with backward.graph.inserting_before(first):
        for call in recipe.calls:
            here[call] = _copy(call, here, backward.graph)
    old.replace_all_uses_with(here[member])


def _copy(call: Node, here: dict[Node, Node], graph: Graph) -> Node:
    if is_norm(call):
        return normalise(call, here, graph)
    new = graph.node_copy(call, here.__getitem__)
    new.meta = {k: v for k, v in call.meta.items() if k != "desc"}
    return new


def _drop(fw: _Forward, dropped: set[Node], placeholders: dict[str, Node]) -> None:
    for node in dropped:
        placeholders[node.name].graph.erase_node(placeholders[node.name])
    _return(fw, [r for k, r in enumerate(_described(fw)) if k < fw.visible or r[0] not in dropped])


def _described(fw: _Forward) -> list[tuple[Any, Any]]:
    """The forward's results, and what AOTAutograd says of each."""
    results: Any = fw.output.args[0]
    return list(zip(results, fw.output.meta.get("desc", [None] * len(results)), strict=True))


def _return(fw: _Forward, results: list[tuple[Any, Any]]) -> None:
    fw.output.args = (tuple(value for value, _ in results),)
    if "desc" in fw.output.meta:
        fw.output.meta["desc"] = [description for _, description in results]


__all__ = ["Remade", "rematerialize"]
