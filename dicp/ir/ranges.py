"""Conditions on loop variables as ranges, within which other conditions are decided.

    i0 < 8:  assuming(where(i0 < 2, a, b), i0 < 1)       ->  a
             assuming(where(i0 < 2, a, b), i0 >= 2)      ->  b
"""

from __future__ import annotations

from collections.abc import Iterator

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var


def change(cond: Expr, var: Var) -> tuple[int, bool] | None:
    """Where along var an `lt` or `ge` of positions changes, maybe out of its range, and whether it holds
    before that rather than from there on; None where something else has a part in it."""
    left, right = map(ex.as_index, cond.args)
    split = ix.coefficient(left - right, var) if left is not None and right is not None else None
    step, start = split or (0, 0)  # step * var + start < 0
    if not isinstance(step, int) or not isinstance(start, int) or step == 0:
        return None
    at = -(start // step) if step > 0 else start // -step + 1
    return at, (cond.op == "lt") == (step > 0)


def assuming(x: Expr, cond: Expr) -> Expr:
    """x where cond holds: without the conditions that are decided there. What is read elsewhere has to keep
    its own, which guard it."""
    moved: dict[ix.Atom, Index] = {}
    for var, (first, end) in _ranges(cond).items():
        if first < end:
            moved[var] = ix.of(Var(var.name, end - first)) + first
    if not moved:
        return x

    def decided(e: Expr) -> Expr | None:
        if e.op not in ("lt", "ge"):
            return None
        left, right = map(ex.as_index, e.args)
        if left is None or right is None:
            return None
        decide = ex.less if e.op == "lt" else ex.at_least
        found = decide(ix.substitute(left, moved), ix.substitute(right, moved))
        return found if found.op == "const" else None

    return ex.rewrite((x,), decided)[0]


def _ranges(cond: Expr) -> dict[Var, tuple[int, int]]:
    """The ranges of loop variables outside which cond does not hold."""
    known: dict[Var, tuple[int, int]] = {}
    for e in _all_of(cond):
        for var in ex.variables(e) if e.op in ("lt", "ge") else ():
            found = change(e, var)
            if found is None or not isinstance(var.size, int):
                continue
            at, before = found
            first, end = known.get(var, (0, var.size))
            known[var] = (first, min(end, at)) if before else (max(first, at), end)
    return known


def _all_of(cond: Expr) -> Iterator[Expr]:
    if cond.op == "land":
        for e in cond.args:
            yield from _all_of(e)
    else:
        yield cond
