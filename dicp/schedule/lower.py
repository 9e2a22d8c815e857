"""Lowering: an FX graph of aten ops becomes definitions of named tensors over virtual values.

    relu(add(x, y))              ->  buf0[i0, i1] = maximum(add(x[i0, i1], y[i1]), 0)          one Pointwise
    permute, expand, slice, cat  ->  nothing: index transforms inside their readers
    sum(mul(x, y), dim=1)        ->  buf1[i0] = sum over r0 of mul(x[i0, r0], y[i0, r0])       one Reduction
    mm, convolution, attention   ->  Call on Views, when the vendor claims the node; else an extern Call

A value is materialised (gets a definition) when it is a graph output, an operand of a call, or read more
than once and dearer to recompute than to read (readers.py). Fusion (fuse.py) later decides which of those
really reach memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import higher_order_name
from dicp.errors import DicpError, InternalError
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.printer import op_name, user_location
from dicp.ir.value import Indices, Shape, Value
from dicp.ops.misuse import is_misuse
from dicp.ops.table import Declined, table
from dicp.passes.facts import ROUNDED, writes_input
from dicp.passes.freeze import PACKED
from dicp.schedule.calls import (
    effect,
    extern,
    host_step,
    left_over,
    library,
    misused,
    slice_bounds,
    slice_read_from_data,
)
from dicp.schedule.defs import Buffer, Host, Lowered, Pointwise, Raw, Reduction, Scatter, View
from dicp.schedule.readers import Readers
from dicp.schedule.results import finish
from dicp.schedule.splitting import split_extent
from dicp.schedule.strides import (
    affine_window,
    dense_strides,
    loop_vars,
    no_negative,
    no_overlap,
    order_of,
    strides_agree,
)
from dicp.schedule.symbols import Symbols
from dicp.schedule.traced import (
    is_strided,
    is_token,
    is_view,
    lowerable,
    may_be_marked,
    no_elements,
    note_of,
    piece,
    shape_env,
)
from dicp.vendor.base import Claim

aten = torch.ops.aten


def lower(
    gm: fx.GraphModule, vendor: Any, config: Any, claims: dict[fx.Node, Claim] | None = None
) -> Lowered:
    """Lower a graph for a kernel vendor; claims: the library calls that were chosen, the vendor's own choice
    by default. Raises UnsupportedOp where strict mode forbids an extern call."""
    return Lowering(gm, vendor, config, claims).run()


class Lowering:
    """The Builder that rules see, and the walk over the graph."""

    def __init__(
        self, gm: fx.GraphModule, vendor: Any, config: Any, claims: dict[fx.Node, Claim] | None = None
    ) -> None:
        self.gm, self.vendor, self.config = gm, vendor, config
        self.out = Lowered()
        self.out.machine = vendor.machine(config)
        self.out.rounds = config.numerics == "eager"
        self.out.symbols = self.symbols = Symbols(shape_env(gm))
        self._name_sizes()
        self.values: dict[fx.Node, Any] = {}
        self.node: fx.Node | None = None
        self.mutations: list[tuple[fx.Node, fx.Node]] = []
        self.in_place: dict[fx.Node, Buffer] = {}
        self.check_numbers: dict[str, int] = {}
        self.returned: dict[
            str, fx.Node
        ] = {}  # buffer -> the tensor, up to views, that the caller gets it as
        self.dense: dict[fx.Node, Shape] = {}  # calls whose results do not lie as they were traced
        if claims is None:
            calls = [n for n in gm.graph.nodes if n.op == "call_function"]
            claims = {n: claim for n in calls if (claim := vendor.claim(n, config)) is not None}
        self.claims = claims
        self.readers = Readers(gm, self.claims, self._sizes)

    def _name_sizes(self) -> None:
        """Meet the sizes of tensors before what is made of them (strides, numbers of elements): as they are
        here, they become symbols."""
        for node in self.gm.graph.nodes:
            val = node.meta.get("val")
            for t in val if isinstance(val, (tuple, list)) else (val,):
                for n in t.shape if isinstance(t, torch.Tensor) and is_strided(t) else ():
                    self.symbols.index(n)

    # -- the walk ------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        for node in self.gm.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "output":
                finish(self, node)
            else:
                self.values[node] = self._lowered(node)
        return self.out

    def _lowered(self, node: fx.Node) -> Any:
        try:
            return self._call(node)
        except DicpError:
            raise
        except Exception as e:  # whatever a rule that has a fault raises
            raise InternalError(
                f"lowering {op_name(node.target)} failed: {type(e).__name__}: {e}",
                where=user_location(node) or (),
                todo="this is a fault of dicp: report it, with what DICP_DUMP=<folder> writes. "
                "torch.compiler.disable() on the function that makes this call leaves it to eager.",
            ) from e

    def _placeholder(self, node: fx.Node) -> None:
        val = node.meta["val"]
        if isinstance(val, torch.Tensor) and is_strided(val) and not is_token(node):
            self.symbols.give(*val.shape, *val.stride())
            kind = "packed" if PACKED in node.meta else "input"
            buffer = Buffer(node.name, self._sizes(val.shape), val.dtype, self._sizes(val.stride()), kind)
            self.out.buffers[buffer.name] = buffer
            self.out.inputs.append(buffer)
            if may_be_marked(node):
                self.out.marked.add(buffer.name)
            self.values[node] = buffer.value() if ex.compute_dtype(val.dtype) in ex.COMPUTE_DTYPES else buffer
        elif isinstance(val, torch.SymInt):
            self.symbols.give(val)
            self.values[node] = self.index(val)
            self.out.inputs.append(self.values[node])
        else:
            self.values[node] = val if isinstance(val, (int, float, bool)) else Raw(node.name)
            self.out.inputs.append(self.values[node] if isinstance(self.values[node], Raw) else None)

    def _constant(self, node: fx.Node) -> None:
        attr = getattr(self.gm, str(node.target))
        if isinstance(attr, torch.Tensor):
            buffer = Buffer(
                f"const_{node.name}",
                self._sizes(attr.shape),
                attr.dtype,
                self._sizes(attr.stride()),
                "constant",
            )
            self.out.buffers[buffer.name] = buffer
            self.out.constants[buffer.name] = attr
            self.values[node] = (
                buffer.value() if ex.compute_dtype(attr.dtype) in ex.COMPUTE_DTYPES else buffer
            )
        else:
            self.values[node] = attr

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            if node.target is aten._local_scalar_dense.default and isinstance(val, torch.SymInt):
                host_step(self, node)
            elif node.meta.get("unbacked_bindings"):
                extern(self, node, "a size read from data")
            return self.index(val)
        truth = isinstance(val, torch.SymBool)
        if node.target is aten._local_scalar_dense.default and (truth or isinstance(val, torch.SymFloat)):
            source = self.values[node.args[0]]  # type: ignore[index]
            if truth:
                host_step(self, node)
            return ex.cast(source((0,) * len(source.shape)), torch.bool if truth else torch.float64)
        if writes_input(node):
            self.mutations.append((node.args[0], node.args[1]))  # type: ignore[arg-type]
            return self.values[node.args[1]]  # type: ignore[index]
        if isinstance(val, (torch.SymFloat, torch.SymBool, float, bool)):
            return _host_scalar(node, self)
        if node.target is aten._assert_scalar.default:
            return host_step(self, node)
        if higher_order_name(node.target) == "with_effects":
            return effect(self, node)
        if node.target is aten.slice.Tensor and node.meta.get("unbacked_bindings"):
            if lowerable(node):
                return slice_read_from_data(self, node)
            slice_bounds(self, node)  # the elements are a library's work
        if is_misuse(node):
            return misused(self, node)
        if node in self.claims:
            return library(self, node, self.claims[node])
        row = table().get(node.target)
        if row is not None and lowerable(node):
            if no_elements(val):
                shape, dtype = self.meta(node)
                return Value(shape, dtype, lambda idx: ex.const(0, dtype))
            args, kwargs = self._arguments(node)
            try:
                result = row.lower(self, node, args, kwargs)
            except Declined as e:
                return left_over(self, node, str(e))
            return self._settle(node, result)
        return left_over(self, node, "no lowering and no library claim")

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def get(a: Any) -> Any:
            if isinstance(a, fx.Node):
                return self.values[a]
            if isinstance(a, torch.SymInt):
                return self.index(a)
            if isinstance(a, (list, tuple)):
                return type(a)(get(x) for x in a)
            return a

        return tuple(get(a) for a in node.args), {k: get(a) for k, a in node.kwargs.items()}

    # -- materialising -------------------------------------------------------------------------------------

    def _settle(self, node: fx.Node, result: Any) -> Any:
        """Note, memoise and (where it pays) materialise what a rule returned."""
        if isinstance(result, (tuple, list)):
            return tuple(
                self._settle_one(node, piece(node, k), r, self.readers.of_piece(node, k))
                for k, r in enumerate(result)
            )
        return self._settle_one(node, node, result, self.readers.of(node))

    def _settle_one(self, node: fx.Node, result: fx.Node, value: Value | None, uses: int) -> Value | None:
        if value is None or uses == 0:
            return value
        value = self._memo(value, note_of(node))
        if result in self.readers.shared:  # AOTAutograd makes the results anew from where they lie in it
            return self._named(value, result)
        if is_view(node):
            return value
        idx = self._vars(value.shape)
        expr = value(idx)
        if expr.op in ("at", "const", "index") or (expr.op == "cast" and expr.args[0].op == "at"):
            return value
        if self.config.numerics == "eager" or ROUNDED in result.meta:
            value = self._rounded(value)
            expr = value(idx)
        if self.readers.want_buffer(result, expr, value.shape, uses):
            return self._named(value, result)
        return value

    def _rounded(self, value: Value) -> Value:
        return Value(value.shape, value.dtype, lambda idx: ex.round_to(value(idx), value.dtype))

    def _memo(self, value: Value, note: str) -> Value:
        cache: dict[Indices, Expr] = {}

        def fn(idx: Indices) -> Expr:
            if idx not in cache:
                e = value.fn(idx)
                if e.note is None and e.op not in ("at", "const", "index"):
                    e.note = note
                cache[idx] = e
            return cache[idx]

        return Value(value.shape, value.dtype, fn)

    def _named(self, value: Value, node: fx.Node | None) -> Value:
        """Give a value a definition, its buffer laid out as the layout pass or eager has it."""
        idx = self._vars(value.shape)
        expr = value(idx)
        buffer = self._buffer(value.shape, value.dtype, self._strides(value.shape, node))
        self.out.defs.append(Pointwise((buffer,), note_of(node), loop_vars(idx), expr, idx))
        return self._memo(buffer.value(), "")

    def _strides(self, shape: Shape, node: fx.Node | None) -> Shape:
        order = tuple(range(len(shape)))
        if node is not None:
            val = node.meta.get("val")
            if "dicp_layout" in node.meta and len(node.meta["dicp_layout"]) == len(shape):
                order = node.meta["dicp_layout"]
            elif isinstance(val, torch.Tensor) and self._sizes(val.shape) == shape:
                order = order_of(val)
        return dense_strides(shape, order)

    def _buffer(self, shape: Shape, dtype: torch.dtype, strides: Shape, kind: str = "temp") -> Buffer:
        buffer = Buffer(f"buf{len(self.out.buffers)}", shape, dtype, strides, kind)
        self.out.buffers[buffer.name] = buffer
        return buffer

    def _vars(self, shape: Shape, prefix: str = "i") -> Indices:
        return tuple(0 if n == 1 else ix.of(Var(f"{prefix}{k}", n)) for k, n in enumerate(shape))

    def _sizes(self, xs: Any) -> Shape:
        return tuple(self.symbols.index(x) for x in xs)

    # -- the Builder protocol ------------------------------------------------------------------------------

    def meta(self, node: Any) -> tuple[Shape, torch.dtype]:
        val = node.meta["val"]
        return self._sizes(val.shape), val.dtype

    def index(self, value: Any) -> Index:
        return self.symbols.index(value)

    def realize(self, value: Value) -> Value:
        expr = value(self._vars(value.shape))
        if (
            expr.op == "at"
            and expr.args[1] == self._vars(value.shape)
            and self.out.buffers[expr.args[0]].shape == value.shape
        ):
            return value
        node = self.node if self.node is not None and _same_shape(self.node, value, self) else None
        return self._named(value, node)

    def reduce(
        self,
        kind: str,
        shape: Shape,
        extent: Shape,
        dtype: torch.dtype,
        fn: Callable[[Indices, Indices], Expr],
    ) -> Value:
        return self._reduction(kind, shape, extent, (dtype,), fn)[0]

    def welford(
        self, shape: Shape, extent: Shape, fn: Callable[[Indices, Indices], Expr]
    ) -> tuple[Value, Value]:
        dtype = fn(self._vars(shape), self._vars(extent, "r")).dtype
        mean, m2 = self._reduction("welford", shape, extent, (dtype, dtype), fn)
        return mean, m2

    def _reduction(
        self,
        kind: str,
        shape: Shape,
        extent: Shape,
        dtypes: tuple[torch.dtype, ...],
        fn: Callable[[Indices, Indices], Expr],
    ) -> tuple[Value, ...]:
        idx, ridx = self._vars(shape), self._vars(extent, "r")
        split = split_extent(kind, shape, extent, fn(idx, ridx), self.out.buffers, self.out.machine)
        if split is not None:
            return split.build(self, kind, shape, extent, dtypes, fn)
        expr = fn(idx, ridx)
        if not loop_vars(ridx):
            return self._of_one(kind, shape, dtypes, lambda i: fn(i, ridx))
        outs = tuple(self._buffer(shape, d, dense_strides(shape, self._reduced_order(shape))) for d in dtypes)
        self.out.defs.append(
            Reduction(outs, note_of(self.node), loop_vars(idx), loop_vars(ridx), kind, expr, idx)
        )
        return tuple(b.value() for b in outs)

    def _of_one(
        self, kind: str, shape: Shape, dtypes: tuple[torch.dtype, ...], fn: Callable[[Indices], Expr]
    ) -> tuple[Value, ...]:
        """A reduction over a single element."""
        if kind in ("argmax", "argmin"):
            return (Value(shape, dtypes[0], lambda i: ex.const(0, torch.int64)),)
        if kind in ("any", "all"):
            return (Value(shape, dtypes[0], lambda i: ex.cast(fn(i), torch.bool)),)
        first = self._memo(Value(shape, dtypes[0], fn), note_of(self.node))
        if kind == "welford":
            return first, Value(shape, dtypes[1], lambda i: ex.binary("sub", fn(i), fn(i)))  # NaN stays NaN
        return (first,)

    def _reduced_order(self, shape: Shape) -> tuple[int, ...]:
        val = self.node.meta.get("val") if self.node is not None else None
        if isinstance(val, (tuple, list)):
            val = val[0]
        if isinstance(val, torch.Tensor) and self._sizes(val.shape) == shape:
            return order_of(val)
        return tuple(range(len(shape)))

    def scan(
        self, kind: str, shape: Shape, axis: int, dtype: torch.dtype, fn: Callable[[Indices], Expr]
    ) -> Value:
        return self._scan(kind, shape, axis, (dtype,), fn)[0]

    def arg_scan(
        self, kind: str, shape: Shape, axis: int, dtype: torch.dtype, fn: Callable[[Indices], Expr]
    ) -> tuple[Value, Value]:
        best, where = self._scan(f"arg{kind}", shape, axis, (dtype, torch.int64), fn)
        return best, where

    def _scan(
        self,
        kind: str,
        shape: Shape,
        axis: int,
        dtypes: tuple[torch.dtype, ...],
        fn: Callable[[Indices], Expr],
    ) -> tuple[Value, ...]:
        idx = self._vars(shape)
        if not shape or shape[axis] == 1:  # a scan of one element is that element
            first = Value(shape, dtypes[0], fn)
            rest = Value(shape, torch.int64, lambda i: ex.const(0, torch.int64))
            return (first, rest)[: len(dtypes)]
        line = loop_vars((idx[axis],))[0]
        others = tuple(v for v in loop_vars(idx) if v != line)
        outs = tuple(self._buffer(shape, d, self._strides(shape, self.node)) for d in dtypes)
        self.out.defs.append(
            Reduction(outs, note_of(self.node), others, (line,), kind, fn(idx), idx, scan=True)
        )
        return tuple(b.value() for b in outs)

    def scatter(
        self,
        base: Value,
        extent: Shape,
        fn: Callable[[Indices], tuple[Indices, Expr]],
        mode: str,
        unique: bool = False,
    ) -> Value:
        if 0 in extent:  # nothing to write
            return base
        idx = self._vars(extent)
        target, expr = fn(idx)
        base_buffer = self._scatter_base(base)
        out = Buffer(
            f"buf{len(self.out.buffers)}", base_buffer.shape, base_buffer.dtype, base_buffer.strides, "alias"
        )
        self.out.buffers[out.name] = out
        self.out.defs.append(
            Scatter((out,), note_of(self.node), loop_vars(idx), target, expr, mode, unique, base_buffer)
        )
        return out.value()

    def _scatter_base(self, base: Value) -> Buffer:
        """The memory a scatter updates: the mutated graph input itself when nothing else reads it, else a
        copy."""
        mine = self._mutated_input(base)
        if mine is not None:
            assert self.node is not None
            self.in_place[self.node] = mine
            return mine
        named = self._named(
            base, self.node if self.node is not None and _same_shape(self.node, base, self) else None
        )
        return self.out.buffers[named(self._vars(base.shape)).args[0]]

    def _mutated_input(self, base: Value) -> Buffer | None:
        node = self.node
        if node is None or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        copies = [u for u in node.users if u.target is aten.copy_.default and u.args[0] is source]
        if source.op != "placeholder" or len(copies) != 1 or set(source.users) != {node, copies[0]}:
            return None
        buffer = self.out.buffers[source.name]
        expr = base(self._vars(base.shape))
        whole = expr.op == "at" and expr.args[0] == buffer.name and expr.args[1] == self._vars(base.shape)
        return buffer if whole and no_overlap(source.meta["val"]) else None

    def indirect(self, position: Expr, size: Index, what: str, wrap: bool = True) -> Index:
        position = ex.cast(position, torch.int64)
        if position.op in ("const", "index") and ix.in_range(position.args[0], size):
            return position.args[0]  # type: ignore[no-any-return]
        number = self._check(f"IndexError: {what}: index out of range")
        limit = ex.index_value(size)
        checked = Expr("check", (position, limit, int(wrap), number), torch.int64)
        return ix.of(ix.Opaque(checked, size))

    def nonzero(self, divisor: Expr, what: str) -> Expr:
        if divisor.op == "const" and divisor.args[0] != 0:
            return divisor
        number = self._check(f"ZeroDivisionError: integer division by zero in {what}")
        return Expr("nonzero", (divisor, number), divisor.dtype)

    def _check(self, message: str) -> int:
        """The number of a run-time check."""
        where = user_location(self.node) if self.node is not None else None
        message += f"\n  at {where}" if where else ""
        if message not in self.check_numbers:
            self.check_numbers[message] = len(self.out.checks)
            self.out.checks.append(message)
        return self.check_numbers[message]

    # -- operands of calls -----------------------------------------------------------------------------------

    def operand(self, value: Any, dense: bool = False, order: tuple[int, ...] | None = None) -> View:
        """A value as a strided window on memory, materialised when it is not one already.

        dense: row-major even where it is one. order: dims from outermost to innermost of what is
        materialised, row-major by default.
        """
        if isinstance(value, View):
            return value
        if isinstance(value, Buffer):
            return View(value, value.shape, value.strides)
        idx = self._vars(value.shape)
        expr = value(idx)
        if expr.op == "at":
            buffer = self.out.buffers[expr.args[0]]
            window = affine_window(buffer.flat(expr.args[1]), idx, value.shape)
            if window is not None and buffer.dtype == value.dtype and no_negative(window[0]):
                view = View(buffer, value.shape, *window)
                if not dense or view.strides == dense_strides(value.shape, tuple(range(len(value.shape)))):
                    return view
        strides = dense_strides(value.shape, order or tuple(range(len(value.shape))))
        buffer = self._buffer(value.shape, value.dtype, strides)
        note = expr.note or note_of(self.node)  # the op that made it, not the call that reads it
        self.out.defs.append(Pointwise((buffer,), note, loop_vars(idx), expr, idx))
        return View(buffer, value.shape, buffer.strides)

    def in_order(self, value: Any, order: tuple[int, ...]) -> View:
        """A value as a window whose dims lie in memory in `order`, outermost first."""
        view = value if isinstance(value, View) else self.operand(value, order=order)
        wanted = dense_strides(view.shape, order)
        if strides_agree(view.strides, wanted, view.shape):
            return view
        idx = self._vars(view.shape)
        expr = value(idx) if isinstance(value, Value) else view.buffer.value()(idx)
        buffer = self._buffer(view.shape, view.buffer.dtype, wanted)
        self.out.defs.append(
            Pointwise((buffer,), f"layout change {note_of(self.node)}", loop_vars(idx), expr, idx)
        )
        return View(buffer, view.shape, wanted)

    def _operands(self, x: Any) -> Any:
        if isinstance(x, (Value, Buffer)):
            return self.operand(x)
        if isinstance(x, (list, tuple)):
            return type(x)(self._operands(a) for a in x)
        return x


def _same_shape(node: fx.Node, value: Value, lowering: Lowering) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and lowering._sizes(val.shape) == value.shape


def _host_scalar(node: fx.Node, lowering: Lowering) -> Any:
    """A symbolic float or bool computed from sizes, as a float64 (or bool) expression."""
    val = node.meta["val"]
    if isinstance(val, (float, bool)):
        return val
    found = None if isinstance(val, torch.SymBool) else lowering.symbols.scalar(val.node.expr)
    return Host(val.node.expr) if found is None else found
