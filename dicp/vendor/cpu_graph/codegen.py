"""Kernel IR to C++: one function for a kernel. Its body is of the writer of its loop shape (loops.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.kernel import Kernel, Store, canonical, expressions
from dicp.vendor.cpu_graph.axis_splitting import split_axes
from dicp.vendor.cpu_graph.columns import ColumnsWriter
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.interleaving import split_pairs
from dicp.vendor.cpu_graph.kernel_writer import KernelWriter
from dicp.vendor.cpu_graph.loops import choose_shape, indent
from dicp.vendor.cpu_graph.pointwise import PointwiseWriter
from dicp.vendor.cpu_graph.rows import RowsWriter

WRITERS: dict[str, type[KernelWriter]] = {
    "pointwise": PointwiseWriter,
    "rows": RowsWriter,
    "columns": ColumnsWriter,
}


def emit(kernel: Kernel, name: str, lanes: int) -> str:
    """One C++ function `name(buffers.., sizes.., [err])` for a kernel."""
    split = split_axes(split_pairs(kernel, lanes), lanes)
    return _function(canonical_with_notes(split), name, lanes)


def canonical_with_notes(kernel: Kernel) -> Kernel:
    """Canonical names, with the origins kept for comments."""
    return replace(canonical(kernel), origins=kernel.origins)


def signature(kernel: Kernel, name: str) -> str:
    params = [f"{'' if p.written else 'const '}{STORAGE[p.dtype]}* {p.name}" for p in kernel.params]
    params += [f"int64_t {v.name}" for v in kernel.sizes]
    if has_checks(kernel):
        params.append("int32_t* err")
    return f"void {name}({', '.join(params)})"


def has_checks(kernel: Kernel) -> bool:
    return any(e.op in ex.CHECKS for s in kernel.body for e in expressions(s))


def _zeros(kernel: Kernel) -> list[str]:
    """The call that clears memory, of a kernel that does no more than that to one whole buffer."""
    if len(kernel.body) != 1 or len(kernel.axes) != 1:
        return []
    store, axis = kernel.body[0], kernel.axes[0]
    if not isinstance(store, Store) or store.mode != "set" or store.index != ix.of(axis.var):
        return []
    number = store.value.args[0] if store.value.op == "const" else None
    is_zero = isinstance(number, (bool, int, float)) and number == 0 and math.copysign(1, number) > 0
    return [f"zeros({store.buffer}, {axis.size});"] if is_zero else []


def _function(kernel: Kernel, name: str, lanes: int) -> str:
    shape = choose_shape(kernel, lanes)
    body = _zeros(kernel) or WRITERS[shape.kind](kernel, shape, lanes).lines()
    head = [f"// {o}" for o in kernel.origins]
    axes = (
        ", ".join(f"{a.var} < {a.size}{' (reduced)' if a.reduced else ''}" for a in kernel.axes)
        or "once"
    )
    head.append(f"// {shape.kind}: {axes}")
    return "\n".join([*head, f"{signature(kernel, name)} {{", *indent(body), "}"])
