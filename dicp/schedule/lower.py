"""Lowering: an FX graph of aten ops becomes definitions of named tensors over virtual values.

    relu(add(x, y))              ->  buf0[i0, i1] = maximum(add(x[i0, i1], y[i1]), 0)          one Pointwise
    permute, expand, slice, cat  ->  nothing: index transforms inside their readers
    sum(mul(x, y), dim=1)        ->  buf1[i0] = sum over r0 of mul(x[i0, r0], y[i0, r0])       one Reduction
    mm, convolution, attention   ->  Call on Views, when the vendor claims the node; else an extern Call

A value is materialised (gets a definition) when it is a graph output, an operand of a call, or read more
than once and
dearer to recompute than to read. Fusion (fuse.py) later decides which of those really reach memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.errors import UnsupportedOp
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.printer import user_location
from dicp.ir.value import Indices, Shape, Value
from dicp.ops.table import Declined, table
from dicp.schedule.defs import Buffer, Call, Def, Host, Pointwise, Raw, Reduction, Scatter, View
from dicp.schedule.splitting import split_extent
from dicp.schedule.symbols import Symbols
from dicp.vendor.base import Machine

aten = torch.ops.aten

MAX_LOADS = 16  # reads inlined into one expression before it is materialised
MAX_COST = 160  # adds inlined into one expression before it is materialised
CHEAP_COST = 6  # a single-load expression up to this cost is recomputed by every reader
CHEAP_FREE_COST = 24  # likewise without any load: masks, position ids, constants


class Lowered:
    """The result: definitions in program order, and how inputs, outputs and mutations bind to buffers."""

    def __init__(self) -> None:
        self.defs: list[Def] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[Buffer | Index | None] = []
        self.outputs: list[Any] = []  # View | Index | None | input position wrapped in ("input", k)
        self.constants: dict[str, torch.Tensor] = {}
        self.checks: list[str] = []  # messages of the run-time checks, by number (errors.check_error)
        self.symbols: Symbols = Symbols(None)
        self.machine = Machine(threads=1)
        self.rounds = False  # whether values passed on inside a kernel are rounded as if through memory


def dense_strides(shape: Shape, order: tuple[int, ...]) -> Shape:
    """Strides of a dense tensor whose dims lie in memory in `order`, outermost first."""
    strides: list[Index] = [1] * len(shape)
    step: Index = 1
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d]
    return tuple(strides)


def order_of(val: torch.Tensor) -> tuple[int, ...]:
    """The memory order of a tensor's dims, outermost first; dims of size 1 keep their logical place."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    strides = val.stride()

    def later(a: int, b: int) -> bool:
        return bool(guard_or_false(strides[a] < strides[b])) and not guard_or_false(val.shape[b] == 1)

    order = list(range(val.dim()))
    for end in range(len(order)):  # insertion sort: comparisons of symbolic strides are not a key
        k = end
        while k > 0 and later(order[k - 1], order[k]) and not guard_or_false(val.shape[order[k]] == 1):
            order[k - 1], order[k] = order[k], order[k - 1]
            k -= 1
    return tuple(order)


def lower(gm: fx.GraphModule, vendor: Any, config: Any) -> Lowered:
    """Lower a graph for a kernel vendor. Raises UnsupportedOp where strict mode forbids an extern call."""
    return _Lowering(gm, vendor, config).run()


