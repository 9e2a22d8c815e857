"""Nodes that become calls: of a library that the vendor claims, or extern, of the aten op itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.fx as fx

from dicp.compat import known_equal
from dicp.errors import UnsupportedOp
from dicp.ir.expr import Expr
from dicp.ir.memory_order import no_overlap, order_of
from dicp.ir.printer import user_location
from dicp.ir.value import Indices, Shape, Value
from dicp.ops.aliases import base_of, is_foreign, order_in_memory, places_in_memory, returns_alias
from dicp.schedule.defs import Buffer, Call, Raw, View, leaves
from dicp.schedule.strides import dense_strides, strides_agree
from dicp.schedule.traced import is_strided, note_of

if TYPE_CHECKING:
    from dicp.schedule.lower import Lowering

aten = torch.ops.aten


def library(low: Lowering, node: fx.Node, claim: Any) -> Any:
    if claim.as_traced:
        args = tuple(_as_traced(low, a) for a in node.args)
        kwargs = {k: _as_traced(low, a) for k, a in node.kwargs.items()}
    else:
        args, kwargs = low.arguments(node, called=True)
        if claim.prepare is not None:
            args = claim.prepare(low, node, args)
            if not isinstance(args, (tuple, list)):
                raise TypeError(f"`prepare` gave {args!r}, where the call's arguments are due")
        if claim.updates:
            args = (low.overwritable(args[0], dense=True), *args[1:])
        args, kwargs = low.operands(args), {k: low.operands(v) for k, v in kwargs.items()}
    strides = claim.strides(low, node, args)
    return _add_call(low, node, args, kwargs, claim, strides, "temp" if claim.out else "library")


def left_over(low: Lowering, node: fx.Node, why: str, todo: str = "") -> Any:
    """A node that neither a claim nor a rule serves: the vendor's own call of the aten op, else an extern."""
    claim = _aten_call(low, node)
    return extern(low, node, why, todo) if claim is None else library(low, node, claim)


def _aten_call(low: Lowering, node: fx.Node) -> Any:
    """The vendor's own call of the node's aten op, None where it has none."""
    return low.vendor.aten_call(node, low.config)


def host_step(low: Lowering, node: fx.Node) -> Any:
    """A number read from a tensor, or a condition on sizes: work of the calling Python, and no operator."""
    args = tuple(_as_traced(low, a) for a in node.args)
    val = node.meta.get("val")
    if isinstance(val, torch.SymBool):  # a truth: `u == 1` of a number read
        (symbol,) = val.node.expr.free_symbols
        read = (low.symbols.index(symbol),)
        return low.out.defs.append(Call((), note_of(node), node, args, {}, None, read, host=True))
    return _add_call(low, node, args, {}, None, None, "extern", host=True)


def slice_bounds(low: Lowering, node: fx.Node) -> tuple[fx.Node, int, Any, Any]:
    """(operand, dim, where it begins, the step) of a slice between positions that are known only while the
    program runs: the host works out where it begins and how long it is."""
    given: tuple[Any, ...] = node.args
    defaults: tuple[Any, ...] = (None, 0, None, None, 1)
    x, dim, start, end, step = given + defaults[len(given) :]
    base, val = x.meta["val"], node.meta["val"]
    dim = dim % base.dim()
    first = low.symbols.index(sympy.Symbol(f"u_{node.name}", integer=True, nonnegative=True))
    results = (low.index(val.shape[dim]), first, low.index(val.storage_offset()))
    numbers = (base.shape[dim], start, end, step, base.storage_offset(), base.stride(dim))
    args = tuple(_as_traced(low, n) for n in numbers)
    low.out.defs.append(Call((), note_of(node), node, args, {}, None, results, host=True))
    return x, dim, first, step


def select_place(low: Lowering, node: fx.Node) -> None:
    """Where in memory the view lies that selects a position read from data: the host works it out."""
    x, dim, index = node.args
    base, val = x.meta["val"], node.meta["val"]  # type: ignore[union-attr]
    dim = dim % base.dim()  # type: ignore[operator]
    numbers = (base.shape[dim], index, base.storage_offset(), base.stride(dim))
    args = tuple(_as_traced(low, n) for n in numbers)
    place = (low.index(val.storage_offset()),)
    low.out.defs.append(Call((), note_of(node), node, args, {}, None, place, host=True))


