"""What rules build with: definitions of named tensors, buffers, run-time checks, operands of calls.

`DefinitionBuilder` is the `Builder` of `ir/value.py`; `lower.py` walks the graph with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.errors import VendorError
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.memory_order import no_overlap, order_of
from dicp.ir.meta_keys import LAYOUT_KEY
from dicp.ir.printer import user_location
from dicp.ir.value import Indices, Shape, Value
from dicp.schedule.defs import Buffer, Lowered, Pointwise, Reduction, Scatter, View
from dicp.schedule.program_device import ProgramDevice
from dicp.schedule.splitting import split_extent
from dicp.schedule.strides import affine_window, dense_strides, loop_vars, no_negative, strides_agree
from dicp.schedule.symbols import Symbols
from dicp.schedule.traced import note_of, shape_env
from dicp.vendor.asking import remedy
from dicp.vendor.base import Machine, Vendor

aten = torch.ops.aten


def _is_part_of(shape: Shape, whole: Shape) -> bool:
    """Whether each dim is the whole's, or of size 1."""
    return len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True))


class DefinitionBuilder:
    """Adds to `out`; `node` is what is lowered now. in_place: scatters that update a graph input. made: the
    node whose result is all of a buffer, which no other node's is, and which may so be overwritten behind its
    last reader."""

    def __init__(self, gm: fx.GraphModule, vendor: Vendor, config: Config) -> None:
        self.out = Lowered()
        self.out.machine = machine = vendor.machine(config)
        if not isinstance(machine, Machine):
            what = f"{vendor.name}.machine gave {machine!r}, which is no Machine"
            raise VendorError(what, todo=remedy(vendor))
        self.out.rounds = config.numerics == "eager"
        self.out.symbols = self.symbols = Symbols(shape_env(gm))
        self.program_device = ProgramDevice(gm, self.out.machine.device, vendor.device)
        self.out.device = self.program_device.device
        self.node: fx.Node | None = None
        self.in_place: dict[fx.Node, Buffer] = {}
        self.made: dict[str, fx.Node] = {}
        self.check_numbers: dict[str, int] = {}
        self.padded: dict[Any, Buffer] = {}  # copies of windows whose rows begin anywhere, by the window

    @property
    def rounds(self) -> bool:
        """See dicp.ir.value.Builder."""
        return self.out.rounds

    # -- materialising -------------------------------------------------------------------------------------

    def memo(self, value: Value, node: fx.Node | None = None) -> Value:
        """The value, each element's expression made once and marked with the node that it comes from, which
        its checks name too, whoever reads it."""
        cache: dict[Indices, Expr] = {}
        note = note_of(node)

        def fn(idx: Indices) -> Expr:
            if idx not in cache:
                reader, self.node = self.node, node or self.node
                try:
                    e = value.fn(idx)
                finally:  # a rule that declines leaves the node to another way
                    self.node = reader
                if e.note is None and e.op not in ("at", "const", "index"):
                    e.note = note
                cache[idx] = e
            return cache[idx]

        return Value(value.shape, value.dtype, fn, value.rows_of)

    def named(self, value: Value, node: fx.Node | None, strides: Shape | None = None) -> Value:
        """Give a value a definition, its buffer laid out as the layout pass or eager has it where no strides
        are given."""
        idx = self.index_vars(value.shape)
        expr = value(idx)
        buffer = self.new_buffer(value.shape, value.dtype, strides or self.strides_of(value.shape, node))
        note = note_of(node or self.node)
        if expr.note is None and expr.op not in ("at", "const", "index"):
            expr.note = note
        self.out.defs.append(Pointwise((buffer,), note, loop_vars(idx), expr, idx))
        return self.memo(buffer.value())

    def _node_of(self, value: Value) -> fx.Node | None:
        """The node that is lowered now, where its result has the value's sizes."""
        val = self.node.meta.get("val") if self.node is not None else None
        return self.node if isinstance(val, torch.Tensor) and self.sizes(val.shape) == value.shape else None

    def strides_of(self, shape: Shape, node: fx.Node | None) -> Shape:
        """Dense strides in the order that the layout pass, or else eager, has for the node's result, which
        has the shape but for dims of size 1."""
        order = tuple(range(len(shape)))
        if node is not None:
            val = node.meta.get("val")
            if LAYOUT_KEY in node.meta and len(node.meta[LAYOUT_KEY]) == len(shape):
                order = node.meta[LAYOUT_KEY]
            elif isinstance(val, torch.Tensor) and _is_part_of(shape, self.sizes(val.shape)):
                order = order_of(val)
        return dense_strides(shape, order)

    def new_buffer(self, shape: Shape, dtype: torch.dtype, strides: Shape, kind: str = "temp") -> Buffer:
        """A buffer that no definition writes yet."""
        buffer = Buffer(f"buf{len(self.out.buffers)}", shape, dtype, strides, kind)
        self.out.buffers[buffer.name] = buffer
        return buffer

    def index_vars(self, shape: Shape, prefix: str = "i") -> Indices:
        """An index of a tensor of this shape: a variable for each dim of more than one element."""
        return tuple(0 if n == 1 else ix.of(Var(f"{prefix}{k}", n)) for k, n in enumerate(shape))

    def sizes(self, xs: Any) -> Shape:
        """Traced sizes (or strides) as indices."""
        return tuple(self.symbols.index(x) for x in xs)

    # -- the Builder protocol ------------------------------------------------------------------------------

    def meta(self, node: Any) -> tuple[Shape, torch.dtype]:
        val = node.meta["val"]
        return self.sizes(val.shape), val.dtype

    def index(self, value: Any) -> Index:
        return self.symbols.index(value)

    def realize(self, value: Value) -> Value:
        expr = value(self.index_vars(value.shape))
        if (
            expr.op == "at"
            and expr.args[1] == self.index_vars(value.shape)
            and self.out.buffers[expr.args[0]].shape == value.shape
        ):
            return value
        return self.named(value, self._node_of(value))

    def kept(self, value: Value) -> Value:
        return value if self.out.machine.launch_bytes else self.realize(value)

    def reduce(
        self,
        kind: str,
        shape: Shape,
        extent: Shape,
        dtype: torch.dtype,
        fn: Callable[[Indices, Indices], Expr],
    ) -> Value:
        return self.reduction(kind, shape, extent, (dtype,), fn)[0]

    def welford(
        self, shape: Shape, extent: Shape, fn: Callable[[Indices, Indices], Expr]
    ) -> tuple[Value, Value]:
        dtype = fn(self.index_vars(shape), self.index_vars(extent, "r")).dtype
        mean, m2 = self.reduction("welford", shape, extent, (dtype, dtype), fn)
        return mean, m2

    def reduction(
        self,
        kind: str,
        shape: Shape,
        extent: Shape,
        dtypes: tuple[torch.dtype, ...],
        fn: Callable[[Indices, Indices], Expr],
    ) -> tuple[Value, ...]:
        """`reduce`, of a kind with as many results as there are dtypes; a long one in parts."""
        idx, ridx = self.index_vars(shape), self.index_vars(extent, "r")
        split = split_extent(kind, shape, extent, fn(idx, ridx), self.out.buffers, self.out.machine)
        if split is not None:
            return split.build(self, kind, shape, extent, dtypes, fn)
        expr = fn(idx, ridx)
        if not loop_vars(ridx):
            return self._of_one(kind, shape, dtypes, lambda i: fn(i, ridx))
        strides = dense_strides(shape, self._reduced_order(shape))
        outs = tuple(self.new_buffer(shape, d, strides) for d in dtypes)
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
        first = self.memo(Value(shape, dtypes[0], fn), self.node)
        if kind == "welford":
            return first, Value(shape, dtypes[1], lambda i: ex.binary("sub", fn(i), fn(i)))  # NaN stays NaN
        return (first,)

    def _reduced_order(self, shape: Shape) -> tuple[int, ...]:
        val = self.node.meta.get("val") if self.node is not None else None
        if isinstance(val, (tuple, list)):
            val = val[0]
        if isinstance(val, torch.Tensor) and self.sizes(val.shape) == shape:
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
        idx = self.index_vars(shape)
        if not shape or shape[axis] == 1:  # a scan of one element is that element
            first = Value(shape, dtypes[0], fn)
            rest = Value(shape, torch.int64, lambda i: ex.const(0, torch.int64))
            return (first, rest)[: len(dtypes)]
        line = loop_vars((idx[axis],))[0]
        others = tuple(v for v in loop_vars(idx) if v != line)
        outs = tuple(self.new_buffer(shape, d, self.strides_of(shape, self.node)) for d in dtypes)
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
        idx = self.index_vars(extent)
        target, expr = fn(idx)
        base_buffer = self._fresh_along(base, loop_vars(idx), target, expr) or self.overwritable(base)
        out = self.updated(base_buffer)
        self.out.defs.append(
            Scatter((out,), note_of(self.node), loop_vars(idx), target, expr, mode, unique, base_buffer)
        )
        return out.value()

    def _fresh_along(
        self, base: Value, variables: tuple[ix.Var, ...], target: Indices, expr: Expr
    ) -> Buffer | None:
        """Of a constant a buffer whose rows lie along what is scattered, so that both are walked by vectors:
        gradients of channels-last images. None where the last dim does so anyway, or none does."""
        if base(self.index_vars(base.shape)).op != "const":
            return None
        reads = [e for e in ex.walk(expr) if e.op == "at" and len(e.args[1]) == len(target)]
        flats = [self.out.buffers[e.args[0]].flat(e.args[1]) for e in reads]
        places = {v: d for d, i in enumerate(target) for v in variables if i == ix.of(v)}
        along = (d for v, d in places.items() if any(ix.moves_by_one(flat, v) for flat in flats))
        last = next(along, None)
        if last is None or last == len(target) - 1:
            return None
        order = (*(d for d in range(len(target)) if d != last), last)
        named = self.named(base, None, dense_strides(base.shape, order))
        return self.out.buffers[named(self.index_vars(base.shape)).args[0]]

    def updated(self, base: Buffer) -> Buffer:
        """What the buffer holds once a scatter, or a call, of this node has updated it."""
        out = self.new_buffer(base.shape, base.dtype, base.strides, "alias")
        out.base = base
        if self.node is not None and base.kind != "input":
            self.made[out.name] = self.node
        return out

    def overwritable(self, base: Value, dense: bool = False) -> Buffer:
        """The memory that an update of the node's first operand may go to: the mutated graph input itself, or
        the result of a call, when nothing else reads it; else a copy. dense: it has to be row-major."""
        rows = dense_strides(base.shape, tuple(range(len(base.shape))))
        mine = self._mutated_input(base)
        if mine is not None and (not dense or mine.strides == rows):
            assert self.node is not None
            self.in_place[self.node] = mine
            return mine
        dying = self._dying_result(base)
        if dying is not None and (not dense or dying.strides == rows):
            return dying
        named = self.named(base, self._node_of(base), rows if dense else None)
        return self.out.buffers[named(self.index_vars(base.shape)).args[0]]

    def _mutated_input(self, base: Value) -> Buffer | None:
        node = self.node
        if node is None or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        copies = [u for u in node.users if u.target is aten.copy_.default and u.args[0] is source]
        if source.op != "placeholder" or len(copies) != 1 or set(source.users) != {node, copies[0]}:
            return None
        buffer = self.out.buffers[source.name]
        idx = self.index_vars(base.shape)
        expr = base(idx)
        whole = expr.op == "at" and expr.args[0] == buffer.name and expr.args[1] == idx
        return buffer if whole and no_overlap(source.meta["val"]) else None

    def _dying_result(self, base: Value) -> Buffer | None:
        """The buffer that a call, or a scatter, made for this node alone to read, as its first operand."""
        node = self.node
        source = node.args[0] if node is not None and node.args else None
        if not isinstance(source, fx.Node) or set(source.users) != {node}:
            return None
        assert node is not None
        others: list[fx.Node] = []
        fx.map_arg((node.args[1:], node.kwargs), others.append)
        expr = base(idx := self.index_vars(base.shape))
        if source in others or expr.op != "at" or expr.args[1] != idx:
            return None
        buffer = self.out.buffers[expr.args[0]]
        return buffer if self.made.get(buffer.name) is source and buffer.shape == base.shape else None

    def indirect(self, position: Expr, size: Index, what: str, wrap: bool = True) -> Index:
        position = ex.cast(position, torch.int64)
        if position.op in ("const", "index") and ix.in_range(position.args[0], size):
            return position.args[0]  # type: ignore[no-any-return]
        number = self.check_number(f"IndexError: {what}: index out of range")
        limit = ex.index_value(size)
        checked = Expr("check", (position, limit, int(wrap), number), torch.int64)
        return ix.of(ix.Opaque(checked, size))

    def nonzero(self, divisor: Expr, what: str) -> Expr:
        if divisor.op == "const" and divisor.args[0] != 0:
            return divisor
        number = self.check_number(f"ZeroDivisionError: integer division by zero in {what}")
        return Expr("nonzero", (divisor, number), divisor.dtype)

    def check_number(self, message: str) -> int:
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
        idx = self.index_vars(value.shape)
        expr = value(idx)
        row_major = dense_strides(value.shape, tuple(range(len(value.shape))))
        view = self._window(value, idx, expr)
        if view is not None and (not dense or view.strides == row_major):
            return view
        in_rows = order is None or order == tuple(range(len(value.shape)))
        if value.rows_of is not None and in_rows and expr.op != "at":
            rows = self.operand(value.rows_of, dense=True)  # with the dims of what else is done to its rows
            return View(rows.buffer, value.shape, row_major, rows.offset)
        strides = row_major if order is None else dense_strides(value.shape, order)
        buffer = self.new_buffer(value.shape, value.dtype, strides)
        note = expr.note or note_of(self.node)  # the op that made it, not the call that reads it
        self.out.defs.append(Pointwise((buffer,), note, loop_vars(idx), expr, idx))
        return View(buffer, value.shape, buffer.strides)

    def _window(self, value: Value, idx: Indices, expr: Expr) -> View | None:
        """Where a value, whose element at idx is expr, lies in memory as a strided window; None where it does
        not."""
        if expr.op != "at":
            return None
        buffer = self.out.buffers[expr.args[0]]
        window = affine_window(buffer.flat(expr.args[1]), idx, value.shape)
        if window is None or buffer.dtype != value.dtype or not no_negative(window[0]):
            return None
        return View(buffer, value.shape, *window)

    def aligned(self, value: Value, elements: int) -> View:
        """A matrix as a window in which what lies apart, rows or columns, begins at multiples of so many
        elements; a copy of memory that does not is made once."""
        idx = self.index_vars(value.shape)
        view = self._window(value, idx, expr := value(idx))
        strides = (value.shape[1], 1) if view is None else view.strides  # what is made lies row by row
        far = next((d for d in (0, 1) if strides[1 - d] == 1), None)
        if far is None or not all(isinstance(n, int) for n in (*value.shape, *strides)):
            return self.operand(value)
        length, step = value.shape[1 - far], strides[far]
        assert isinstance(length, int) and isinstance(step, int)
        if step % elements == 0:
            return self.operand(value)
        row = -(-length // elements) * elements
        apart = (row, 1) if far == 0 else (1, row)
        key = (expr,) if view is None else (view.buffer.name, view.offset, step, value.shape[far], length)
        if key not in self.padded:
            buffer = self.padded[key] = self.new_buffer(value.shape, value.dtype, apart)
            note = f"rows aligned for {note_of(self.node)}"
            self.out.defs.append(Pointwise((buffer,), note, loop_vars(idx), expr, idx))
        return View(self.padded[key], value.shape, apart)

    def in_order(self, value: Value | Buffer, order: tuple[int, ...]) -> View:
        """A value as a window whose dims lie in memory in `order`, outermost first."""
        view = self.operand(value, order=order)
        wanted = dense_strides(view.shape, order)
        if strides_agree(view.strides, wanted, view.shape):
            return view
        idx = self.index_vars(view.shape)
        expr = value(idx) if isinstance(value, Value) else value.value()(idx)
        buffer = self.new_buffer(view.shape, view.buffer.dtype, wanted)
        self.out.defs.append(
            Pointwise((buffer,), f"layout change {note_of(self.node)}", loop_vars(idx), expr, idx)
        )
        return View(buffer, view.shape, wanted)

    def operands(self, x: Any) -> Any:
        if isinstance(x, (Value, Buffer)):
            return self.operand(x)
        if isinstance(x, (list, tuple)):
            return type(x)(self.operands(a) for a in x)
        return x
