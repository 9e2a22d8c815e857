"""Elementwise rows: arithmetic, comparison, logic, bits, selection and conversion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir.expr import Expr, Operand
from dicp.ir.value import Builder, Value
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import broadcast, convert
from dicp.ops.table import Row, elementwise, row


def add(x: Expr, y: Expr, alpha: Any = 1) -> Expr:
    """x + alpha * y; on bool, logical or."""
    if x.dtype == torch.bool:
        return s.lor(x, y) if alpha else x
    return x + scaled(y, alpha)


def scaled(x: Expr, factor: Any) -> Expr:
    """factor * x, nothing when the factor is one."""
    return x if isinstance(factor, (int, float)) and factor == 1 else x * factor


def mul(x: Expr, y: Expr) -> Expr:
    """x * y; on bool, logical and."""
    return s.land(x, y) if x.dtype == torch.bool else x * y


def to_copy(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A cast the user asked for: `aten._to_copy`, `prims.convert_element_type`."""
    shape, dtype = b.meta(node)
    return convert(broadcast(x, shape), dtype)


def rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    yield elementwise("add", aten.add.Tensor, aten.add.Scalar, prims.add.default, body=add)
    yield elementwise("mul", aten.mul.Tensor, aten.mul.Scalar, prims.mul.default, body=mul)
    yield row("to", aten._to_copy.default, prims.convert_element_type.default, kind="elementwise", rule=to_copy)
