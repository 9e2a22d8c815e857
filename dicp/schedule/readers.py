"""Who reads each value of a graph, and whether it is therefore worth a buffer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.ranges import change
from dicp.ir.value import Shape, Value
from dicp.ops.aliases import base_of
from dicp.ops.table import has_rule
from dicp.schedule.defs import Buffer
from dicp.schedule.traced import is_reindexed, reduces

MAX_LOADS = 16  # reads inlined into one expression before it is materialised
MAX_COST = 160  # adds inlined into one expression before it is materialised
MAX_SELECTED = 32  # likewise of ranges of one tensor, of which a reader gets each once for every reading
CHEAP_COST = 6
"""An expression up to this cost is recomputed by every reader, where it is read from one value, or from no
more bytes for each element than it has itself: a value less its mean."""
CHEAP_FREE_COST = 24  # likewise without any load: masks, position ids, constants
JOINED = 2
"""Tensors laid side by side, up to which each is made where it is laid: of more, a vendor may make all at
every place, and choose."""
MANY = 8  # readings of an element from which on it is looked up once
TABLE_COST = 2
"""A value along one axis alone that is made of its index, read so often and of this cost, is a table where a
kernel costs nothing to launch: the pixels that an image's column is interpolated from."""


_JOINING = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)


class Readers:
    """The readers of a graph's values. calls: what reads memory; sizes: a traced shape as indices; hint: an
    index at the sizes of the example; tables: whether small kernels cost nothing to launch.

    shared: tensors that several results are views of.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        calls: Container[fx.Node],
        sizes: Callable[[Any], Shape],
        hint: Callable[[Index], int],
        tables: bool,
    ) -> None:
        self.sizes, self.hint, self.tables = sizes, hint, tables
        self.counts = _use_counts(gm)
        self.in_memory = _memory_counts(gm, calls)
        self.shared = _returned_together(gm)

    def of(self, node: fx.Node) -> int:
        """How many read a node's value, looking through views and tuple elements."""
        return self.counts[node]

    def of_piece(self, node: fx.Node, k: int) -> int:
        """How many read result k of a call with several."""
        return sum(self.counts[u] for u in node.users if u.target is operator.getitem and u.args[1] == k)

    def want_buffer(
        self, node: fx.Node, expr: Expr, value: Value, count: int, buffers: Mapping[str, Buffer]
    ) -> bool:
        """Whether a value with `count` readers, of the dims along which it varies, is better computed once:
        they want it in memory, or `expr`, its element, is dear."""
        if self.in_memory[node] > 1:
            return True
        nodes = ex.walk(expr)
        loads = sum(e.op == "at" for e in nodes)
        work = ex.cost(expr)
        if loads > MAX_LOADS or work > MAX_COST:
            return True
        if _selects(nodes):
            return loads * count > MAX_SELECTED
        indirect = is_indirect(nodes)
        readings = self._readings(node, value.shape)
        if work > CHEAP_COST and readings > 1:
            return True
        if indirect and readings >= MANY:
            return True
        along = sum(n != 1 for n in value.shape)
        if self.tables and loads == 0 and along == 1 and readings >= MANY and work >= TABLE_COST:
            return True
        if count <= 1:
            return False
        if loads == 0:
            return work > CHEAP_FREE_COST
        if work > CHEAP_COST or indirect:
            return True
        return loads > 1 and _bytes_read(nodes, buffers) > value.dtype.itemsize

    def _readings(self, node: fx.Node, shape: Shape) -> float:
        """How often an element is read by the reader that is largest, at the sizes of the example."""
        own, most = self.hint(ix.product(shape)), 1.0
        for user in node.users:
            val = user.meta.get("val")
            if user.target in _JOINING and len(user.args[0]) <= JOINED and user.args[0].count(node) == 1:
                continue  # each element at one place
            if isinstance(val, torch.Tensor) and not reduces(user):
                most = max(most, self.hint(ix.product(self.sizes(val.shape))) / max(own, 1))
                if is_reindexed(user):
                    most = max(most, self._readings(user, shape))
        return most


def is_indirect(nodes: Iterable[Expr]) -> bool:
    """Whether some of these are read at an index that is read itself."""
    return any(e.op == "check" for e in nodes)


def _selects(nodes: Iterable[Expr]) -> bool:
    """Whether these are one element of one tensor, or a constant, by ranges of the loop variables: what is
    padded, or in part overwritten. Readers are split along the ranges, and none reads more for it."""
    tensors = set()
    for e in nodes:
        if e.op == "at" and not any(isinstance(a, ix.Opaque) for i in e.args[1] for a in ix.atoms(i)):
            tensors.add(e.args[0])
        elif e.op in ("lt", "ge"):
            if not any(change(e, v) for v in ex.variables(e)):
                return False
        elif e.op not in ("masked", "land", "const", "index"):
            return False
    return len(tensors) <= 1


def _bytes_read(nodes: Iterable[Expr], buffers: Mapping[str, Buffer]) -> int:
    """Bytes that an element of an expression is read from; not of what is the same along some dim, which
    stays at hand."""
    reads = [e for e in nodes if e.op == "at"]
    atoms = [{a for i in e.args[1] if isinstance(i, ix.Poly) for a in ix.atoms(i)} for e in reads]
    dims = [{a for a in own if isinstance(a, ix.Var) and a.size is not None} for own in atoms]
    every = set().union(*dims)
    whole = [e for e, own in zip(reads, dims, strict=True) if own == every]
    return sum(buffers[e.args[0]].dtype.itemsize for e in whole)


def _returned_together(gm: fx.GraphModule) -> set[fx.Node]:
    """Tensors that several results are views of: those share memory, as in eager."""
    results = gm.graph.output_node().args[0]
    roots = [base_of(r) for r in results if isinstance(r, fx.Node)]
    return {r for r in roots if roots.count(r) > 1}


def _use_counts(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Readers of each node's value, looking through views and tuple elements."""
    counts: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        total = 0
        for user in node.users:
            through = user.op == "call_function" and (user.target is operator.getitem or is_reindexed(user))
            total += counts[user] if through else 1
        counts[node] = total
    return counts


def _memory_counts(gm: fx.GraphModule, calls: Container[fx.Node]) -> dict[fx.Node, int]:
    """How many readers want each node's value in memory, looking through views and tuple elements: library
    calls, externs, and the caller."""
    counts: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        total = 0
        for user in node.users:
            if user.op == "call_function" and (user.target is operator.getitem or is_reindexed(user)):
                total += counts[user]
            elif user.op == "output" or user in calls or not has_rule(user.target):
                total += 1
        counts[node] = total
    return counts
