"""Combinations of operations for which there is a shorter way than one after the other.

    1 + erf(x)      one_plus_erf(x)       22 instructions for 58
    1 + tanh(x)     one_plus_tanh(x)      30 for 45

What is added to 1 needs no relative accuracy near 0, so no second branch there (include/dicp_math.h). GELU
and its gradient are made of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.kernel import Kernel, rewrite_body

PLUS_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}


def shortened(kernel: Kernel) -> Kernel:
    """The kernel with these combinations in it."""
    return replace(kernel, body=tuple(rewrite_body(kernel.body, _shorter, lambda index: index)))


def _shorter(e: Expr) -> Expr | None:
    if e.op == "add" and e.dtype == torch.float32:
        for a, b in (e.args, e.args[::-1]):
            if a.op in PLUS_ONE and b == ex.const(1.0, e.dtype):
                return Expr(PLUS_ONE[a.op], a.args, e.dtype, e.note)
    return None
