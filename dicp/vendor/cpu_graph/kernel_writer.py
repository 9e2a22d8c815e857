"""What the writers of all loop shapes share: a kernel made ready, its stores, and its inner loops."""

from __future__ import annotations

import torch

from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.kernel import Kernel, Scan, Statement, Store
from dicp.ir.phases import is_full, phases
from dicp.vendor.cpu_graph.accumulate import ROW_UNROLL, Accumulators
from dicp.vendor.cpu_graph.expression import STORAGE, VECTOR, ExpressionWriter, Mask, Scope
from dicp.vendor.cpu_graph.interleaving import are_pairs
from dicp.vendor.cpu_graph.loops import Shape, nested, unrolled_vector_loop, vector_loop
from dicp.vendor.cpu_graph.narrow import narrowed

Pending = tuple[Store, str, str, str]
"""A store, how it reaches its place and where that is (`ExpressionWriter.place`), and the value's name."""


class KernelWriter:
    """Writes a kernel's statements as C++. A subclass for each loop shape writes the loops around them."""

    def __init__(self, kernel: Kernel, shape: Shape, lanes: int) -> None:
        self.wide, self.shape, self.lanes = kernel, shape, lanes  # wide: with positions of 64 bits
        self.vector_var = self.shape.vector.var if self.shape.vector is not None else None
        self.kernel = narrowed(kernel, self.vector_var)
        self.writer = ExpressionWriter({p.name: p.dtype for p in kernel.params}, self.vector_var, lanes)
        self.inner_vars = frozenset(a.var for a in self.shape.inner)
        self.scan_refs = frozenset(r for s in kernel.body if isinstance(s, Scan) for r in s.refs)
        self.accumulators = Accumulators(self.shape, self.writer, lanes)
        self.phases = phases(self.kernel, self.is_full)
        self.kept: dict[int, str] = {}  # where transposed stores, by their ids, go on the stack

    def lines(self) -> list[str]:
        """The function's body."""
        raise NotImplementedError

    def is_full(self, s: Statement) -> bool:
        return is_full(s, self.inner_vars | self.scan_refs, self.writer.dependence)

    def stores(self, stores: list[Statement], scope: Scope) -> None:
        """All values first, then all stores: a store may overwrite what a later value loads."""
        pending: list[Pending] = []
        for s in stores:
            assert isinstance(s, Store)
            how, where = self.writer.place(s.buffer, s.index, scope, None)
            copied = self._copied(s, scope) if how == "" else None
            value = copied or self.writer.write(s.value, scope)
            if copied is None and how != "one" and not self.writer.is_vector(s.value):
                value = f"splat<{VECTOR[s.value.dtype]}>({value})"
            elif how == "one" and self.writer.is_vector(s.value):
                # an expanded result: every lane writes the same place
                value = f"last_lane({value}, {scope.lanes})"
            pending.append((s, how, where, value))
        for s, how, where, value in self._without_pairs(pending, scope):
            note = f"  // {s.note}" if s.note and s.value.op in ("const", "load", "index", "ref") else ""
            if id(s) in self.kept:
                scope.lines.append(f"store({self.kept[id(s)]}, {value}, {scope.lanes});{note}")
                continue
            there = [f"{self.writer.index(n, scope)} > 0" for n in ix.may_be_empty(s.index)]
            held = f"if ({' && '.join(there)}) " if there else ""
            scope.lines.append(held + self._store(s, how, where, value, scope) + note)

    def _without_pairs(self, pending: list[Pending], scope: Scope) -> list[Pending]:
        """Writes the stores that fill a buffer in turn; the others."""
        left: list[Pending] = []
        for s, how, where, value in pending:
            first = next((p for p in left if how == "_strided" and self._are_pairs(p[0], s)), None)
            if first is None:
                left.append((s, how, where, value))
                continue
            left.remove(first)
            there = self.writer.first(s.buffer, first[0].index, scope)
            scope.lines.append(f"store_pairs({there}, {first[3]}, {value}, {scope.lanes});")
        return left

    def _are_pairs(self, first: Store, second: Store) -> bool:
        kept = id(first) in self.kept or id(second) in self.kept
        return not kept and are_pairs(first, second, self.writer.vector_var, self.lanes)

    def _copied(self, s: Store, scope: Scope) -> str | None:
        """The bits of what is stored as it was loaded, in a narrow dtype: they need no conversion."""
        dtype = self.writer.params[s.buffer]
        if s.mode != "set" or id(s) in self.kept or dtype.itemsize >= 4:
            return None
        if s.value.op == "const" or not self._is_copy(s.value, dtype):
            return None
        return self._bits(s.value, dtype, scope)

    def _is_copy(self, value: Expr, dtype: torch.dtype) -> bool:
        """Whether a value is zero, an element that is loaded, or one or another of these for all lanes."""
        if value in self.writer.replaced:
            return False
        if value.op == "masked":
            cond, *either = value.args
            return not self.writer.is_vector(cond) and all(self._is_copy(e, dtype) for e in either)
        if value.op == "load":
            return self.writer.params[value.args[0]] == dtype and self.writer.is_contiguous(value.args[1])
        return value.op == "const" and repr(value.args[0]) in ("0", "0.0", "False")  # -0.0 is a bit

    def _bits(self, value: Expr, dtype: torch.dtype, scope: Scope, mask: Mask | None = None) -> str:
        if value.op == "const":
            return f"Bits<{STORAGE[dtype]}>{{}}"
        name = self.writer.fresh("bits")
        if value.op == "load":
            where = self.writer.place(value.args[0], value.args[1], scope, mask)[1]
            held = f", {mask.name}" if mask else ""
            scope.lines.append(f"const auto {name} = load_bits({where}, {scope.lanes}{held});")
            return name
        cond = self.writer.write(value.args[0], scope, mask)
        inner = self._bits(value.args[1], dtype, scope, self.writer.both(mask, Mask(cond, False), scope))
        other = self._bits(value.args[2], dtype, scope, mask)
        scope.lines.append(f"const auto {name} = {cond} ? {inner} : {other};")
        return name

    def _store(self, s: Store, how: str, where: str, value: str, scope: Scope) -> str:
        if s.mode != "set":
            return self._update(s, how, where, value, scope)
        if how == "one":
            return f"store({where}, {value}, One{{}});"
        if how == "indexed":
            return f"scatter({where}, {value}, {scope.lanes});"
        return f"store{how}({where}, {value}, {scope.lanes});"

    def _update(self, s: Store, how: str, where: str, value: str, scope: Scope) -> str:
        word = {
            "add": "{0} + {1}",
            "mul": "{0} * {1}",
            "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }[s.mode]
        if s.value.dtype == torch.bool:
            word = {
                "add": "lor({0}, {1})",
                "mul": "land({0}, {1})",
                "max": "lor({0}, {1})",
                "min": "land({0}, {1})",
            }[s.mode]
        lanes = "One{}" if how == "one" else scope.lanes
        if how == "indexed":
            if s.mode == "add":
                return f"scatter_add({where}, {value}, {lanes});"
            return f"scatter({where}, {word.format(f'gather({where}, {lanes})', value)}, {lanes});"
        return (
            f"store{'' if how == 'one' else how}({where}, "
            f"{word.format(f'''load{'' if how == 'one' else how}({where}, {lanes})''', value)}, {lanes});"
        )

    def inner_loops(self, lines: list[str], apart: bool = False) -> list[str]:
        """The loops over the reduced (or serial) axes around one phase's body."""
        axes = list(self.shape.inner)
        if apart:
            lines = unrolled_vector_loop(axes.pop(), lines, ROW_UNROLL, self.writer.fresh)
        elif self.vector_var is not None and self.shape.kind == "rows":
            lines = vector_loop(axes.pop(), lines, self.lanes, self.writer.fresh)
        return nested(tuple(axes), lines)
