"""Kernel IR to C++.

Three loop shapes, chosen by which axis is contiguous in memory:
    pointwise   for outer.. { for vector axis { load, compute, store } }
    rows        for outer.. { for each phase { for reduced axis, vectors along it { accumulate } combine
    lanes } }
    columns     for outer.. { for vectors of results { for reduced axis { accumulate in lanes } store } }
A phase is one pass over the reduced axes; a statement belongs to the first phase in which all it reads is
known.
Scans along the contiguous axis, and scatters that may collide along it, run as scalar loops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, Store, canonical
from dicp.vendor.cpu_graph.expression import (
    SCALAR,
    STORAGE,
    VECTOR,
    ExpressionWriter,
    Scope,
    index_text,
    literal,
)

PARALLEL_WORK = 1 << 15  # element operations below which starting threads costs more than it brings
COLUMN_UNROLL = 4  # vectors of results one core accumulates at a time: whole cache lines per row
MAX_SCRATCH = 8192  # elements of a row kept on the stack between phases
LONG_SUM = 1024  # additions per lane above which a float sum is taken in parts
INDENT = "  "


@dataclass(frozen=True)
class Shape:
    """The loop shape: its kind, the vectorised axis (None: scalar loops), the axes around and inside it."""

    kind: str
    vector: Axis | None
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]


def emit(kernel: Kernel, name: str, lanes: int) -> str:
    """One C++ function `name(buffers.., sizes.., [err])` for a kernel."""
    return _KernelWriter(canonical_with_notes(kernel), name, lanes).function()


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
    from dicp.schedule.kernels import _all_exprs

    return any(e.op in ex.CHECKS for s in kernel.body for e in _all_exprs(s))


def choose_shape(kernel: Kernel, lanes: int) -> Shape:
    """Vectorise along the axis that most accesses walk contiguously."""
    from dicp.schedule.kernels import _accesses, _all_exprs

    inner = tuple(a for a in kernel.axes if a.reduced or a.serial)
    outer = tuple(a for a in kernel.axes if not (a.reduced or a.serial))
    stores = [s.index for s in kernel.body if isinstance(s, Store)]
    loads = [e.args[1] for s in kernel.body for e in _all_exprs(s) if e.op == "load"]

    def votes(a: Axis) -> int:
        total = 0
        for i in _accesses(list(kernel.body)):
            split = ix.coefficient(i, a.var)
            total += (2 if i in stores else 1) * (split is not None and split[0] == 1)
        return total

    best = max(outer, key=lambda a: (votes(a), outer.index(a)), default=None)
    if not inner:
        rest = tuple(a for a in outer if a is not best)
        return Shape("pointwise", best, rest, ())
    last = inner[-1]
    scalar_rows = last.serial or any(isinstance(s, Scan) for s in kernel.body)
    extent = ix.product(a.size for a in inner)
    short = isinstance(extent, int) and extent < 2 * lanes
    row_votes = sum(1 for i in loads if (c := ix.coefficient(i, last.var)) is not None and c[0] == 1)
    column = (
        best is not None
        and votes(best) > 0
        and (row_votes == 0 or short or (votes(best) > row_votes and not scalar_rows) or last.serial)
    )
    if column and best is not None:
        return Shape("columns", best, tuple(a for a in outer if a is not best), inner)
    return Shape("rows", None if scalar_rows else last, outer, inner)


class _KernelWriter:
    def __init__(self, kernel: Kernel, name: str, lanes: int) -> None:
        self.kernel, self.name, self.lanes = kernel, name, lanes
        self.shape = choose_shape(kernel, lanes)
        self.vector_var = self.shape.vector.var if self.shape.vector is not None else None
        self.writer = ExpressionWriter({p.name: p.dtype for p in kernel.params}, self.vector_var)
        self.inner_vars = frozenset(a.var for a in self.shape.inner)
        self.scan_refs = {r for s in kernel.body if isinstance(s, Scan) for r in s.refs}
        self.phases = self._phase_of()
        self.scratch: list[str] = []
        self.written: set[int] = set()  # outer-level stores of a row kernel that stand already

    # -- the function --------------------------------------------------------------------------------------

    def function(self) -> str:
        body = {"pointwise": self._pointwise, "rows": self._rows, "columns": self._columns}[self.shape.kind]()
        head = [f"// {o}" for o in self.kernel.origins]
        axes = (
            ", ".join(f"{a.var} < {a.size}{' (reduced)' if a.reduced else ''}" for a in self.kernel.axes)
            or "once"
        )
        head.append(f"// {self.shape.kind}: {axes}")
        return "\n".join([*head, f"{signature(self.kernel, self.name)} {{", *_indent(body), "}"])

    def _phase_of(self) -> dict[int, int]:
        """Phase of each statement. A reduction's result is known one phase after it."""
        known: dict[str, int] = {}
        out: dict[int, int] = {}
        for k, s in enumerate(self.kernel.body):
            after = 0
            for e in ex.walk(s.value):
                if e.op == "ref":
                    after = max(after, known[e.args[0]])
            out[k] = after
            if isinstance(s, Reduce):
                known.update(dict.fromkeys(s.refs, after + 1))
            elif isinstance(s, Scan):
                known.update(dict.fromkeys(s.refs, after))
        last_load: dict[str, int] = {}
        for k, s in enumerate(self.kernel.body):
            for e in ex.walk(s.value):
                if e.op == "load":
                    last_load[e.args[0]] = max(last_load.get(e.args[0], 0), out[k])
        for k, s in enumerate(self.kernel.body):
            if (
                isinstance(s, Store) and s.buffer in last_load
            ):  # what later phases read must not change before
                out[k] = max(out[k], last_load[s.buffer] + (0 if self._is_full(s) else 1))
        return out

    def _is_full(self, s: Statement) -> bool:
        """Whether a statement runs at every point of the full space."""
        if not isinstance(s, Store):
            return True
        needs = self.writer.needs(s.value)
        where = (
            {a for a in ix.atoms(s.index) if isinstance(a, Var)} if isinstance(s.index, ix.Poly) else set()
        )
        opaque = {
            v for a in ix.atoms(s.index) if isinstance(a, ix.Opaque) for v in self.writer.needs(a.payload)
        }
        return bool((needs | where | opaque) & (self.inner_vars | self.scan_refs)) or s.mode != "set"

    # -- pointwise -----------------------------------------------------------------------------------------

    def _pointwise(self) -> list[str]:
        outer = Scope(provides=frozenset())
        inside = Scope(
            outer,
            lanes="lanes" if self.vector_var is not None else None,
            provides=frozenset({self.vector_var} if self.vector_var else ()),
        )
        split_inside = self._few(self.shape.outer)  # too few outer iterations: share out the vector loop too
        if split_inside:
            outer.provides = frozenset({"never"})
            inside.parent = None
        self._stores(list(self.kernel.body), inside)
        if self.shape.vector is None:
            return [*outer.lines, *inside.lines] if not split_inside else inside.lines
        if split_inside:
            loop = self._vector_loop_parallel(self.shape.vector, inside.lines)
            return self._around(self.shape.outer, loop, parallel=True, extra=1)
        loop = self._vector_loop(self.shape.vector, inside.lines)
        return self._around(self.shape.outer, [*outer.lines, *loop], parallel=True)

    def _stores(self, stores: list[Statement], scope: Scope) -> None:
        """All values first, then all stores: a store may overwrite what a later value loads."""
        pending: list[tuple[Store, str, str, str]] = []
        for s in stores:
            assert isinstance(s, Store)
            value = self.writer.write(s.value, scope)
            how, where = self.writer.place(s.buffer, s.index, scope, None)
            if how != "one" and not self.writer.is_vector(s.value):
                value = f"splat<{VECTOR[s.value.dtype]}>({value})"
            elif how == "one" and self.writer.is_vector(s.value):
                # an expanded result: every lane writes the same place
                value = f"last_lane({value}, {scope.lanes})"
            pending.append((s, how, where, value))
        for s, how, where, value in pending:
            note = f"  // {s.note}" if s.note and s.value.op in ("const", "load", "index", "ref") else ""
            scope.lines.append(self._store(s, how, where, value, scope) + note)

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

    # -- rows ----------------------------------------------------------------------------------------------

    def _rows(self) -> list[str]:
        outer = Scope()
        shared = self._kept_between_phases()
        last = max(self.phases.values(), default=0)
        for phase in range(last + 1):
            self._row_phase(phase, outer, shared)
        return self._around(self.shape.outer, [*self.scratch, *outer.lines], parallel=True)

    def _row_phase(self, phase: int, outer: Scope, shared: dict[int, list[Expr]]) -> None:
        mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
        full = [s for s in mine if self._is_full(s)]
        lanes = "lanes" if self.vector_var is not None else None
        provides = self.inner_vars | self.scan_refs
        if full:
            inside = Scope(outer, lanes=lanes, provides=frozenset(provides))
            for s in full:
                if isinstance(s, Reduce):
                    self._accumulate(s, inside, outer.lines)
                elif isinstance(s, Scan):
                    self._scan_step(s, inside, outer.lines)
            self._stores([s for s in full if isinstance(s, Store)], inside)
            self._keep(shared.get(phase, []), inside)
            outer.lines += self._inner_loops(inside.lines)
            for s in full:
                if isinstance(s, Reduce):
                    self._combine_lanes(s, outer)
        for k, s in enumerate(self.kernel.body):  # results that this phase completed
            if (
                isinstance(s, Store)
                and not self._is_full(s)
                and self.phases[k] <= phase + 1
                and k not in self.written
            ):
                self.written.add(k)
                self._stores([s], outer)

    def _inner_loops(self, lines: list[str]) -> list[str]:
        """The loops over the reduced (or serial) axes around one phase's body."""
        axes = list(self.shape.inner)
        if self.vector_var is not None and self.shape.kind == "rows":
            lines = self._vector_loop(axes.pop(), lines)
        for a in reversed(axes):
            lines = [_for(a), *_indent(lines), "}"]
        return lines

    def _kept_between_phases(self) -> dict[int, list[Expr]]:
        """Dear values needed in several phases, by the phase that computes them first: kept in a row on the
        stack."""
        inner = self.shape.inner
        if (
            self.vector_var is None
            or len(inner) != 1
            or not isinstance(inner[0].size, int)
            or inner[0].size > MAX_SCRATCH
        ):
            return {}
        first: dict[Expr, int] = {}
        again: dict[Expr, int] = {}
        for k, s in enumerate(self.kernel.body):
            if not self._is_full(s):
                continue
            for e in ex.walk(s.value):
                if e.op in ("const", "index", "ref") or not self.writer.needs(e) & self.inner_vars:
                    continue
                if e not in first:
                    first[e] = self.phases[k]
                elif first[e] != self.phases[k]:
                    again[e] = first[e]
        dear = {e: p for e, p in again.items() if self._dear(e)}
        covered = {c for e in dear for c in ex.walk(e) if c is not e and c in dear}
        out: dict[int, list[Expr]] = {}
        for e, p in dear.items():
            if e not in covered:
                out.setdefault(p, []).append(e)
        return out

    def _dear(self, e: Expr) -> bool:
        nodes = ex.walk(e)
        return e.dtype != torch.bool and (
            any(n.op in ex.EXPENSIVE for n in nodes) or sum(n.op == "load" for n in nodes) > 2
        )

    def _keep(self, values: list[Expr], scope: Scope) -> None:
        axis = self.shape.inner[0]
        for e in values:
            row = self.writer.fresh("row")
            name = self.writer.vector(e, scope)
            kind = SCALAR[e.dtype]
            self.scratch.append(f"alignas(64) {kind} {row}[{axis.size}];")
            scope.lines.append(f"store({row} + {axis.var.name}, {name}, lanes);")
            self.writer.replaced[e] = lambda s, row=row: f"load({row} + {axis.var.name}, lanes)"  # type: ignore[misc]

    # -- reductions ----------------------------------------------------------------------------------------

    def _accumulate(self, s: Reduce, scope: Scope, before: list[str], slot: str = "") -> None:
        """Declare the accumulator in `before` and add this point's value to it."""
        vectors = self.vector_var is not None
        kind = (VECTOR if vectors else SCALAR)[s.value.dtype]
        name = self._acc(s)
        value = self.writer.vector(s.value, scope) if vectors else self.writer.write(s.value, scope)
        rows = self.shape.kind == "rows"
        array = f"[{COLUMN_UNROLL}]" if slot else ""
        acc = name + slot

        def init(text: str) -> str:
            return f"splat<{kind}>({text})" if vectors else text

        if s.kind == "welford":
            self._accumulate_welford(s, value, kind, scope, before, acc, array, init)
            return
        if s.kind in ("argmax", "argmin"):
            self._accumulate_position(s, value, kind, scope, before, acc, array, init, rows)
            return
        start = _identity(s)
        if vectors and rows:
            value = f"blend(lanes, {value}, {literal(start, s.value.dtype)})"
        if s.kind == "sum" and s.value.dtype.is_floating_point and self._long():
            zero = init(literal(0.0, s.value.dtype))
            before.append(
                f"LongSum<{kind}> {name}{array}" + (f" = {{{zero}, {zero}, 0}};" if not array else ";")
            )
            if array:
                before.append(f"for (auto& a : {name}) a = {{{zero}, {zero}, 0}};")
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

    def _accumulate_welford(
        self, s: Reduce, value: str, kind: str, scope: Scope, before: list[str], acc: str, array: str, init
    ) -> None:  # type: ignore[no-untyped-def]
        """Floats: moments in double. Doubles: Welford's recurrence, one state a lane."""
        name, scalar = self._acc(s), SCALAR[s.value.dtype]
        rows = self.shape.kind == "rows" and self.vector_var is not None
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

    def _accumulate_position(
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
        vectors = self.vector_var is not None
        start = literal(_identity(s), s.value.dtype)
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

    def _combine_lanes(self, s: Reduce, outer: Scope) -> None:
        """Name the result of a row reduction: one scalar."""
        name, vectors = self._acc(s), self.vector_var is not None
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
            name = f"{name}.result()"
        word = {"sum": "hsum", "prod": "hprod", "max": "hmax", "min": "hmin", "any": "hany", "all": "hall"}[
            s.kind
        ]
        if s.value.dtype == torch.bool:
            word = {"sum": "hany", "prod": "hall", "max": "hany", "min": "hall"}.get(s.kind, word)
        self._result(s.refs[0], scalar, f"{word}({name})" if vectors else name, outer, s)

    def _result(self, ref: str, kind: str, text: str, scope: Scope, s: Reduce) -> None:
        scope.lines.append(f"const {kind} {ref} = {text};" + (f"  // {s.note}" if s.note else ""))
        self.writer.refs[ref] = (ref, False)

    def _acc(self, s: Reduce) -> str:
        return f"acc_{s.refs[0]}"

    def _long(self) -> bool:
        extent = ix.product(a.size for a in self.shape.inner)
        per_lane = (
            LONG_SUM * (self.lanes if self.shape.kind == "rows" and self.vector_var is not None else 1) // 4
        )
        return not isinstance(extent, int) or extent > per_lane

    def _scan_step(self, s: Scan, scope: Scope, before: list[str]) -> None:
        """One step of an inclusive scan; its refs are the running state."""
        vectors = self.vector_var is not None
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
        start = literal(_identity(s), dtype)
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
        scope.lines.append(f"const {kind} {s.refs[0]} = {f'cast<{kind}>({state})' if wide else state};")
        self.writer.refs[s.refs[0]] = (s.refs[0], vectors)

    def _scan_position(self, s: Scan, value: str, kind: str, scope: Scope, before: list[str], init) -> None:  # type: ignore[no-untyped-def]
        best, at = s.refs
        vectors = self.vector_var is not None
        index = "vi64" if vectors else "int64_t"
        here = self._linear_position()
        before.append(f"{kind} acc_{best} = {init(literal(_identity(s), s.value.dtype))};")
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

    # -- columns -------------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        assert self.shape.vector is not None
        axis = self.shape.vector
        reduces = [s for s in self.kernel.body if isinstance(s, Reduce)]
        simple = (
            reduces
            and max(self.phases.values()) <= 1
            and all(
                isinstance(s, (Reduce, Store)) and (isinstance(s, Reduce) or not self._is_full(s))
                for s in self.kernel.body
            )
        )
        wide = self.lanes * COLUMN_UNROLL
        if (
            simple
            and isinstance(axis.size, int)
            and axis.size % wide == 0
            and max(self.phases[k] for k, s in enumerate(self.kernel.body) if isinstance(s, Reduce)) == 0
        ):
            return self._wide_columns(axis, reduces)
        outer = Scope(lanes="lanes", provides=frozenset({axis.var}))
        for phase in range(max(self.phases.values(), default=0) + 1):
            self._column_phase(phase, outer)
        loop = self._vector_loop_parallel(axis, outer.lines)
        return self._around(self.shape.outer, loop, parallel=True, extra=1)

    def _column_phase(self, phase: int, outer: Scope) -> None:
        mine = [s for k, s in enumerate(self.kernel.body) if self.phases[k] == phase]
        full = [s for s in mine if self._is_full(s)]
        light = [s for s in mine if not self._is_full(s)]
        self._stores(light, outer)  # results of the phases before
        if not full:
            return
        inside = Scope(outer, lanes="lanes", provides=frozenset(self.inner_vars | self.scan_refs))
        for s in full:
            if isinstance(s, Reduce):
                self._accumulate(s, inside, outer.lines)
            elif isinstance(s, Scan):
                self._scan_step(s, inside, outer.lines)
        self._stores([s for s in full if isinstance(s, Store)], inside)
        outer.lines += self._inner_loops(inside.lines)
        for s in full:
            if isinstance(s, Reduce):
                self._column_result(s, outer, "")

    def _column_result(self, s: Reduce, scope: Scope, slot: str) -> None:
        acc = self._acc(s) + slot
        kind = VECTOR[s.value.dtype]
        if s.kind == "welford":
            parts = self._moments(s, acc, False)
        elif s.kind in ("argmax", "argmin"):
            kind, parts = "vi64", [f"{self._acc(s)}_at{slot}"]
        elif s.kind == "sum" and s.value.dtype.is_floating_point and self._long():
            parts = [f"{acc}.result()"]
        else:
            parts = [acc]
        for ref, text in zip(s.refs, parts, strict=True):
            scope.lines.append(f"const {kind} {ref} = {text};" + (f"  // {s.note}" if s.note else ""))
            self.writer.refs[ref] = (ref, True)

    def _wide_columns(self, axis: Axis, reduces: list[Reduce]) -> list[str]:
        """Several vectors of results at a time, so that each row gives up whole neighbouring cache lines."""
        before: list[str] = []
        inside = Scope(lanes="lanes", provides=frozenset({axis.var}) | self.inner_vars)
        for s in reduces:
            self._accumulate(s, inside, before, slot="[u]")
        step = [f"const int64_t {axis.var.name} = block + u * LANES;", *inside.lines]
        unrolled = [
            f"#pragma GCC unroll {COLUMN_UNROLL}",
            f"for (int u = 0; u < {COLUMN_UNROLL}; ++u) {{",
            *_indent(step),
            "}",
        ]
        loops = self._inner_loops(unrolled)
        after = Scope(lanes="lanes", provides=frozenset({axis.var}))
        for s in reduces:
            self._column_result(s, after, "[u]")
        self._stores([s for s in self.kernel.body if isinstance(s, Store)], after)
        finish = [
            f"for (int u = 0; u < {COLUMN_UNROLL}; ++u) {{",
            *_indent([f"const int64_t {axis.var.name} = block + u * LANES;", *after.lines]),
            "}",
        ]
        body = ["constexpr Full lanes;", *before, *loops, *finish]
        block = [
            f"for (int64_t block = 0; block < {axis.size}; block += {COLUMN_UNROLL} * LANES) {{",
            *_indent(body),
            "}",
        ]
        return self._around(self.shape.outer, block, parallel=True, extra=1)

    # -- loops ---------------------------------------------------------------------------------------------

    def _vector_loop(self, axis: Axis, lines: list[str]) -> list[str]:
        """Vectors along one axis: whole ones, then the tail."""
        v, n = axis.var.name, _size(axis.size)
        if isinstance(axis.size, int) and axis.size % self.lanes == 0:
            return [
                f"for (int64_t {v} = 0; {v} < {n}; {v} += LANES) {{",
                *_indent(["constexpr Full lanes;", *lines]),
                "}",
            ]
        if isinstance(axis.size, int) and axis.size < self.lanes:
            return [
                "{",
                *_indent([f"constexpr int64_t {v} = 0;", f"constexpr Lanes lanes{{{n}}};", *lines]),
                "}",
            ]
        step = self.writer.fresh("step")
        return [
            f"const auto {step} = [&](int64_t {v}, auto lanes) {{",
            *_indent(lines),
            "};",
            "{",
            INDENT + f"int64_t {v} = 0;",
            INDENT + f"for (; {v} + LANES <= {n}; {v} += LANES) {step}({v}, Full{{}});",
            INDENT + f"if ({v} < {n}) {step}({v}, lanes_left({n} - {v}));",
            "}",
        ]

    def _vector_loop_parallel(self, axis: Axis, lines: list[str]) -> list[str]:
        """The same as one plain loop, so that threads can share it."""
        v, n = axis.var.name, _size(axis.size)
        head = f"for (int64_t {v} = 0; {v} < {n}; {v} += LANES) {{"
        if isinstance(axis.size, int) and axis.size % self.lanes == 0:
            return [head, *_indent(["constexpr Full lanes;", *lines]), "}"]
        step = self.writer.fresh("step")
        return [
            head,
            *_indent(
                [
                    f"const auto {step} = [&](auto lanes) {{",
                    *_indent(lines),
                    "};",
                    f"if ({v} + LANES <= {n}) {step}(Full{{}});",
                    f"else {step}(lanes_left({n} - {v}));",
                ]
            ),
            "}",
        ]

    def _few(self, axes: tuple[Axis, ...]) -> bool:
        count = ix.product(a.size for a in axes)
        return isinstance(count, int) and count < 2 * torch.get_num_threads()

    def _around(self, axes: tuple[Axis, ...], lines: list[str], parallel: bool, extra: int = 0) -> list[str]:
        """The outer loops, shared between threads when the work is worth it. `extra` loops of `lines` join
        them."""
        for a in reversed(axes):
            lines = [_for(a), *_indent(lines), "}"]
        loops = len(axes) + extra
        if not loops or not parallel:
            return lines
        work = ix.product(a.size for a in self.kernel.axes)
        weight = max(1, sum(ex.cost(s.value) for s in self.kernel.body) // 4)
        if isinstance(work, int):
            if work * weight < PARALLEL_WORK:
                return lines
            condition = ""
        else:
            condition = f" if (({index_text(work, lambda a: a.name)}) * {weight} >= {PARALLEL_WORK})"  # type: ignore[attr-defined]
        collapse = f" collapse({loops})" if loops > 1 else ""
        return [f"#pragma omp parallel for{collapse} schedule(static){condition}", *lines]


def _identity(s: Reduce | Scan) -> bool | int | float:
    """What leaves a reduction unchanged."""
    kind = s.kind.removeprefix("arg")
    dtype = s.value.dtype
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if kind == "logsumexp":
        return float("-inf")
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if kind == "max" else info.max


def _size(n: Index) -> str:
    text = index_text(n, lambda a: a.key)
    return text if text.isalnum() else f"({text})"


def _for(a: Axis) -> str:
    v = a.var.name
    return f"for (int64_t {v} = 0; {v} < {_size(a.size)}; ++{v}) {{"


def _indent(lines: list[str]) -> list[str]:
    return [INDENT + line if not line.startswith("#") else line for line in lines]
