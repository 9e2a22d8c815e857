"""The end of lowering: what the caller gets, and what is written over mutated inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from dicp.compat import shares_memory
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.memory_order import no_overlap
from dicp.ir.meta_keys import FREE_OUTPUTS, VIEWS_OF_INPUTS
from dicp.ir.value import Shape, Value
from dicp.ops.aliases import base_of, is_view
from dicp.ops.rules.pointwise import broadcast, retyped
from dicp.schedule.calls import extern, overwrite
from dicp.schedule.defs import Buffer, Call, Pointwise, Raw, View, views
from dicp.schedule.strides import affine_window, dense_strides, loop_vars, no_negative, strides_agree
from dicp.schedule.traced import held, note_of

if TYPE_CHECKING:
    from dicp.schedule.lower import Lowering

aten = torch.ops.aten


def finish(low: Lowering, node: fx.Node) -> None:
    results = node.args[0]
    assert isinstance(results, (tuple, list))
    mutated = low.out.mutated = {ph.name for ph, _ in low.mutations}
    free = low.out.free = frozenset(low.gm.meta.get(FREE_OUTPUTS, ()))
    # tensors that several results view come first: a copy of one must not take over its memory
    order = sorted(range(len(results)), key=lambda k: not _in_shared_memory(low, results[k]))
    shown = low.gm.meta.get(VIEWS_OF_INPUTS, frozenset())  # the caller is to see those change
    outputs = {k: _output(low, results[k], set() if k in shown else mutated, k in free) for k in order}
    returned = [outputs[k] for k in range(len(results))]
    sources = [_mutation_source(low, ph, src, mutated) for ph, src in low.mutations]
    for (ph, src), value in zip(low.mutations, sources, strict=True):
        over = low.values[ph] if isinstance(low.values[ph], Raw) else low.out.buffers[ph.name]
        if isinstance(over, Raw) or isinstance(value, (Buffer, Raw)):
            overwrite(low, _copy_of(ph, src), over, value)
        elif value is not None:
            idx = low.index_vars(over.shape)
            low.out.defs.append(
                Pointwise((over,), f"copy_ into {ph.name}", loop_vars(idx), value(idx), idx)
            )
    low.out.outputs = returned
    _drop_views(low, node)


def _drop_views(low: Lowering, output: fx.Node) -> None:
    """Without the calls that make views which are returned where they lie, and which nothing else reads."""
    returned = {v.buffer.name for v in views(low.out.outputs)}
    returned |= {o.name for o in low.out.outputs if isinstance(o, Raw)}
    unread: set[fx.Node] = {output}
    for d in reversed(low.out.defs):
        if not isinstance(d, Call) or d.host or not unread.issuperset(d.node.users):
            continue  # a host's call finds out sizes
        made = {b.name for b in (*d.outputs, *d.results) if isinstance(b, (Buffer, Raw))}
        if is_view(d.node) and not made & returned:
            unread.add(d.node)
    low.out.defs[:] = [d for d in low.out.defs if not isinstance(d, Call) or d.host or d.node not in unread]


def _in_shared_memory(low: Lowering, r: Any) -> bool:
    return isinstance(r, fx.Node) and base_of(r) in low.readers.shared


def _copy_of(ph: fx.Node, src: fx.Node) -> fx.Node:
    """The node that writes src over a graph input."""
    return next(u for u in ph.users if u.target is aten.copy_.default and u.args[:2] == (ph, src))


def _mutation_source(
    low: Lowering, ph: fx.Node, src: fx.Node, mutated: set[str]
) -> Value | Buffer | Raw | None:
    """What is written over a graph input, a Buffer where no kernel can; materialised first when it reads
    memory that is about to change. None: it is there already."""
    value = low.values[src]
    if isinstance(value, Raw):
        return value
    if isinstance(low.values[ph], Raw):
        return _held(low, ph, src, mutated)
    shape, dtype = low.meta(ph)
    if src in low.in_place and _is_whole(low, value, low.out.buffers[ph.name]):
        return None
    if isinstance(value, Buffer) or not held(dtype, low.vendor.float8):
        return _held(low, ph, src, mutated)
    wanted = broadcast(retyped(value, dtype), shape)
    idx = low.index_vars(shape)
    expr = wanted(idx)
    reads = [
        e
        for e in ex.walk(expr)
        if e.op == "at" and _memory_of(low.out.buffers[e.args[0]]).name in mutated
    ]
    if all(e.args == (ph.name, idx) for e in reads):
        return wanted
    return low.named(wanted, ph)


def _held(low: Lowering, ph: fx.Node, src: fx.Node, mutated: set[str]) -> Buffer:
    """A buffer with src's value that no other write to an input changes."""
    value = low.values[src]
    if isinstance(value, Value):
        low.node = src
        value = low.operand(low.named(value, src)).buffer
    if value.name not in mutated:
        return value  # type: ignore[no-any-return]
    graph = low.gm.graph
    with graph.inserting_before(_copy_of(ph, src)):
        clone = graph.call_function(aten.clone.default, (src,))
    clone.meta = dict(src.meta)
    return extern(low, clone, "an input of this dtype is written over another")  # type: ignore[no-any-return]


