"""What the values of a kernel depend on: where a writer of its code may put them."""

from __future__ import annotations

from typing import Any

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index


class Dependence:
    """Answers about expressions, each found once."""

    def __init__(self) -> None:
        self._needs: dict[Expr, frozenset[Any]] = {}
        self._reads: dict[Expr, bool] = {}

    def of(self, x: Expr) -> frozenset[Any]:
        """The loop variables and size symbols in x, and the names of what it refers to."""
        for e in () if x in self._needs else ex.walk(x):
            own = frozenset(ex.own_variables(e)) | (frozenset([e.args[0]]) if e.op == "ref" else frozenset())
            self._needs[e] = own.union(*(self._needs[c] for c in ex.children(e)))
        return self._needs[x]

    def of_index(self, i: Index) -> frozenset[Any]:
        """The same of an index, which may be read from memory."""
        out: frozenset[Any] = frozenset()
        for a in ix.atoms(i):
            out |= self.of(a.payload) if isinstance(a, ix.Opaque) else frozenset([a])
        return out

    def reads_memory(self, x: Expr) -> bool:
        """Whether x loads, or may fail: what a mask is about."""
        for e in () if x in self._reads else ex.walk(x):
            self._reads[e] = e.op in ("load", *ex.CHECKS) or any(self._reads[c] for c in ex.children(e))
        return self._reads[x]
