"""At which points a kernel's statements run, and in which pass over its reduced axes: a phase."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from dicp.ir.dependence import Dependence
from dicp.ir.kernel import Kernel, Reduce, Statement, Store, expressions


def is_full(s: Statement, inner: Set[Any], dependence: Dependence) -> bool:
    """Whether a statement runs at every point of the full space, not once per outer point. inner: the inner
    axes' variables and the names of scans' results."""
    if not isinstance(s, Store):
        return True
    needs = dependence.of(s.value) | dependence.of_index(s.index)
    return s.mode != "set" or not needs.isdisjoint(inner)


def phases(
    kernel: Kernel,
    full: Callable[[Statement], bool],
    beside: Callable[[Reduce], Set[str]] = lambda s: frozenset(),
) -> list[int]:
    """The phase of each statement: the first in which all that it reads is known. A reduction's result is
    known one phase later, save by reductions that find it `beside` their own. A store runs no sooner than the
    last phase that loads what it overwrites, and after it where it runs once per outer point."""
    known: dict[str, int] = {}
    out: list[int] = []
    last_load: dict[str, int] = {}
    for s in kernel.body:
        reads = {e.args[0] for e in expressions(s) if e.op == "ref"}
        reads -= beside(s) if isinstance(s, Reduce) else frozenset()
        phase = max((known[r] for r in reads), default=0)
        out.append(phase)
        if not isinstance(s, Store):
            known |= dict.fromkeys(s.refs, phase + 1 if isinstance(s, Reduce) else phase)
        for e in expressions(s):
            if e.op == "load":
                last_load[e.args[0]] = max(last_load.get(e.args[0], 0), phase)
    for k, s in enumerate(kernel.body):
        if isinstance(s, Store) and s.buffer in last_load:
            out[k] = max(out[k], last_load[s.buffer] + (0 if full(s) else 1))
    return out