class _Lowering:
    """The Builder that rules see, and the walk over the graph."""

    def __init__(self, gm: fx.GraphModule, vendor: Any, config: Any) -> None:
        self.gm, self.vendor, self.config = gm, vendor, config
        self.out = Lowered()
        self.out.machine = vendor.machine(config)
        self.out.rounds = config.numerics == "eager"
        self.out.symbols = self.symbols = Symbols(_shape_env(gm))
        self.values: dict[fx.Node, Any] = {}
        self.node: fx.Node | None = None
        self.mutations: list[tuple[fx.Node, fx.Node]] = []
        self.in_place: dict[fx.Node, Buffer] = {}
        self.check_numbers: dict[str, int] = {}
        self.returned: dict[
            str, fx.Node
        ] = {}  # buffer -> the tensor, up to views, that the caller gets it as
        self.dense: dict[fx.Node, Shape] = {}  # calls whose results do not lie as they were traced
        self.uses = _use_counts(gm)
        self.shared = _returned_together(gm)

    # -- the walk ------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        for node in self.gm.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "output":
                self._finish(node)
            else:
                self.values[node] = self._call(node)
        return self.out

    def _placeholder(self, node: fx.Node) -> None:
        val = node.meta["val"]
        if isinstance(val, torch.Tensor) and _dense(val):
            buffer = Buffer(node.name, self._sizes(val.shape), val.dtype, self._sizes(val.stride()), "input")
            self.out.buffers[buffer.name] = buffer
            self.out.inputs.append(buffer)
            self.values[node] = buffer.value() if ex.compute_dtype(val.dtype) in ex.COMPUTE_DTYPES else buffer
        elif isinstance(val, torch.SymInt):
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
            if node.meta.get("unbacked_bindings"):
                self._extern(node, "a size read from data")
            return self.index(val)
        if node.target is aten._local_scalar_dense.default and isinstance(val, torch.SymFloat):
            source = self.values[node.args[0]]  # type: ignore[index]
            return ex.cast(source((0,) * len(source.shape)), torch.float64)
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":  # type: ignore[union-attr]
            self.mutations.append((node.args[0], node.args[1]))  # type: ignore[arg-type]
            return self.values[node.args[1]]  # type: ignore[index]
        if isinstance(val, (torch.SymFloat, torch.SymBool, float, bool)):
            return _host_scalar(node, self)
        claim = self.vendor.claim(node, self.config)
        if claim is not None:
            return self._library(node, claim)
        row = table().get(node.target)
        if row is not None and _lowerable(node):
            if _no_elements(val):
                shape, dtype = self.meta(node)
                return Value(shape, dtype, lambda idx: ex.const(0, dtype))
            args, kwargs = self._arguments(node)
            try:
                result = row.lower(self, node, args, kwargs)
            except Declined as e:
                return self._extern(node, str(e))
            return self._settle(node, result)
        return self._extern(node, "no lowering and no library claim")

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
            return tuple(self._settle_one(node, r, self._output_uses(node, k)) for k, r in enumerate(result))
        return self._settle_one(node, result, self.uses[node])

    def _output_uses(self, node: fx.Node, k: int) -> int:
        return sum(self.uses[u] for u in node.users if u.target is operator.getitem and u.args[1] == k)

    def _settle_one(self, node: fx.Node, value: Value | None, uses: int) -> Value | None:
        if value is None or uses == 0:
            return value
        value = self._memo(value, _note(node))
        if _is_view(node):
            return value
        idx = self._vars(value.shape)
        expr = value(idx)
        if expr.op in ("at", "const", "index") or (expr.op == "cast" and expr.args[0].op == "at"):
            return value
        if self.config.numerics == "eager":
            value = self._rounded(value)
            expr = value(idx)
        return self._named(value, node) if self._dear(node, expr, value.shape, uses) else value

    def _rounded(self, value: Value) -> Value:
        return Value(value.shape, value.dtype, lambda idx: ex.round_to(value(idx), value.dtype))

    def _dear(self, node: fx.Node, expr: Expr, shape: Shape, uses: int) -> bool:
        nodes = ex.walk(expr)
        loads = sum(e.op == "at" for e in nodes)
        work = ex.cost(expr)
        indirect = any(e.op == "check" for e in nodes)
        if loads > MAX_LOADS or work > MAX_COST or node in self.shared:
            return True
        if work > CHEAP_COST and self._broadcast(node, shape):
            return True
        if uses <= 1:
            return False
        cheap = work <= CHEAP_FREE_COST if loads == 0 else loads == 1 and work <= CHEAP_COST and not indirect
        return not cheap

    def _broadcast(self, node: fx.Node, shape: Shape) -> bool:
        """Whether some reader asks for the same element many times."""
        own = ix.product(shape)
        for user in node.users:
            val = user.meta.get("val")
            if isinstance(val, torch.Tensor) and not _reduces(user):
                theirs = ix.product(self._sizes(val.shape))
                bigger = theirs > own if isinstance(theirs, int) and isinstance(own, int) else theirs != own
                if bigger or (_is_view(user) and self._broadcast(user, shape)):
                    return True
        return False

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
        self.out.defs.append(Pointwise((buffer,), _note(node), _loop_vars(idx), expr, idx))
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
        if not _loop_vars(ridx):
            return self._of_one(kind, shape, dtypes, lambda i: fn(i, ridx))
        outs = tuple(self._buffer(shape, d, dense_strides(shape, self._reduced_order(shape))) for d in dtypes)
        self.out.defs.append(
            Reduction(outs, _note(self.node), _loop_vars(idx), _loop_vars(ridx), kind, expr, idx)
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
        first = self._memo(Value(shape, dtypes[0], fn), _note(self.node))
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
        line = _loop_vars((idx[axis],))[0]
        others = tuple(v for v in _loop_vars(idx) if v != line)
        outs = tuple(self._buffer(shape, d, self._strides(shape, self.node)) for d in dtypes)
        self.out.defs.append(
            Reduction(outs, _note(self.node), others, (line,), kind, fn(idx), idx, scan=True)
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
            Scatter((out,), _note(self.node), _loop_vars(idx), target, expr, mode, unique, base_buffer)
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
        return buffer if whole and _no_overlap(source.meta["val"]) else None

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

    # -- calls ---------------------------------------------------------------------------------------------

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
            window = _window(buffer.flat(expr.args[1]), idx, value.shape)
            if window is not None and buffer.dtype == value.dtype and _no_negative(window[0]):
                view = View(buffer, value.shape, *window)
                if not dense or view.strides == dense_strides(value.shape, tuple(range(len(value.shape)))):
                    return view
        strides = dense_strides(value.shape, order or tuple(range(len(value.shape))))
        buffer = self._buffer(value.shape, value.dtype, strides)
        note = expr.note or _note(self.node)  # the op that made it, not the call that reads it
        self.out.defs.append(Pointwise((buffer,), note, _loop_vars(idx), expr, idx))
        return View(buffer, value.shape, buffer.strides)

    def in_order(self, value: Any, order: tuple[int, ...]) -> View:
        """A value as a window whose dims lie in memory in `order`, outermost first."""
        view = value if isinstance(value, View) else self.operand(value, order=order)
        wanted = dense_strides(view.shape, order)
        if _strides_agree(view.strides, wanted, view.shape):
            return view
        idx = self._vars(view.shape)
        expr = value(idx) if isinstance(value, Value) else view.buffer.value()(idx)
        buffer = self._buffer(view.shape, view.buffer.dtype, wanted)
        self.out.defs.append(
            Pointwise((buffer,), f"layout change {_note(self.node)}", _loop_vars(idx), expr, idx)
        )
        return View(buffer, view.shape, wanted)

    def _operands(self, x: Any) -> Any:
        if isinstance(x, (Value, Buffer)):
            return self.operand(x)
        if isinstance(x, (list, tuple)):
            return type(x)(self._operands(a) for a in x)
        return x

    def _library(self, node: fx.Node, claim: Any) -> Any:
        args, kwargs = self._arguments(node)
        if claim.prepare is not None:
            args = claim.prepare(self, node, args)
        args, kwargs = self._operands(args), {k: self._operands(v) for k, v in kwargs.items()}
        strides = claim.strides(self, node, args)
        return self._add_call(node, args, kwargs, claim, strides, "temp" if claim.out else "library")

    def _extern(self, node: fx.Node, why: str) -> Any:
        if self.config.strict:
            where = user_location(node)
            raise UnsupportedOp(
                f"{node.target}: {self.vendor.name} has no code for this op ({why})",
                where=where or (),
                todo="drop options={'strict': True} to run it as an extern aten call, "
                "or add a row to dicp/ops (docs/adding_an_op.md)",
            )
        args = tuple(self._as_traced(a) for a in node.args)
        kwargs = {k: self._as_traced(a) for k, a in node.kwargs.items()}
        return self._add_call(node, args, kwargs, None, None, "extern")

    def _as_traced(self, a: Any) -> Any:
        """An argument of an extern call: tensors with the strides they were traced with, which the op may
        rely on."""
        if isinstance(a, (list, tuple)):
            return type(a)(self._as_traced(x) for x in a)
        if not isinstance(a, fx.Node):
            return self.index(a) if isinstance(a, torch.SymInt) else a
        value, val = self.values[a], a.meta.get("val")
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            return Host(val.node.expr)
        if not isinstance(value, (Value, Buffer)):
            return value
        view = self.operand(value)
        wanted = self._sizes(val.stride())
        if (
            _strides_agree(view.strides, wanted, view.shape)
            or isinstance(value, Buffer)
            or not _no_overlap(val)
        ):
            return view
        return self.in_order(value, order_of(val))

    def _add_call(self, node: fx.Node, args: Any, kwargs: Any, claim: Any, strides: Any, kind: str) -> Any:
        val = node.meta.get("val")
        vals = list(val) if isinstance(val, (tuple, list)) else [val]
        outs: list[Any] = []
        for k, v in enumerate(vals):
            if isinstance(v, torch.SymInt):
                outs.append(self.index(v))
                continue
            if not isinstance(v, torch.Tensor) or not _dense(v):
                outs.append(None if v is None else Raw(f"{node.name}_{k}"))
                continue
            layout = strides[k] if strides is not None else None
            layout = self._call_strides(node, v) if layout is None else layout
            outs.append(self._buffer(self._sizes(v.shape), v.dtype, layout, kind))
        tensors = tuple(b if isinstance(b, Buffer) else None for b in outs)
        self.out.defs.append(Call(tensors, _note(node), node, args, kwargs, claim, tuple(outs)))
        results = tuple(
            b.value() if isinstance(b, Buffer) and ex.compute_dtype(b.dtype) in ex.COMPUTE_DTYPES else b
            for b in outs
        )
        return results if isinstance(val, (tuple, list)) else results[0]

    def _call_strides(self, node: fx.Node, val: torch.Tensor) -> Shape:
        """As traced; dense where the trace promises that elements of a new tensor share memory, as the fake
        implementations do that repeat their operand's strides."""
        shape = self._sizes(val.shape)
        if _returns_views(node) or _no_overlap(val):
            return self._sizes(val.stride())
        strides = dense_strides(shape, tuple(range(len(shape))))
        self.dense[node] = strides
        return strides

    # -- the end -------------------------------------------------------------------------------------------

    def _finish(self, node: fx.Node) -> None:
        results = node.args[0]
        assert isinstance(results, (tuple, list))
        mutated = {ph.name for ph, _ in self.mutations}
        free = set(self.gm.meta.get("dicp_free_outputs", ()))
        returned = [self._output(r, mutated, k in free) for k, r in enumerate(results)]
        sources = [self._mutation_source(ph, src, mutated) for ph, src in self.mutations]
        for (ph, _), value in zip(self.mutations, sources, strict=True):
            if value is not None:
                buffer = self.out.buffers[ph.name]
                idx = self._vars(buffer.shape)
                self.out.defs.append(
                    Pointwise((buffer,), f"copy_ into {ph.name}", _loop_vars(idx), value(idx), idx)
                )
        self.out.outputs = returned

    def _mutation_source(self, ph: fx.Node, src: fx.Node, mutated: set[str]) -> Value | None:
        """What is written over a graph input; materialised first when it reads memory that is about to
        change."""
        value = self.values[src]
        shape, dtype = self.meta(ph)
        if src in self.in_place and self._is_whole(value, self.out.buffers[ph.name]):
            return None
        if isinstance(value, Buffer):
            raise UnsupportedOp(f"copy_ into {ph.name}: dtype {value.dtype} cannot be stored by a kernel")
        wanted = _broadcast_to(_converted(value, dtype), shape)
        idx = self._vars(shape)
        expr = wanted(idx)
        reads = [
            e
            for e in ex.walk(expr)
            if e.op == "at" and self._memory_of(self.out.buffers[e.args[0]]).name in mutated
        ]
        if all(e.args == (ph.name, idx) for e in reads):
            return wanted
        return self._named(wanted, ph)

    def _is_whole(self, value: Any, buffer: Buffer) -> bool:
        """Whether the value is what lies in the buffer, element for element."""
        if not isinstance(value, Value):
            return False
        idx = self._vars(value.shape)
        expr = value(idx)
        return (
            expr.op == "at"
            and expr.args[1] == idx
            and self._memory_of(self.out.buffers[expr.args[0]]) is buffer
        )

    def _memory_of(self, buffer: Buffer) -> Buffer:
        """The buffer that owns the memory: a scatter's result lives in its base."""
        while buffer.kind == "alias":
            buffer = next(d.base for d in self.out.defs if isinstance(d, Scatter) and d.outputs[0] is buffer)
        return buffer

    def _output(self, r: Any, mutated: set[str], free: bool) -> Any:
        if not isinstance(r, fx.Node):
            return r
        value = self.values[r]
        val = r.meta.get("val")
        if r.target is aten.copy_.default and r.args[0] in {ph for ph, _ in self.mutations}:
            r = r.args[0]  # type: ignore[assignment]  # the mutated input itself is what the caller has
        if r.op == "placeholder":
            return ("input", [n for n in self.gm.graph.nodes if n.op == "placeholder"].index(r))
        if not isinstance(val, torch.Tensor) or isinstance(value, Raw):
            return value
        if isinstance(value, Buffer):
            return View(value, value.shape, value.strides)
        shape, strides = self._sizes(val.shape), self.dense.get(r) or self._sizes(val.stride())
        idx = self._vars(shape)
        expr = value(idx)
        if expr.op == "at":
            buffer = self.out.buffers[expr.args[0]]
            window = _window(buffer.flat(expr.args[1]), idx, shape)
            root = _view_root(r)
            owner = self.returned.setdefault(buffer.name, root)
            fresh = buffer.kind == "input" and root.op != "placeholder" or owner is not root
            aliases = (
                fresh or buffer.kind == "constant" or buffer.name in mutated
            )  # the caller would see it change
            if (
                window is not None
                and buffer.dtype == value.dtype
                and not aliases
                and (free and _no_negative(window[0]) or _strides_agree(window[0], strides, shape))
            ):
                base = self._memory_of(buffer)
                if base.kind == "temp":
                    base.kind = "output"
                if base.kind not in ("input", "constant") or buffer is base:
                    return View(buffer, shape, window[0] if free else strides, window[1])
        order = self._strides(shape, r) if free else strides
        if not free and not _no_overlap(val):
            order = dense_strides(shape, tuple(range(len(shape))))
        buffer = self._buffer(shape, val.dtype, order, "output")
        self.out.defs.append(Pointwise((buffer,), _note(r), _loop_vars(idx), expr, idx))
        if not free and buffer.strides != strides:  # e.g. an expanded result: one element, many positions
            buffer.strides = strides
        return View(buffer, shape, strides if not free else order)


def _returned_together(gm: fx.GraphModule) -> set[fx.Node]:
    """Tensors that several results are views of: those share memory, as in eager."""
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    roots = [_view_root(r) for r in results if isinstance(r, fx.Node)]
    return {r for r in roots if roots.count(r) > 1}


def _view_root(node: fx.Node) -> fx.Node:
    """The node whose memory eager's result shares, going back through views."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        maker = node.args[0] if node.target is operator.getitem else node  # a piece of a split, say
        if not _returns_views(maker) or not isinstance(maker.args[0], fx.Node):
            break
        node = maker.args[0]
    return node


def _returns_views(node: fx.Node) -> bool:
    """Whether results of the node share memory with what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _no_elements(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in val.shape) and 0 in val.shape


def _shape_env(gm: fx.GraphModule) -> Any | None:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            return val.node.shape_env
        if isinstance(val, torch.Tensor) and getattr(val, "fake_mode", None) is not None:
            if val.fake_mode.shape_env is not None:
                return val.fake_mode.shape_env
    return None


def _dense(val: torch.Tensor) -> bool:
    return val.layout == torch.strided and not val.is_quantized


def _no_overlap(val: torch.Tensor) -> bool:
    """Whether no two elements share memory (and none is skipped in a way we would not allocate)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return not any(
        guard_or_false(s == 0) and not guard_or_false(n == 1)
        for n, s in zip(val.shape, val.stride(), strict=True)
    )


def _lowerable(node: fx.Node) -> bool:
    """Whether every tensor involved has a dtype kernels compute (complex, quantised, fp8... go to calls)."""
    vals = [a.meta.get("val") for a in node.all_input_nodes] + [node.meta.get("val")]
    flat = [x for v in vals for x in (v if isinstance(v, (tuple, list)) else [v])]
    return all(
        ex.compute_dtype(v.dtype) in ex.COMPUTE_DTYPES and _dense(v)
        for v in flat
        if isinstance(v, torch.Tensor)
    )


def _is_view(node: fx.Node) -> bool:
    row = table().get(node.target)  # type: ignore[call-overload]
    return row is not None and row.kind == "view"


def _reduces(node: fx.Node) -> bool:
    row = table().get(node.target)  # type: ignore[call-overload]
    return row is None or row.kind in ("reduction", "contraction")


def _use_counts(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Readers of each node's value, looking through views and tuple elements."""
    counts: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        total = 0
        for user in node.users:
            through = user.op == "call_function" and (user.target is operator.getitem or _is_view(user))
            total += counts[user] if through else 1
        counts[node] = total
    return counts


def _note(node: fx.Node | None) -> str:
    if node is None:
        return ""
    name = node.target.__name__ if callable(node.target) else str(node.target)
    where = user_location(node)
    return f"{name.removesuffix('.default')}    {where}" if where else name.removesuffix(".default")


def _loop_vars(idx: Indices) -> tuple[Var, ...]:
    return tuple(i.terms[0][0][0] for i in idx if isinstance(i, ix.Poly))  # type: ignore[misc]


def _window(flat: Index, idx: Indices, shape: Shape) -> tuple[Shape, Index] | None:
    """(strides, offset) when a flat position is affine in the index variables."""
    strides: list[Index] = []
    for i in idx:
        if isinstance(i, int):
            strides.append(0)
            continue
        split = ix.coefficient(flat, i.terms[0][0][0])  # type: ignore[arg-type]
        if split is None:
            return None
        strides.append(split[0])
        flat = split[1]
    if any(isinstance(a, ix.Opaque) for a in ix.atoms(flat)):
        return None
    step: Index = 1
    for k in range(len(shape) - 1, -1, -1):  # a dim of size 1 gets the stride a dense tensor would have
        if shape[k] == 1:
            strides[k] = step
        else:
            step = strides[k] * shape[k]
    return tuple(strides), flat


def _no_negative(strides: Shape) -> bool:
    """Whether a tensor can have these strides: torch has none that run backwards."""
    return all(ix.nonnegative(s) for s in strides)


def _strides_agree(a: Shape, b: Shape, shape: Shape) -> bool:
    return all(x == y or n == 1 for x, y, n in zip(a, b, shape, strict=True))


def _same_shape(node: fx.Node, value: Value, lowering: _Lowering) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and lowering._sizes(val.shape) == value.shape


def _converted(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else Value(value.shape, dtype, lambda i: ex.cast(value(i), dtype))


def _broadcast_to(value: Value, shape: Shape) -> Value:
    if value.shape == shape:
        return value
    lead = len(shape) - len(value.shape)
    keep = [n != 1 for n in value.shape]
    return Value(
        shape, value.dtype, lambda i: value(tuple(x if k else 0 for x, k in zip(i[lead:], keep, strict=True)))
    )


def _host_scalar(node: fx.Node, lowering: _Lowering) -> Any:
    """A symbolic float or bool computed from sizes, as a float64 (or bool) expression."""
    val = node.meta["val"]
    if isinstance(val, (float, bool)):
        return val
    found = None if isinstance(val, torch.SymBool) else lowering.symbols.scalar(val.node.expr)
    return Host(val.node.expr) if found is None else found