def _is_whole(low: Lowering, value: Any, buffer: Buffer) -> bool:
    """Whether the value is what lies in the buffer, element for element."""
    if not isinstance(value, Value):
        return False
    idx = low.index_vars(value.shape)
    expr = value(idx)
    return (
        expr.op == "at" and expr.args[1] == idx and _memory_of(low.out.buffers[expr.args[0]]) is buffer
    )


def _memory_of(buffer: Buffer) -> Buffer:
    """The buffer that owns the memory: a scatter's result lives in its base."""
    while buffer.base is not None:
        buffer = buffer.base
    return buffer


def _output(low: Lowering, r: Any, mutated: set[str], free: bool) -> Any:
    if not isinstance(r, fx.Node):
        return r
    value = low.values[r]
    val = r.meta.get("val")
    if r.target is aten.copy_.default and r.args[0] in {ph for ph, _ in low.mutations}:
        r = r.args[0]  # type: ignore[assignment]  # the mutated input itself is what the caller has
    if r.op == "placeholder":
        return ("input", [n for n in low.gm.graph.nodes if n.op == "placeholder"].index(r))
    if isinstance(val, (torch.SymBool, torch.SymFloat)):
        return low.host(val)
    if not isinstance(val, torch.Tensor) or isinstance(value, Raw):
        return value
    if isinstance(value, Buffer):
        memory = _memory_of(value)
        if memory.kind == "temp":  # the caller gets memory of its own, no window of the arena
            memory.kind = "output"
        return _piece_of(low, r, mutated) or View(value, value.shape, value.strides)
    placed = r is not base_of(r) and base_of(r).op == "placeholder" or _shares(low, r)
    if placed and (piece := _piece_of(low, r, mutated)):
        return piece
    shape, strides = low.sizes(val.shape), low.dense.get(r) or low.sizes(val.stride())
    idx = low.index_vars(shape)
    expr = value(idx)
    if expr.op == "at":
        buffer = low.out.buffers[expr.args[0]]
        window = affine_window(buffer.flat(expr.args[1]), idx, shape) or _traced_window(low, r, buffer)
        root = base_of(r)
        owner = low.returned.get(buffer.name, root)
        fresh = buffer.kind == "input" and root.op != "placeholder" or owner is not root
        # the caller would see it change
        aliases = fresh or buffer.kind == "constant" or buffer.name in mutated
        if (
            window is not None
            and buffer.dtype == value.dtype
            and not aliases
            and (free and no_negative(window[0]) or strides_agree(window[0], strides, shape))
        ):
            base = _memory_of(buffer)
            if base.kind == "temp":
                base.kind = "output"
            if base.kind not in ("input", "constant") or buffer is base:
                low.returned[buffer.name] = root
                return View(buffer, shape, window[0] if free else strides, window[1])
    order = low.strides_of(shape, r) if free else strides
    if not free and not no_overlap(val):
        order = dense_strides(shape, tuple(range(len(shape))))
    buffer = low.new_buffer(shape, val.dtype, order, "output")
    low.out.defs.append(Pointwise((buffer,), note_of(r), loop_vars(idx), expr, idx))
    if not free and buffer.strides != strides:  # e.g. an expanded result: one element, many positions
        buffer.strides = strides
    return View(buffer, shape, strides if not free else order)


