"""Symbolic sizes in the Python function of a program: which of them it has bound, and from what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from dicp.errors import InternalError
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.runtime.host_numbers import host_size
from dicp.runtime.program import Program, Segment
from dicp.schedule.defs import Buffer, Host, View, views
from dicp.schedule.kernels import Launch


def spelled(i: Index) -> str:
    """An index as an expression of Python."""
    return repr(i) if isinstance(i, ix.Poly) else str(i)


class Sizes:
    """Adds the statements that bind sizes to the lines of a function.

    checked: inputs whose layout the function compares with the planned one.
    namespace: the globals of the function."""

    def __init__(
        self, program: Program, checked: Sequence[Buffer], lines: list[str], namespace: dict[str, Any]
    ) -> None:
        self._program, self._checked, self._lines, self._namespace = program, checked, lines, namespace
        self._symbols = program.lowered.symbols
        self.bound: set[str] = set()

    @functools.cached_property
    def needed(self) -> set[str]:
        """Names of those that native code takes, or the function reads itself."""
        return {v.name for v in (*self._program.sizes, *self._read())}

    def arguments(self, segment: Segment) -> list[str]:
        """What native code takes: sizes that are known later are 0 in a segment that has no use for them."""
        used = {v.name: i for i in segment.items if isinstance(i, Launch) for v in i.kernel.sizes}
        unknown = sorted(used.keys() - self.bound)
        if unknown:
            reader = used[unknown[0]].kernel.name
            raise InternalError(f"the size {unknown[0]} is not known where {reader} needs it")
        return [v.name if v.name in self.bound else "0" for v in self._program.sizes]

    def offer(self, n: Index, source: str) -> None:
        """Bind a size that is a symbol to what `source` says, if it is needed."""
        if _is_symbol(n) and _name(n) in self.needed:
            self.bind(n, source)

    def bind(self, n: Index, source: str) -> None:
        """The same, needed or not. Those that are computed from others are bound by `compute`."""
        if not _is_symbol(n) or _name(n) in self.bound or not _name(n).isidentifier():
            return
        atom = n.terms[0][0][0]  # type: ignore[union-attr]
        if isinstance(atom, Var) and atom not in self._symbols.host.values():
            self.bound.add(atom.name)
            self._lines.append(f"{atom.name} = {source}")

    def solve(self, given: Sequence[tuple[Index, str]]) -> None:
        """Bind sizes that the inputs have in sums alone: of u + 6, where it is n, u is n - 6."""
        found = True
        while found:
            found = False
            for n, source in given:
                unknown = [a for a in ix.atoms(n) if isinstance(a, Var) and a.name not in self.bound]
                if len(unknown) != 1 or (split := ix.coefficient(n, unknown[0])) is None:
                    continue
                (factor, rest), before = split, len(self.bound)
                if isinstance(factor, int):
                    difference = f"({source} - ({spelled(rest)}))"
                    whole = difference if factor == 1 else f"{difference} // {factor}"
                    self.offer(ix.of(unknown[0]), whole)
                found = found or len(self.bound) > before

    def compute(self) -> None:
        """Bind sizes that are not polynomials, and can be computed from those bound so far."""
        for expr, var in self._symbols.host.items():
            known = all(str(s) in self.bound for s in expr.free_symbols)
            if known and var.name in self.needed and var.name not in self.bound:
                text = host_size(expr, self._namespace, f"size_{var.name}")
                self._lines.append(f"{var.name} = {text}")
                self.bound.add(var.name)

    def _read(self) -> list[Var]:
        """What the function reads itself, and what sizes are made of that it computes."""
        program, plan, found = self._program, self._program.plan, dict[str, Var]()
        stack: list[Any] = [
            program.lowered.outputs,
            [plan.size, *plan.maxima.values()],
            [(c.args, c.kwargs, views((c.args, c.kwargs))) for c in program.python_calls],
            [(b.shape, b.strides) for b in self._checked],
        ]
        while stack:
            x = stack.pop()
            if isinstance(x, (list, tuple)):
                stack += list(x)
            elif isinstance(x, dict):
                stack += list(x.values())
            elif isinstance(x, View):
                stack += [*x.shape, *x.strides, x.offset]
            elif isinstance(x, ix.Poly):
                found.update({a.name: a for a in ix.atoms(x) if isinstance(a, Var)})
            elif isinstance(x, Host):
                found.update({str(s): self._symbols.symbol(s) for s in x.expr.free_symbols})
        of_others: dict[str, Var] = {}
        for v in [*found.values(), *program.sizes]:
            e = self._symbols.expressions.get(v)
            symbols = e.free_symbols if e is not None else ()
            of_others.update({str(s): self._symbols.symbol(s) for s in symbols})
        return [*found.values(), *of_others.values()]


def _is_symbol(n: Index) -> bool:
    return isinstance(n, ix.Poly) and n.is_atom


def _name(n: Index) -> str:
    return n.terms[0][0][0].key  # type: ignore[union-attr]


__all__ = ["Sizes", "spelled"]
