"""Cumulative ops along one dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from dicp.ir import expr as ex
from dicp.ir.value import Builder, ScanKind, Value
from dicp.ops.rules.pointwise import constant, convert
from dicp.ops.table import Row, Rule, row


def cumulative(kind: ScanKind) -> Rule:
    """The rule of cumsum, cumprod and logcumsumexp."""

    def rule(
        b: Builder, node: torch.fx.Node, x: Value, dim: int, *, dtype: torch.dtype | None = None
    ) -> Value:
        out = b.meta(node)[1]
        if not x.shape:
            return convert(x, out)
        # a running logarithm rounds at every step: in eager too it is float64's
        inner = torch.float64 if kind == "logsumexp" and out == torch.float32 else out
        found = b.scan(kind, x.shape, dim % len(x.shape), inner, lambda idx: ex.cast(x(idx), inner))
        return convert(found, out)

    return rule


def running_best(kind: Literal["max", "min"]) -> Rule:
    """The rule of cummax and cummin; elements are compared as stored."""

    def rule(b: Builder, node: torch.fx.Node, x: Value, dim: int) -> tuple[Value, Value]:
        if not x.shape:
            return x, constant(0, (), torch.int64)
        return b.arg_scan(
            kind, x.shape, dim % len(x.shape), x.dtype, lambda idx: ex.round_to(x(idx), x.dtype)
        )

    return rule


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("cumsum", aten.cumsum.default, kind="scan", rule=cumulative("sum"))
    yield row("cumprod", aten.cumprod.default, kind="scan", rule=cumulative("prod"))
    yield row("logcumsumexp", aten.logcumsumexp.default, kind="scan", rule=cumulative("logsumexp"))
    yield row("cummax", aten.cummax.default, kind="scan", rule=running_best("max"))
    yield row("cummin", aten.cummin.default, kind="scan", rule=running_best("min"))
