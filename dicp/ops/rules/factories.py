"""Tensors made from nothing but sizes and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir.value import Builder, Value
from dicp.ops.rules.pointwise import constant
from dicp.ops.table import Row, row


def full(b: Builder, node: torch.fx.Node, size: Any, value: Any, **kwargs: Any) -> Value:
    return constant(value, *b.meta(node))


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield row("full", aten.full.default, aten.full_like.default, kind="factory", rule=full)
