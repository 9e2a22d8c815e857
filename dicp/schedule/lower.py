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
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import higher_order_name
from dicp.config import Config
from dicp.errors import DicpError, InternalError, VendorError
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.memory_order import no_overlap
from dicp.ir.meta_keys import LAYOUT_KEY, PACKED, ROUNDED
from dicp.ir.printer import op_name, user_location
from dicp.ir.value import Indices, Shape, Value
from dicp.ops.misuse import is_misuse
from dicp.ops.rules.pointwise import broadcast
from dicp.ops.table import Declined, table
from dicp.passes.facts import writes_input
from dicp.schedule.builder import DefinitionBuilder
from dicp.schedule.calls import (
    effect,
    extern,
    host_step,
    left_over,
    library,
    misused,
    select_place,
    slice_bounds,
    slice_read_from_data,
)
from dicp.schedule.defs import Buffer, Host, Lowered, Pointwise, Raw, Reduction, Scatter, leaves
from dicp.schedule.readers import Readers, is_indirect
from dicp.schedule.results import finish
from dicp.schedule.strides import strides_agree
from dicp.schedule.traced import (
    held,
    is_reindexed,
    is_strided,
    is_token,
    lowerable,
    may_be_marked,
    no_elements,
    piece,
)
from dicp.vendor.asking import remedy
from dicp.vendor.base import Claim, Vendor

aten = torch.ops.aten


def lower(
    gm: fx.GraphModule, vendor: Vendor, config: Config, claims: dict[fx.Node, Claim] | None = None
) -> Lowered:
    """Lower a graph for a kernel vendor; claims: the library calls that were chosen, the vendor's own choice
    by default. Raises UnsupportedOp where strict mode forbids an extern call."""
    return Lowering(gm, vendor, config, claims).run()