def slice_read_from_data(low: Lowering, node: fx.Node) -> Value:
    """A slice between positions that are known only while the program runs."""
    x, dim, first, step = slice_bounds(low, node)
    value, val = low.values[x], node.meta["val"]

    def element(idx: Indices) -> Expr:
        return value((*idx[:dim], idx[dim] * step + first, *idx[dim + 1 :]))  # type: ignore[no-any-return]

    return Value(low.sizes(val.shape), val.dtype, element)


def effect(low: Lowering, node: fx.Node) -> Any:
    """`with_effects(token, op, ...)`: calls keep the order of the graph anyhow, so that the op alone is
    called where the vendor has a call for it; the token passes through."""
    token, op, *rest = node.args
    graph = low.gm.graph
    with graph.inserting_before(node):
        plain = graph.call_function(op, tuple(rest), dict(node.kwargs))  # type: ignore[arg-type]
    plain.meta = {**node.meta, "val": None}
    claim = None if _returns(op) else _aten_call(low, plain)
    if claim is None:
        graph.erase_node(plain)
        return extern(low, node, "an effect")
    library(low, plain, claim)
    return (low.values[token], None)  # type: ignore[index]


def _returns(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is None or bool(schema.returns)


def misused(low: Lowering, node: fx.Node) -> Any:
    """A call that eager refuses: extern, under strict too, since all that it does is raise eager's error."""
    return _extern(low, node, "eager refuses it")


def extern(low: Lowering, node: fx.Node, why: str, todo: str = "") -> Any:
    """A call made from Python. why, todo: what strict mode says of it."""
    _refuse_if_strict(low, node, why, todo)
    if places_in_memory(node):
        _refuse_parts(node)
    return _extern(low, node, why)


def _refuse_parts(node: fx.Node) -> None:
    """Places in memory of which the operand shows a part: the program may have the rest nowhere."""
    operand: Any = node.args[0]
    val = operand.meta["val"]
    whole = known_equal(val.storage_offset(), 0) and order_in_memory(val) is not None
    if operand is not base_of(operand) and not whole:
        what = f"{node.target}: of a view of a computed tensor, of whose memory the view may lack a part"
        todo = "call it on the tensor that owns the memory, or on a contiguous copy of the view"
        raise UnsupportedOp(what, where=user_location(node) or (), todo=todo)


def _extern(low: Lowering, node: fx.Node, why: str) -> Any:
    exact = is_foreign(node)
    args = tuple(_as_traced(low, a, exact) for a in node.args)
    kwargs = {k: _as_traced(low, a, exact) for k, a in node.kwargs.items()}
    results = _add_call(low, node, args, kwargs, None, None, "extern")
    low.out.defs[-1].why = why  # type: ignore[attr-defined]
    return results


def overwrite(low: Lowering, copy: fx.Node, over: Buffer | Raw, source: Any) -> None:
    """An extern `copy_` over a graph input: of dtypes that kernels do not store, or between devices."""
    why = f"kernels do not store {over.dtype}" if isinstance(over, Buffer) else "to another device"
    _refuse_if_strict(low, copy, "from another device" if isinstance(source, Raw) else why)
    target = View(over, over.shape, over.strides) if isinstance(over, Buffer) else over
    source = source if isinstance(source, Raw) else low.operand(source)
    written = (over,) if isinstance(over, Buffer) else ()
    low.out.defs.append(Call(written, note_of(copy), copy, (target, source), why=why))


def _refuse_if_strict(low: Lowering, node: fx.Node, why: str, instead: str = "") -> None:
    if low.config.strict:
        where, name = user_location(node), low.vendor.name
        todo = "drop options={'strict': True} to run it as an extern aten call, or "
        if instead:
            todo += instead
        elif getattr(node.target, "namespace", "") == "dicp":
            todo += f"have {name}.claim give one for it, or {name}.supports refuse it"
        elif isinstance(node.target, torch._ops.OpOverload) and low.vendor.keeps(node.target):
            todo += f"have {name}.claim give one for it, or {name}.keeps leave it to be decomposed"
        else:
            todo += "add a row to dicp/ops (docs/adding_an_op.md)"
        what = f"{node.target}: {name} has no code for this op ({why})"
        raise UnsupportedOp(what, where=where or (), todo=todo)


def _as_traced(low: Lowering, a: Any, exact: bool = False) -> Any:
    """An argument of an extern call: tensors whose dims lie in the order that they were traced with, which
    the op may rely on; exact: with the very strides."""
    if isinstance(a, (list, tuple)):
        return type(a)(_as_traced(low, x, exact) for x in a)
    if not isinstance(a, fx.Node):
        return low.index(a) if isinstance(a, torch.SymInt) else a
    value, val = low.values[a], a.meta.get("val")
    if isinstance(val, (torch.SymFloat, torch.SymBool)):
        return low.host(val)
    if not isinstance(value, (Value, Buffer)):
        return value
    view = low.operand(value)
    wanted = low.sizes(val.stride())
    if strides_agree(view.strides, wanted, view.shape) or isinstance(value, Buffer):
        return view
    if exact and (window := _window_on_base(low, a)) is not None:
        return window
    if not no_overlap(val):
        return view
    return low.in_order(value, order_of(val))


def _window_on_base(low: Lowering, view: fx.Node) -> View | None:
    """A view of a computed tensor as eager has it: a window on that, which is materialised for it."""
    base, val = base_of(view), view.meta["val"]
    whole = base.meta.get("val")
    if base is view or not isinstance(low.values[base], Value) or whole.dtype != val.dtype:
        return None
    memory = _as_traced(low, base)
    if not strides_agree(memory.strides, low.sizes(whole.stride()), memory.shape):
        return None
    first = low.index(val.storage_offset()) - low.index(whole.storage_offset())
    return View(memory.buffer, low.sizes(val.shape), low.sizes(val.stride()), memory.offset + first)


def _add_call(
    low: Lowering,
    node: fx.Node,
    args: Any,
    kwargs: Any,
    claim: Any,
    strides: Any,
    kind: str,
    host: bool = False,
) -> Any:
    val = node.meta.get("val")
    outs: list[Any] = []
    for k, (_, v) in enumerate(leaves(val)):
        if isinstance(v, (torch.SymInt, torch.SymFloat)):
            outs.append(low.symbols.index(v.node.expr) if host else low.index(v))
            continue
        if not isinstance(v, torch.Tensor) or not is_strided(v) or not low.program_device.holds(v):
            outs.append(None if v is None else Raw(f"{node.name}_{k}"))
            continue
        layout = strides[k] if strides is not None else None
        layout = _call_strides(low, node, v) if layout is None else layout
        if claim is not None and claim.updates:
            outs.append(low.updated(args[0].buffer))
            continue
        outs.append(low.new_buffer(low.sizes(v.shape), v.dtype, layout, kind))
        if isinstance(val, torch.Tensor) and kind == "temp":
            low.made[outs[-1].name] = node
    tensors = tuple(b if isinstance(b, Buffer) else None for b in outs)
    if claim is not None and claim.workspace is not None:
        nbytes = claim.workspace(low, node, args)
        tensors += (low.new_buffer((nbytes,), torch.uint8, (1,)),)
    low.out.defs.append(Call(tensors, note_of(node), node, args, kwargs, claim, tuple(outs), host))
    results = [low.content(b) if isinstance(b, Buffer) else b for b in outs]
    return _nested(val, iter(results))


def _nested(val: Any, results: Iterator[Any]) -> Any:
    """What an op returns, as it is nested."""
    return tuple(_nested(v, results) for v in val) if isinstance(val, (tuple, list)) else next(results)


def _call_strides(low: Lowering, node: fx.Node, val: torch.Tensor) -> Shape:
    """As traced; dense where the trace promises that elements of a new tensor share memory, as the fake
    implementations do that repeat their operand's strides."""
    shape = low.sizes(val.shape)
    told = (aten.empty_strided.default, aten.new_empty_strided.default)  # the strides themselves
    if returns_alias(node.target) or no_overlap(val) or node.target in told:
        return low.sizes(val.stride())
    strides = dense_strides(shape, tuple(range(len(shape))))
    low.dense[node] = strides
    return strides
