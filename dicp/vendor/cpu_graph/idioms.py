"""Combinations of operations for which there is a shorter way than one after the other.

    1 + erf(x)                            one_plus_erf(x)     22 instructions of AVX2 for 58
    1 + tanh(x)                           one_plus_tanh(x)    20 for 45
    exp(x - m), m the maximum of a row    exp_normal(x - m)   16 for 25

What is added to 1 needs no relative accuracy near 0, so no second branch there (dicp_elementary.h). GELU
and its gradient are made of them. A part of a softmax that is no normal float is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.kernel import Kernel, Reduce, rewrite_body

PLUS_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}
EXPENSIVE = ex.EXPENSIVE | {"exp_normal", *PLUS_ONE.values()}


def shortened(kernel: Kernel) -> Kernel:
    """The kernel with these combinations in it."""
    maxima = {s.refs[0]: s.value for s in kernel.body if isinstance(s, Reduce) and s.kind == "max"}
    return replace(kernel, body=tuple(rewrite_body(kernel.body, _shorter(maxima), lambda index: index)))


def _shorter(maxima: dict[str, Expr]) -> Callable[[Expr], Expr | None]:
    """maxima: what those of rows are of, by their names."""

    def one(e: Expr) -> Expr | None:
        if e.dtype != torch.float32:
            return None
        if e.op == "exp" and e.args[0].op == "sub":
            x, m = e.args[0].args
            if m.op == "ref" and maxima.get(m.args[0]) == x:
                return Expr("exp_normal", e.args, e.dtype, e.note)
        if e.op == "add":
            for a, b in (e.args, e.args[::-1]):
                if a.op in PLUS_ONE and b == ex.const(1.0, e.dtype):
                    return Expr(PLUS_ONE[a.op], a.args, e.dtype, e.note)
        return None

    return one