class Lowering(DefinitionBuilder):
    """The walk over the graph."""

    def __init__(
        self, gm: fx.GraphModule, vendor: Vendor, config: Config, claims: dict[fx.Node, Claim] | None = None
    ) -> None:
        super().__init__(gm, vendor, config)
        self.gm, self.vendor, self.config = gm, vendor, config
        self._name_sizes()
        self.values: dict[fx.Node, Any] = {}
        self.mutations: list[tuple[fx.Node, fx.Node]] = []
        self.returned: dict[str, fx.Node] = {}  # buffer -> the tensor, up to views, that the caller has
        self.floats: dict[Any, fx.Node] = {}  # symbol -> what reads it from a tensor; the host at demand only
        self.scalars: dict[Any, ex.Expr] = {}  # symbol -> the same where it lies, for kernels
        self.dense: dict[fx.Node, Shape] = {}  # calls whose results do not lie as they were traced
        if claims is None:
            calls = [n for n in gm.graph.nodes if n.op == "call_function"]
            claims = {n: claim for n in calls if (claim := vendor.claim(n, config)) is not None}
        self.claims = {n: claim for n, claim in claims.items() if self.program_device.elsewhere(n) is None}
        free = self.out.machine.launch_bytes == 0
        self.readers = Readers(gm, self.claims, self.sizes, self.symbols.hint, tables=free)

    def _name_sizes(self) -> None:
        """Meet the sizes of tensors before what is made of them (strides, numbers of elements): as they are
        here, they become symbols."""
        for node in self.gm.graph.nodes:
            val = node.meta.get("val")
            for t in val if isinstance(val, (tuple, list)) else (val,):
                for n in t.shape if isinstance(t, torch.Tensor) and is_strided(t) else ():
                    self.symbols.length(n)

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
        except Exception as e:  # whatever a rule, or a vendor's claim, that has a bug raises
            claim = self.claims.get(node)
            if claim is not None:
                what = f"the claim {claim.name!r} of {self.vendor.name} for {node.target} failed"
                said, where = f"{what}: {type(e).__name__}: {e}", user_location(node) or ()
                raise VendorError(said, where=where, todo=remedy(self.vendor)) from e
            raise InternalError(
                f"lowering {op_name(node.target)} failed: {type(e).__name__}: {e}",
                where=user_location(node) or (),
                todo="torch.compiler.disable() on the function that makes this call leaves it to eager.",
            ) from e

    def content(self, buffer: Buffer) -> Value | Buffer:
        """What a buffer holds, for kernels; itself, for calls alone, where those do not hold its dtype."""
        return buffer.value() if held(buffer.dtype, self.vendor.float8) else buffer

    def _placeholder(self, node: fx.Node) -> None:
        val = node.meta["val"]
        here = self.program_device.takes(node) and not is_token(node)
        if isinstance(val, torch.Tensor) and is_strided(val) and here:
            self.symbols.give(*val.shape, *val.stride())
            kind = "packed" if PACKED in node.meta else "input"
            buffer = Buffer(node.name, self.sizes(val.shape), val.dtype, self.sizes(val.stride()), kind)
            self.out.buffers[buffer.name] = buffer
            self.out.inputs.append(buffer)
            if may_be_marked(node):
                self.out.marked.add(buffer.name)
            self.values[node] = self.content(buffer)
        elif isinstance(val, torch.SymInt):
            self.symbols.give(val)
            self.values[node] = self.index(val)
            self.out.inputs.append(self.values[node])
        else:
            self.values[node] = val if isinstance(val, (int, float, bool)) else Raw(node.name)
            self.out.inputs.append(self.values[node] if isinstance(self.values[node], Raw) else None)

    def _constant(self, node: fx.Node) -> None:
        attr = getattr(self.gm, str(node.target))
        if isinstance(attr, torch.Tensor) and not self.program_device.takes(node):
            self.out.constants[node.name] = attr
            self.values[node] = Raw(node.name)
        elif isinstance(attr, torch.Tensor):
            attr = attr.to(self.program_device.device) if node in self.program_device.numbers else attr
            buffer = Buffer(
                f"const_{node.name}",
                self.sizes(attr.shape),
                attr.dtype,
                self.sizes(attr.stride()),
                "constant",
            )
            self.out.buffers[buffer.name] = buffer
            self.out.constants[buffer.name] = attr
            self.values[node] = self.content(buffer)
        else:
            self.values[node] = attr

    def _pairs(self, x: Buffer) -> Value:
        """A complex tensor's real and imaginary parts, where they lie."""
        buffer = self.new_buffer(
            (*x.shape, 2), x.dtype.to_real(), (*(2 * s for s in x.strides), 1), "alias"
        )
        buffer.base = x
        return buffer.value()

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            if node.target is aten._local_scalar_dense.default and isinstance(val, torch.SymInt):
                host_step(self, node)
            elif node.meta.get("unbacked_bindings"):
                extern(self, node, "a size read from data")
            self._read(val)
            return self.index(val)
        truth = isinstance(val, torch.SymBool)
        if node.target is aten._local_scalar_dense.default and (truth or isinstance(val, torch.SymFloat)):
            source = self.values[node.args[0]]  # type: ignore[index]
            if truth:
                host_step(self, node)
            read = ex.cast(source((0,) * len(source.shape)), torch.bool if truth else torch.float64)
            if not truth:
                self.floats[val.node.expr], self.scalars[val.node.expr] = node, read
            return read
        if writes_input(node):
            self.mutations.append((node.args[0], node.args[1]))  # type: ignore[arg-type]
            return self.values[node.args[1]]  # type: ignore[index]
        if isinstance(val, (torch.SymFloat, torch.SymBool, float, bool)):
            return _host_scalar(node, self)
        if node.target is aten._assert_scalar.default:
            return host_step(self, node)
        if (device := self.program_device.elsewhere(node)) is not None:
            here = self.program_device.device
            return extern(self, node, f"a tensor is on {device}, the program's are on {here}")
        if higher_order_name(node.target) == "with_effects":
            return effect(self, node)
        if node.target is aten.select.int and node.meta.get("unbacked_bindings"):
            select_place(self, node)
        if node.target is aten.slice.Tensor and node.meta.get("unbacked_bindings"):
            if lowerable(node, self.vendor.float8):
                return slice_read_from_data(self, node)
            slice_bounds(self, node)  # the elements are a library's work
        if is_misuse(node):
            return misused(self, node)
        if node.target is aten.view_as_real.default and isinstance(self.values[node.args[0]], Buffer):
            return self._pairs(self.values[node.args[0]])
        if node in self.claims:
            return library(self, node, self.claims[node])
        row = table().get(node.target)
        if row is not None and lowerable(node, self.vendor.float8):
            if not self.vendor.emits(node):
                name = self.vendor.name
                todo = f"have {name}.emits take it, or {name}.claim give a claim for it"
                return left_over(self, node, f"{name}.emits refuses {_dtypes(val)}", todo)
            if no_elements(val):
                shape, dtype = self.meta(node)
                return Value(shape, dtype, lambda idx: ex.const(0, dtype))
            args, kwargs = self.arguments(node)
            if any(isinstance(a, Host) for a in (*args, *kwargs.values())):
                return left_over(self, node, "a number made of sizes by what kernels have no code for")
            before = len(self.out.defs)
            try:
                result = row.lower(self, node, args, kwargs)
            except Declined as e:
                return left_over(self, node, str(e))
            if self.vendor.words is not None and (lacking := self._unspelled(result, before)):
                name, these = self.vendor.name, ", ".join(lacking)
                todo = f"give {name} a word for {these}, or a claim for the op"
                return left_over(self, node, f"{name} has no word for {these}", todo)
            return self._settle(node, result)
        return left_over(self, node, "no lowering and no library claim")

    def arguments(self, node: fx.Node, called: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """called: as a call takes them, numbers made of sizes as the host computes them."""

        def get(a: Any) -> Any:
            if isinstance(a, fx.Node):
                val = a.meta.get("val")
                if called and isinstance(val, (torch.SymFloat, torch.SymBool)):
                    return self.host(val)
                return self.values[a]
            if isinstance(a, torch.SymInt):
                return self.index(a)
            if isinstance(a, (list, tuple)):
                return type(a)(get(x) for x in a)
            return a

        return tuple(get(a) for a in node.args), {k: get(a) for k, a in node.kwargs.items()}

    def host(self, val: torch.SymFloat | torch.SymBool) -> Host:
        """A number made of sizes, or of what is read from tensors, as the calling Python computes it."""
        self._read(val)
        return Host(val.node.expr)

    def _read(self, val: Any) -> None:
        """Have the host read the floats that a number is made of, where it did not so far: kernels read those
        where they lie."""
        for symbol in getattr(val, "node", None) and val.node.expr.free_symbols or ():
            if symbol in self.floats:
                host_step(self, self.floats.pop(symbol))

    def _unspelled(self, result: Any, before: int) -> list[str]:
        """What kernels for a rule's result would need that the vendor has no words for. Where there is any,
        what the rule defined, from number `before`, is taken back: a scatter is an effect."""
        words = self.vendor.words
        assert words is not None
        values = result if isinstance(result, (tuple, list)) else [result]
        exprs = [v(self.index_vars(v.shape)) for v in values if isinstance(v, Value)]
        needs: list[str] = []
        for d in self.out.defs[before:]:
            exprs += [d.expr] if isinstance(d, (Pointwise, Reduction, Scatter)) else []
            needs += [d.kind, *(["scan"] if d.scan else [])] if isinstance(d, Reduction) else []
        needs += [e.op for e in ex.walk(*exprs) if e.op in ex.PRIMITIVES]
        lacking = [need for need in dict.fromkeys(needs) if need not in words]
        if lacking:
            del self.out.defs[before:]
            self.in_place.pop(self.node, None)  # type: ignore[arg-type]
        return lacking

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
        value = self.memo(value, node)
        if result in self.readers.shared:  # AOTAutograd makes the results anew from where they lie in it
            return self.named(value, result, self._as_traced(result))
        if is_reindexed(node):
            return value
        idx = self.index_vars(value.shape)
        expr = value(idx)
        read = expr.args[0] if expr.op == "cast" else expr
        if expr.op in ("const", "index"):
            return value
        if read.op == "at" and not is_indirect(ex.walk(read)):
            if ROUNDED in result.meta:
                self._round_reduction(read.args[0])
            return value
        if self.config.numerics == "eager" or ROUNDED in result.meta or self.readers.in_memory[result]:
            value = self._rounded(value)
            expr = value(idx)
        once = value if self.readers.in_memory[result] else self._once(value, idx, expr)
        if self.readers.want_buffer(result, expr, once, uses, self.out.buffers):
            return broadcast(self.named(once, result), value.shape)
        return value

    def _as_traced(self, node: fx.Node) -> Shape | None:
        """The strides that a tensor was traced with, where none that are dense equal them: views that are
        returned beside it are views of memory with those."""
        val = node.meta["val"]
        if LAYOUT_KEY in node.meta or not no_overlap(val):
            return None
        shape, traced = self.sizes(val.shape), self.sizes(val.stride())
        return None if strides_agree(self.strides_of(shape, node), traced, shape) else traced

    def _once(self, value: Value, idx: Indices, expr: ex.Expr) -> Value:
        """The value along the dims on which its element depends, the others being of size 1."""
        if self.out.machine.launch_bytes:  # a kernel more costs more there than making elements again
            return value
        varying = ex.variables(expr)
        stays = (varying.isdisjoint(ix.atoms(i)) for i in idx)
        shape = tuple(1 if same else n for same, n in zip(stays, value.shape, strict=True))
        return value if shape == value.shape else Value(shape, value.dtype, value.fn)

    def _round_reduction(self, name: str) -> None:
        """Have the buffer's readers in its own kernel see what memory would hold, if a reduction makes it."""
        for d in reversed(self.out.defs):
            if any(b is not None and b.name == name for b in d.outputs):
                if isinstance(d, Reduction):
                    d.rounded = True
                return

    def _rounded(self, value: Value) -> Value:
        def element(idx: Any) -> ex.Expr:
            exact = value(idx)
            rounded = ex.round_to(exact, value.dtype)
            rounded.note = rounded.note or exact.note
            return rounded

        return Value(value.shape, value.dtype, element)


def _dtypes(val: Any) -> str:
    """Of what a call gives."""
    dtypes = dict.fromkeys(str(t.dtype) for _, t in leaves(val) if isinstance(t, torch.Tensor))
    return " and ".join(dtypes) or "it"


def _host_scalar(node: fx.Node, lowering: Lowering) -> Any:
    """A symbolic float or bool computed from sizes, as a float64 (or bool) expression."""
    val = node.meta["val"]
    if isinstance(val, (float, bool)):
        return val
    expr = val.node.expr
    found = None if isinstance(val, torch.SymBool) else lowering.symbols.scalar(expr, lowering.scalars)
    return Host(expr) if found is None else found
