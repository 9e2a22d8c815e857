"""Reductions and scans in C++: accumulators, the step at each point, and how a result comes out of them."""

from __future__ import annotations

import torch

from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.kernel import Reduce, Scan, identity
from dicp.vendor.cpu_graph.expression import (
    SCALAR,
    VECTOR,
    ExpressionWriter,
    Scope,
    index_text,
    literal,
    wrapped,
)
from dicp.vendor.cpu_graph.idioms import EXPENSIVE
from dicp.vendor.cpu_graph.loops import Shape

COLUMN_FLOATS = (64, 32)  # columns of results one core accumulates at a time: whole cache lines per row
ROW_UNROLL = 4  # vectors of a row reduced apart: an addition, or a comparison, waits for the one before it
LONG_SUM = 32  # additions per lane above which a float sum is taken in parts: equal terms err all one way


class Accumulators:
    """Writes the statements of a kernel's reductions and scans into the scopes it is given."""

    def __init__(self, shape: Shape, writer: ExpressionWriter, lanes: int) -> None:
        self.shape, self.writer, self.lanes = shape, writer, lanes
        self.vectors = shape.vector is not None
        self.at_once = 1  # vectors of columns

    def add(self, s: Reduce, scope: Scope, before: list[str], slot: str = "") -> None:
        """Declare the accumulator in `before` and add this point's value to it."""
        vectors = self.vectors
        kind = (VECTOR if vectors else SCALAR)[s.value.dtype]
        name = self._acc(s)
        value = self.writer.vector(s.value, scope) if vectors else self.writer.write(s.value, scope)
        rows = self.shape.kind == "rows"
        array = f"[{ROW_UNROLL if rows else self.at_once}]" if slot else ""
        acc = name + slot

        def init(text: str) -> str:
            return f"splat<{kind}>({text})" if vectors else text

        if s.kind == "welford":
            self._add_welford(s, value, kind, scope, before, acc, array, init)
            return
        if s.kind in ("argmax", "argmin"):
            self._add_position(s, value, kind, scope, before, acc, array, init, rows)
            return
        start = identity(s.kind, s.value.dtype)
        if vectors and rows:
            value = f"blend(lanes, {value}, {literal(start, s.value.dtype)})"
        if s.kind == "sum" and s.value.dtype.is_floating_point and self._long():
            self._declare(before, f"LongSum<{kind}>", name, array, "{}")
            scope.lines.append(f"{acc}.add({value});")
            return
        self._declare(before, kind, name, array, init(literal(start, s.value.dtype)))
        step = {
            "sum": f"{acc} + {value}",
            "prod": f"{acc} * {value}",
            "max": f"maximum({acc}, {value})",
            "min": f"minimum({acc}, {value})",
            "any": f"lor({acc}, {value})",
            "all": f"land({acc}, {value})",
        }[s.kind]
        if s.value.dtype == torch.bool:
            step = {
                "sum": f"lor({acc}, {value})",
                "prod": f"land({acc}, {value})",
                "max": f"lor({acc}, {value})",
                "min": f"land({acc}, {value})",
            }.get(s.kind, step)
        scope.lines.append(f"{acc} = {step};" + (f"  // {s.note}" if s.note else ""))

    def _declare(self, before: list[str], kind: str, name: str, array: str, start: str) -> None:
        if array:
            before.append(f"{kind} {name}{array};")
            before.append(f"for (auto& a : {name}) a = {start};")
        else:
            before.append(f"{kind} {name} = {start};")

    def _add_welford(
        self, s: Reduce, value: str, kind: str, scope: Scope, before: list[str], acc: str, array: str, init
    ) -> None:  # type: ignore[no-untyped-def]
        """Floats: moments in double. Doubles: Welford's recurrence, one state a lane."""
        name, scalar = self._acc(s), SCALAR[s.value.dtype]
        rows = self.shape.kind == "rows" and self.vectors
        if s.value.dtype == torch.float32:
            before.append(f"Moments<{kind}> {name}{array};")
            scope.lines.append(f"{acc}.add({f'blend(lanes, {value}, 0.0f)' if rows else value});")
            return
        if rows:
            before.append(f"RowWelford<{kind}> {name};")
            scope.lines.append(f"{acc}.add({value}, lanes);")
            return
        zero = init(literal(0.0, s.value.dtype))
        if array:
            before.append(f"Welford<{kind}> {name}{array};")
            before.append(f"for (auto& a : {name}) a = {{{zero}, {zero}}};")
        else:
            before.append(f"Welford<{kind}> {name} = {{{zero}, {zero}}};")
        key = (Expr("count", (), torch.int64), None)
        count = scope.find(key)
        if count is None:
            count = scope.names[key] = self.writer.fresh("w")
            scope.lines.append(
                f"const {scalar} {count} = {scalar}(1) / {scalar}({self._linear_position()} + 1);"
            )
        scope.lines.append(f"{acc}.add({value}, {count});")

    def _moments(self, s: Reduce, acc: str, row: bool) -> list[str]:
        """(mean, m2) of an accumulator."""
        if s.value.dtype == torch.float32:
            n = index_text(ix.product(a.size for a in self.shape.inner), lambda a: a.key)
            prefix = "row_" if row else ""
            return [f"{acc}.{prefix}mean(double({n}))", f"{acc}.{prefix}m2(double({n}))"]
        return [f"{acc}.mean()", f"{acc}.m2()"] if row else [f"{acc}.mean", f"{acc}.m2"]

    def _add_position(
        self,
        s: Reduce,
        value: str,
        kind: str,
        scope: Scope,
        before: list[str],
        acc: str,
        array: str,
        init,
        rows: bool,
    ) -> None:  # type: ignore[no-untyped-def]
        name, better = self._acc(s), f"better_{s.kind[3:]}"
        vectors = self.vectors
        start = literal(identity(s.kind, s.value.dtype), s.value.dtype)
        index = "vi64" if vectors else "int64_t"
        self._declare(before, kind, name, array, init(start))
        self._declare(
            before,
            index,
            f"{name}_at",
            array,
            "iota(0)" if vectors and rows else "splat<vi64>(0)" if vectors else "0",
        )
        at = acc.replace(name, f"{name}_at")
        position = self._linear_position()
        if vectors and rows:
            value = f"blend(lanes, {value}, {start})"
            here = f"iota({position})"
        else:
            here = f"splat<vi64>({position})" if vectors else position
        flag = self.writer.fresh("better")
        scope.lines.append(f"const auto {flag} = {better}({value}, {acc});")
        scope.lines.append(f"{at} = where({flag}, {here}, {at});")
        scope.lines.append(f"{acc} = where({flag}, {value}, {acc});")

    def _linear_position(self) -> str:
        """Row-major position in the reduced axes (of lane 0)."""
        axes = self.shape.inner
        position = ix.linearize([ix.of(a.var) for a in axes], [a.size for a in axes])
        return index_text(position, lambda a: a.key)

    def runs_apart(self, s: Reduce) -> bool:
        """Whether parts of a row are worth reducing apart: of a long one that little is computed for."""
        waits = s.kind in ("sum", "max", "min") and s.value.dtype.is_floating_point and self._long()
        return waits and not any(e.op in EXPENSIVE for e in s.expressions)

    def row_result(self, s: Reduce, outer: Scope, apart: bool = False) -> None:
        """Name the result of a row reduction: one scalar. apart: of ROW_UNROLL accumulators."""
        name, vectors = self._acc(s), self.vectors
        scalar = SCALAR[s.value.dtype]
        if s.kind == "welford":
            for ref, text in zip(s.refs, self._moments(s, name, vectors), strict=True):
                self._result(ref, scalar, text, outer, s)
            return
        if s.kind in ("argmax", "argmin"):
            self._result(
                s.refs[0], "int64_t", f"h{s.kind}({name}, {name}_at)" if vectors else f"{name}_at", outer, s
            )
            return
        if s.kind == "sum" and s.value.dtype.is_floating_point and self._long():
            name = f"together({name})" if apart else f"{name}.result()"
        elif apart:
            name = f"{'largest' if s.kind == 'max' else 'smallest'}({name})"
        word = {"sum": "hsum", "prod": "hprod", "max": "hmax", "min": "hmin", "any": "hany", "all": "hall"}[
            s.kind
        ]
        if s.value.dtype == torch.bool:
            word = {"sum": "hany", "prod": "hall", "max": "hany", "min": "hall"}.get(s.kind, word)
        self._result(s.refs[0], scalar, self._whole(s, f"{word}({name})" if vectors else name), outer, s)

    def _result(self, ref: str, kind: str, text: str, scope: Scope, s: Reduce) -> None:
        scope.lines.append(f"const {kind} {ref} = {text};" + (f"  // {s.note}" if s.note else ""))
        self.writer.refs[ref] = (ref, False)

    def _whole(self, s: Reduce | Scan, total: str) -> str:
        """A total, of a narrow integer dtype, as that dtype holds it: it is accumulated without."""
        return wrapped(total, s.value.dtype) if s.kind in ("sum", "prod") else total

    def _acc(self, s: Reduce) -> str:
        return f"acc_{s.refs[0]}"

    def _long(self) -> bool:
        extent = ix.product(a.size for a in self.shape.inner)
        lanes = self.lanes if self.shape.kind == "rows" and self.vectors else 1
        return not isinstance(extent, int) or extent > LONG_SUM * lanes

    def scan(self, s: Scan, scope: Scope, before: list[str]) -> None:
        """One step of an inclusive scan; its refs are the running state."""
        vectors = self.vectors
        kind = (VECTOR if vectors else SCALAR)[s.value.dtype]
        value = self.writer.vector(s.value, scope) if vectors else self.writer.write(s.value, scope)

        def init(text: str) -> str:
            return f"splat<{kind}>({text})" if vectors else text

        state = f"acc_{s.refs[0]}"
        if s.kind.startswith("arg"):
            self._scan_position(s, value, kind, scope, before, init)
            return
        # eager's running sums and products of float32 are float64: rounding at each step would add up
        wide = s.kind in ("sum", "prod") and s.value.dtype == torch.float32
        dtype = torch.float64 if wide else s.value.dtype
        own = (VECTOR if vectors else SCALAR)[dtype]
        start = literal(identity(s.kind, s.value.dtype), dtype)
        before.append(f"{own} {state} = {f'splat<{own}>({start})' if vectors else start};")
        operand = f"cast<{own}>({value})" if wide else value
        step = {
            "sum": f"{state} + {operand}",
            "prod": f"{state} * {operand}",
            "max": f"maximum({state}, {operand})",
            "min": f"minimum({state}, {operand})",
            "logsumexp": f"log_add_exp({state}, {operand})",
        }[s.kind]
        scope.lines.append(f"{state} = {step};" + (f"  // {s.note}" if s.note else ""))
        total = f"cast<{kind}>({state})" if wide else self._whole(s, state)
        scope.lines.append(f"const {kind} {s.refs[0]} = {total};")
        self.writer.refs[s.refs[0]] = (s.refs[0], vectors)

    def _scan_position(self, s: Scan, value: str, kind: str, scope: Scope, before: list[str], init) -> None:  # type: ignore[no-untyped-def]
        best, at = s.refs
        vectors = self.vectors
        index = "vi64" if vectors else "int64_t"
        here = self._linear_position()
        before.append(f"{kind} acc_{best} = {init(literal(identity(s.kind, s.value.dtype), s.value.dtype))};")
        before.append(f"{index} acc_{at} = {'splat<vi64>(0)' if vectors else '0'};")
        flag = self.writer.fresh("better")
        word = "ge" if s.kind == "argmax" else "le"
        scope.lines.append(f"const auto {flag} = lor({word}({value}, acc_{best}), ne({value}, {value}));")
        scope.lines.append(
            f"acc_{at} = where({flag}, {f'splat<vi64>({here})' if vectors else here}, acc_{at});"
        )
        scope.lines.append(f"acc_{best} = where({flag}, {value}, acc_{best});")
        scope.lines.append(f"const {kind} {best} = acc_{best};")
        scope.lines.append(f"const {index} {at} = acc_{at};")
        self.writer.refs[best], self.writer.refs[at] = (best, vectors), (at, vectors)

    def column_result(
        self, s: Reduce, scope: Scope, slot: str = "", before: list[str] | None = None
    ) -> None:
        """Name the result of a column reduction: one vector, or (slot) one of several, declared `before`."""
        acc = self._acc(s) + slot
        kind = VECTOR[s.value.dtype]
        if s.kind == "welford":
            parts = self._moments(s, acc, False)
        elif s.kind in ("argmax", "argmin"):
            kind, parts = "vi64", [f"{self._acc(s)}_at{slot}"]
        elif s.kind == "sum" and s.value.dtype.is_floating_point and self._long():
            parts = [f"{acc}.result()"]
        else:
            parts = [self._whole(s, acc)]
        for ref, text in zip(s.refs, parts, strict=True):
            note = f"  // {s.note}" if s.note else ""
            if before is not None:
                before.append(f"{kind} {ref}[{self.at_once}];")
            scope.lines.append(f"{f'{ref}{slot}' if slot else f'const {kind} {ref}'} = {text};{note}")
            self.writer.refs[ref] = (ref + slot, True)