def _piece_of(low: Lowering, r: fx.Node, mutated: set[str]) -> View | None:
    """A view as traced of what lies in a buffer, as that buffer's own, where no kernel makes it: a library is
    told of no storage, and AOTAutograd takes the place from the tensor that is returned, and whether it is
    conjugated or negated."""
    root, shared = base_of(r), _shares(low, r)
    base, ahead = _place(low, root), _ahead(r)
    if base is None or ahead is None or base[0].name in mutated:
        return None
    buffer, val, seen = base[0], r.meta["val"], root.meta["val"]
    if root.op != "placeholder" and (seen.is_conj() or seen.is_neg()):
        return None  # what was traced as a marked tensor is computed as one that is not
    if buffer.dtype != (seen if shared or _reinterprets(r) else val).dtype:
        return None
    if shared:
        memory = _memory_of(buffer)
        if memory.kind in ("input", "constant") or low.returned.setdefault(buffer.name, root) is not root:
            return None
        if memory.kind == "temp":
            memory.kind = "output"
    first = base[1] * seen.dtype.itemsize + low.sizes((ahead,))[0]
    offset = ix.floordiv(first, val.dtype.itemsize)
    seen_as = val.dtype if val.dtype != buffer.dtype else None
    return View(buffer, low.sizes(val.shape), low.sizes(val.stride()), offset, *_bits(r), seen_as)


def _shares(low: Lowering, r: fx.Node) -> bool:
    """Whether a result is a view of what others show too, maybe as another dtype. Not of an input: views of
    those AOTAutograd makes anew."""
    root = base_of(r)
    return r is not root and root.op != "placeholder" and root in low.readers.shared


def _reinterprets(r: fx.Node) -> bool:
    """Whether a result is a view of an input as another dtype."""
    root = base_of(r)
    return root.op == "placeholder" and root is not r and r.meta["val"].dtype != root.meta["val"].dtype


def _traced_window(low: Lowering, r: fx.Node, buffer: Buffer) -> tuple[Shape, Index] | None:
    """(strides, offset) in a buffer of a view as traced, where what it is a view of lies there as traced.

    Of a view of symbolic sizes whose place is too involved to be seen as affine: AOTAutograd takes the place
    in an input, or in another result, from the tensor that is returned.
    """
    base, ahead = _place(low, base_of(r)), _ahead(r)
    if base is None or ahead is None or base[0] is not buffer or any(_bits(r)):
        return None
    itemsize = buffer.dtype.itemsize
    return low.sizes(r.meta["val"].stride()), base[1] + ix.floordiv(low.sizes((ahead,))[0], itemsize)


def _place(low: Lowering, root: fx.Node) -> tuple[Buffer, Index] | None:
    """(buffer, offset) of what lies in memory with the strides that it was traced with."""
    value = low.values.get(root)
    window: tuple[Shape, Index] | None
    if isinstance(value, Buffer):
        buffer, window = value, (value.strides, 0)
    elif isinstance(value, Value) and (expr := value(idx := low.index_vars(value.shape))).op == "at":
        buffer = low.out.buffers[expr.args[0]]
        window = affine_window(buffer.flat(expr.args[1]), idx, value.shape)
    else:
        return None
    if window is None or not strides_agree(window[0], low.sizes(root.meta["val"].stride()), value.shape):
        return None
    return buffer, window[1]


def _ahead(r: fx.Node) -> Any:
    """By how many bytes a view begins behind what it is a view of; None where it is none as traced."""
    root = base_of(r)
    val, seen = r.meta["val"], root.meta.get("val")
    if r is root or not isinstance(seen, torch.Tensor) or not shares_memory(val, seen):
        return None
    return val.storage_offset() * val.dtype.itemsize - seen.storage_offset() * seen.dtype.itemsize


def _bits(r: fx.Node) -> tuple[bool, bool]:
    """Whether the elements of a view are conjugates, negatives, of those in memory."""
    val, seen = r.meta["val"], base_of(r).meta.get("val")
    if not isinstance(seen, torch.Tensor):
        return False, False
    return val.is_conj() != seen.is_conj(), val.is_neg() != seen.is_neg()


