"""Axes along which two values lie in turn: the parts of complex numbers, or what `stack(.., -1)` joins.

    i0 < 64:  y[i0] = where(i0 % 2 < 1, a[i0 // 2], b[i0 // 2])
          ->  i0 < 32:  y[2 * i0] = a[i0];  y[2 * i0 + 1] = b[i0]

A vector along the axis would load, under masks, from both. Along the pairs it takes one vector of each, which
are stored in turn (`store_pairs` of include/dicp_memory.h).
"""

from __future__ import annotations

from dataclasses import replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.kernel import Axis, Kernel, Statement, Store, expressions, rewrite_body
from dicp.vendor.cpu_graph.lane_strides import lane_stride
from dicp.vendor.cpu_graph.loops import choose_shape


def split_pairs(kernel: Kernel, lanes: int) -> Kernel:
    """The kernel with its vectors along pairs, where what an element is depends on its place in one."""
    if not all(isinstance(s, Store) and s.mode == "set" for s in kernel.body):
        return kernel
    axis = choose_shape(kernel, lanes).vector
    if axis is None or axis.reduced or axis.serial or not isinstance(axis.size, int) or axis.size % 2:
        return kernel
    if not any(_decides(e, axis) for s in kernel.body for e in expressions(s)):
        return kernel
    pairs = Axis(ix.Var(axis.var.name, axis.size // 2))
    body: list[Statement] = []
    for k in range(2):
        moved: dict[ix.Atom, Index] = {axis.var: 2 * ix.of(pairs.var) + k}
        body += rewrite_body(kernel.body, lambda x: None, lambda i, moved=moved: ix.substitute(i, moved))  # type: ignore[misc]
    axes = tuple(pairs if a is axis else a for a in kernel.axes)
    return replace(kernel, axes=axes, body=tuple(body))


def _decides(e: ex.Expr, axis: Axis) -> bool:
    """Whether it is a condition on the remainder by 2 of a position along the axis."""
    if e.op not in ("lt", "ge"):
        return False
    atoms = [a for x in e.args if isinstance(i := ex.as_index(x), ix.Poly) for a in ix.atoms(i)]
    return any(isinstance(a, ix.Mod) and a.den == 2 and ix.depends(ix.of(a), axis.var) for a in atoms)


def are_pairs(first: Store, second: Store, axis: ix.Var | None, lanes: int) -> bool:
    """Whether two stores fill a buffer in turn."""
    if axis is None or first.buffer != second.buffer or second.index - first.index != 1:
        return False
    if first.mode != "set" or second.mode != "set" or ix.may_be_empty(first.index):
        return False
    return lane_stride(first.index, axis, lanes) == 2


__all__ = ["are_pairs", "split_pairs"]
