"""Freezing: what depends on weights alone becomes a graph of its own, which runs when they change.

    graph(x, w, s):                         constants(w, s):              main(x, f0):
      v0 = mul(w, s)                          v0 = mul(w, s)                v0 = mm(x, f0)
      v1 = mm(x, v0)               ->         return v0                     return v0
      return v1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dicp.ir.meta_keys import FROZEN, PACKED
from dicp.ir.printer import dtype_name, op_name
from dicp.ops.aliases import base_of, is_view
from dicp.ops.library import register
from dicp.passes.facts import bytes_of, is_pure, is_tensor, value_of

SMALL = 1 << 20
"""Bytes up to which a value is folded that is larger than the weights it is made of: tables of rotary
embeddings, which take longer to compute than to read."""


@dataclass(frozen=True)
class Folding:
    """How the inputs of a graph reach the two graphs that it became. Positions are those of its inputs.

    frozen: the inputs of the constant graph, weights of which `names` has the names. kept: the leading inputs
    of the main graph; behind them it takes the results of the constant graph, each as it is or, where `forms`
    has one, in a form of the vendor's. texts: those results for a reader; nbytes: their size.
    """

    frozen: tuple[int, ...]
    names: tuple[str, ...]
    kept: tuple[int, ...]
    forms: tuple[str | None, ...]
    texts: tuple[str, ...]
    nbytes: int


def mark_frozen(gm: GraphModule, weights: Mapping[int, str]) -> None:
    """Note which inputs are frozen. weights: names of the inputs that are weights, by position.

    An input is not frozen that a call may write, or that a call reads which does more than compute.
    """
    if not weights:
        return
    exposed = {
        base_of(a)
        for n in gm.graph.nodes
        if n.op == "call_function" and not is_pure(n)
        for a in n.all_input_nodes
    }
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for k, name in weights.items():
        if inputs[k] not in exposed and _is_fixed(value_of(inputs[k])):
            inputs[k].meta[FROZEN] = name


def constants_of(gm: GraphModule) -> frozenset[Node]:
    """Frozen inputs and the calls whose results depend on nothing else; empty where nothing is frozen."""
    found = {n for n in gm.graph.nodes if n.op == "placeholder" and FROZEN in n.meta}
    if not found:
        return frozenset()
    for node in gm.graph.nodes:
        if node.op == "call_function" and is_pure(node) and _is_fixed(value_of(node)):
            if all(a in found for a in node.all_input_nodes):
                found.add(node)
    return frozenset(found)


def is_constant(node: Node) -> bool:
    """Whether a value depends on frozen inputs alone."""
    return _frozen_inputs(node) is not None


def is_folded(node: Node) -> bool:
    """Whether a value, or the one whose memory it shares, will be made once."""
    *_, whole = _chain_of(node)
    roots = _frozen_inputs(whole)
    return roots is not None and _pays(whole, roots)


def _frozen_inputs(node: Node) -> frozenset[Node] | None:
    """Those that a value depends on; None where it depends on others."""
    seen, stack, found = {node}, [node], set()
    while stack:
        n = stack.pop()
        if n.op == "placeholder":
            if FROZEN not in n.meta:
                return None
            found.add(n)
        elif n.op != "call_function" or not n.all_input_nodes or not is_pure(n) or not _is_fixed(value_of(n)):
            return None
        stack += [a for a in n.all_input_nodes if a not in seen]
        seen.update(n.all_input_nodes)
    return frozenset(found)


def _is_fixed(value: Any) -> bool:
    """Whether a value is a plain tensor of sizes that are numbers, or several."""
    if isinstance(value, (tuple, list)):
        return all(v is None or _is_fixed(v) for v in value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def split_frozen(gm: GraphModule) -> tuple[GraphModule, Folding] | None:
    """The constant graph; `gm` becomes the main graph. None where there is nothing that pays to be folded.

    Not folded are views, which cost nothing; what is made of no weight; what is larger than the weights that
    it is made of, by more than SMALL (an expansion, a dequantised weight); and what the caller gets, who may
    write into it.
    """
    register()
    constants = constants_of(gm)
    chosen = _chosen(gm, constants)
    if not chosen:
        return None
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    graph, given = _constant_graph(chosen)
    names = tuple(str(n.meta[FROZEN]) for n in given)
    frozen = tuple(inputs.index(n) for n in given)
    forms = tuple(str(n.args[1]) if _is_pack(n) else None for n in chosen)
    texts = tuple(_text(n) for n in chosen)
    nbytes = sum(bytes_of(value_of(n)) for n in chosen)
    _replace(gm.graph, chosen, inputs[-1])
    kept = tuple(k for k, n in enumerate(inputs) if n.users or FROZEN not in n.meta)
    for k in set(range(len(inputs))) - set(kept):
        gm.graph.erase_node(inputs[k])
    gm.recompile()
    return graph, Folding(frozen, names, kept, forms, texts, nbytes)


def _chosen(gm: GraphModule, constants: frozenset[Node]) -> list[Node]:
    """The values to fold, in the order of the graph."""
    results = gm.graph.output_node().all_input_nodes
    owned = {n for r in results for n in _chain_of(r)}
    roots: dict[Node, frozenset[Node]] = {}
    for node in gm.graph.nodes:
        if node in constants:
            below = [roots[a] for a in node.all_input_nodes]
            roots[node] = frozenset((node,)) if node.op == "placeholder" else frozenset().union(*below)
    wanted = [n for n in constants if n.op != "placeholder" and any(u not in constants for u in n.users)]
    seen, chosen = set(wanted), set()
    while wanted:
        node = wanted.pop()
        if node not in owned and _pays(node, roots[node]):
            chosen.add(node)
            continue
        for a in node.all_input_nodes:  # it stays in the main graph: is folded what it is made of?
            if a.op != "placeholder" and a not in seen:
                seen.add(a)
                wanted.append(a)
    return [n for n in gm.graph.nodes if n in chosen]


def _chain_of(node: Node) -> Iterable[Node]:
    """A value, and the values whose memory it shares."""
    yield node
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _pays(node: Node, roots: frozenset[Node]) -> bool:
    if _is_pack(node):
        return True
    if not is_tensor(node) or is_view(node) or not roots:
        return False
    value = value_of(node)
    count, reach = value.numel(), sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    limit = max(SMALL, sum(bytes_of(value_of(r)) for r in roots))
    return 0 < count and reach < count and bytes_of(value) <= limit


def _is_pack(node: Node) -> bool:
    return node.target is torch.ops.dicp.pack.default


def _text(node: Node) -> str:
    source, value = node.args[0] if _is_pack(node) else node, value_of(node)
    made = "" if source.op == "placeholder" else f"{op_name(source.target)} "  # type: ignore[union-attr]
    shape = ",".join(map(str, value.shape))
    return f"{made}{dtype_name(value.dtype)}[{shape}]{', packed' if _is_pack(node) else ''}"


def _constant_graph(chosen: list[Node]) -> tuple[GraphModule, list[Node]]:
    """The graph that computes the values, and the inputs it takes. What is to be packed it gives unpacked."""
    wanted = [n.args[0] if _is_pack(n) else n for n in chosen]
    needed: set[Node] = set()
    stack: list[Any] = list(wanted)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    source = chosen[0].graph
    graph, given = Graph(), []
    copies: dict[Node, Node] = {}
    for node in source.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                given.append(node)
    graph.output(tuple(copies[n] for n in wanted))
    return GraphModule(torch.nn.Module(), graph), given


def _replace(graph: Graph, chosen: list[Node], last: Node) -> None:
    """Have the graph take the values as inputs."""
    for k, node in enumerate(chosen):
        with graph.inserting_after(last):
            last = graph.placeholder(f"folded{k}")
        last.meta = {k: v for k, v in node.meta.items() if k != FROZEN}
        if _is_pack(node):
            last.meta[PACKED] = node.args[1]
        node.replace_all_uses_with(last)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and is_pure(node):
            graph.erase_node(node)


__all__ = ["FROZEN", "PACKED", "Folding", "constants_of", "mark_frozen", "split_frozen"]
