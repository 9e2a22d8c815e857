"""For a vendor whose toolchain takes graphs: the parts of a graph that it is given.

    mm, relu, svd, mul, add   where svd is not the vendor's   ->   part 0 {mm, relu}, svd, part 1 {mul, add}

Each call has a level: how often the ways to it leave the vendor's calls for another. The vendor's calls of
one level are a part. A way that leaves a part comes back at a higher level, so parts are convex; calls that
do not depend on each other share a part, so there are no more parts than levels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from dicp.passes.facts import is_pure, mutated_arguments, writes_input

aten = torch.ops.aten


@dataclass(eq=False)
class Part:
    """A graph for the vendor: `gm` takes the values of `inputs` and returns those of `outputs`, nodes of the
    whole graph, as a tuple. Sizes among them are ints."""

    number: int
    gm: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    calls: int


def partition(gm: fx.GraphModule, supports: Callable[[fx.Node], bool]) -> list[Part | fx.Node]:
    """Parts and the calls between them, in an order to run them in; what writes into graph inputs comes last.

    Calls that are not the vendor's keep their order where it shows: random numbers, effects, writes.
    """
    levels = _Levels(supports)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            levels.add(node)
    steps: list[Part | fx.Node] = []
    for level in sorted(set(levels.of.values())):
        here = [n for n, k in levels.of.items() if k == level]
        steps += [n for n in here if n not in levels.mine]
        ours = [n for n in here if n in levels.mine]
        if ours:
            steps.append(_part(sum(isinstance(s, Part) for s in steps), ours))
    return steps + levels.last


class _Levels:
    def __init__(self, supports: Callable[[fx.Node], bool]) -> None:
        self.supports = supports
        self.of: dict[fx.Node, int] = {}
        self.mine: set[fx.Node] = set()
        self.last: list[fx.Node] = []
        self.floor = 0  # the level of the last call that wrote into memory
        self.effect: fx.Node | None = None

    def add(self, node: fx.Node) -> None:
        if writes_input(node):
            self.last.append(node)
            return
        before = [n for n in node.all_input_nodes if n in self.of]
        if self._is_mine(node, before):
            self.mine.add(node)
        if mutated_arguments(node):
            before = list(self.of)
        elif not is_pure(node):
            before += [self.effect] if self.effect is not None else []
            self.effect = node
        leaves = node not in self.mine
        self.of[node] = max((self.of[b] + (leaves and b in self.mine) for b in before), default=self.floor)
        self.of[node] = max(self.of[node], self.floor)
        if mutated_arguments(node):
            self.floor = self.of[node]

    def _is_mine(self, node: fx.Node, before: list[fx.Node]) -> bool:
        if node.target is operator.getitem:
            return node.args[0] in self.mine
        if is_size(node):  # computed where the values are that it is read from
            return any(b in self.mine for b in before)
        return not mutated_arguments(node) and self.supports(node)


def is_size(node: fx.Node) -> bool:
    """Whether a call only computes with sizes."""
    number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))
    return number and not node.meta.get("unbacked_bindings")


def _part(number: int, nodes: list[fx.Node]) -> Part:
    inside = set(nodes)
    inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    calls = sum(n.target is not operator.getitem and not is_size(n) for n in nodes)
    return Part(number, fx.GraphModule(torch.nn.Module(), graph), inputs, outputs, calls)
