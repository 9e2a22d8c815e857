"""Combinations of operations for which a GPU has a shorter way than one after the other.

    exp(x - m), m the maximum of a row       exp_below(x, m)      3 instructions of sm_90, for 9
    e / s, s the sum of such a row           share(e, s)          3 for 14
    1 + erf(x)                               one_plus_erf(x)      18 for 29
    1 + tanh(x)                              one_plus_tanh(x)     5

A kernel that moves two bytes in and two out for an element has time for some 28 instructions on an H200, for
14 if it writes nothing. They are off by a few parts in ten million, far from the maximum or far below 0 in a
million: more than twice as much as functions of float32. So they serve where what is kept of an element is
rounded to bfloat16 or float16, or what is read was where nothing is; elsewhere there is no time to win. No
case is lost: the difference x - m is formed as it is, a sum of a softmax is 1 or more, and 1 + erf(x) does
not cancel where x is far below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.kernel import Kernel, Reduce, Statement, Store, expressions, rewrite_body

PLUS_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}


def shortened(kernel: Kernel) -> Kernel:
    """The kernel with these combinations in it, if they are exact enough for it."""
    if not _low_precision(kernel):
        return kernel
    short = _shorter(_maxima(kernel.body), softmax_totals(kernel.body))
    return replace(kernel, body=tuple(rewrite_body(kernel.body, short, lambda index: index)))


def _low_precision(kernel: Kernel) -> bool:
    storage = {p.name: p.dtype for p in kernel.params}

    def each(i: Index) -> bool:
        """Whether a position differs from point to point."""
        return all(ix.depends(i, a.var) for a in kernel.axes)

    kept = {storage[s.buffer] for s in kernel.body if isinstance(s, Store) and each(s.index)}
    loads = (e for s in kernel.body for e in expressions(s) if e.op == "load")
    kept = kept or {storage[e.args[0]] for e in loads if each(e.args[1])}
    return bool(kept) and kept <= set(ex.LOW_PRECISION)


def _maxima(body: Iterable[Statement]) -> dict[str, Expr]:
    """What the maxima of rows are of, by their names."""
    return {s.refs[0]: s.value for s in body if isinstance(s, Reduce) and s.kind == "max"}


def softmax_totals(body: Iterable[Statement]) -> dict[str, tuple[Expr, str]]:
    """By the names of sums of exp(x - m), m the maximum of the same x: x, and the name of m."""
    maxima = _maxima(body)
    found: dict[str, tuple[Expr, str]] = {}
    for s in body:
        if isinstance(s, Reduce) and s.kind == "sum" and (parts := _difference(s.value)) is not None:
            x, m = parts
            if maxima.get(m) == x:
                found[s.refs[0]] = x, m
    return found


def _difference(e: Expr) -> tuple[Expr, str] | None:
    """(x, the name of m) of exp(x - m), in either form."""
    if e.op == "exp_below":
        x, m = e.args
    elif e.op == "exp" and e.args[0].op == "sub":
        x, m = e.args[0].args
    else:
        return None
    return (x, m.args[0]) if m.op == "ref" else None


def _shorter(
    maxima: dict[str, Expr], totals: dict[str, tuple[Expr, str]]
) -> Callable[[Expr], Expr | None]:
    def one(e: Expr) -> Expr | None:
        if e.dtype != torch.float32:
            return None
        if e.op == "exp" and (parts := _difference(e)) is not None and maxima.get(parts[1]) == parts[0]:
            return Expr("exp_below", e.args[0].args, e.dtype, e.note)
        if e.op == "div" and e.args[1].op == "ref" and (parts := _difference(e.args[0])) is not None:
            if totals.get(e.args[1].args[0]) == parts:
                return Expr("share", e.args, e.dtype, e.note)
        if e.op == "add":
            for a, b in (e.args, e.args[::-1]):
                if a.op in PLUS_ONE and b == ex.const(1.0, e.dtype):
                    return Expr(PLUS_ONE[a.op], a.args, e.dtype, e.note)
        return None

    return one
