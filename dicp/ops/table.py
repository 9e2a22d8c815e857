"""The op table: what each aten operator is, declared once for every consumer.

A `Row` names an operator, its overloads, its kind, and how it becomes values: an elementwise row by the
scalar `body` of one element, any other row by a `rule`. Rows without a rule are left to libraries.

    elementwise("relu", aten.relu.default, body=lambda x: maximum(x, 0))
    row("permute", aten.permute.default, kind="view", rule=permute)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from dicp.ir.expr import COMPUTE_DTYPES, compute_dtype
from dicp.ir.value import Builder, Value

Kind = Literal["elementwise", "reduction", "scan", "view", "index", "factory", "contraction", "random",
               "composite", "library"]
Promote = Literal["DEFAULT", "INT_TO_FLOAT", "ALWAYS_BOOL", "BOOL_TO_LONG", "NONE"]
Result = Value | tuple[Value, ...]
Rule = Callable[..., Result]
Body = Callable[..., Any]


class Declined(Exception):
    """A rule's answer that it cannot express this use of its op, and why. The op becomes extern."""


@dataclass(frozen=True, eq=False)
class Row:
    """One operator. `promote`: the dtype promotion, as torch._prims_common names it; "NONE" casts nothing."""

    name: str
    overloads: tuple[OpOverload, ...]
    kind: Kind
    rule: Rule | None = None
    body: Body | None = None
    promote: Promote = "DEFAULT"
    stepped: frozenset[OpOverload] = frozenset()
    """Of the overloads those whose result jumps: operands of low precision are rounded first."""
    moves: bool = False
    """Whether a result's elements are the operands', or a number, or those converted: of whatever dtype."""

    def lower(
        self, builder: Builder, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result:
        """The op's results as values. Tensor arguments are Values, integers Index.

        Raises Declined when this use has no rule.
        """
        if self.rule is None:
            raise Declined(f"{self.name} is a library op")
        for leaf in tree_leaves((node.meta.get("val"), args, kwargs)):
            if isinstance(leaf, (torch.Tensor, Value)) and not expressible(leaf.dtype):
                raise Declined(f"{self.name} on {leaf.dtype}")
        return self.rule(builder, node, *args, **kwargs)


def expressible(dtype: torch.dtype) -> bool:
    """Whether kernels can hold elements of a dtype."""
    return compute_dtype(dtype) in COMPUTE_DTYPES


def elementwise(name: str, *overloads: OpOverload, body: Body, promote: Promote = "DEFAULT",
                stepped: bool = False, narrow: bool = False) -> Row:
    """A row whose result element is `body` of the operands' elements, cast to the dtype torch computes in.

    stepped: operands are rounded to their low-precision dtype first, because the result jumps. narrow: so
    does eager with a number beside them.
    """
    from dicp.ops.rules.pointwise import elementwise_rule

    rule = elementwise_rule(name, body, promote, stepped, narrow)
    return Row(name, overloads, "elementwise", rule, body, promote, frozenset(overloads if stepped else ()))


def has_rule(target: Any) -> bool:
    """Whether kernels compute an op, where no library does."""
    row = table().get(target)
    return row is not None and row.rule is not None


def is_stepped(target: Any) -> bool:
    """Whether an op rounds its operands of low precision, because its result jumps."""
    row = table().get(target)
    return row is not None and target in row.stepped


def moves(target: Any) -> bool:
    """Whether an op computes nothing but where elements go, and what they are converted to."""
    row = table().get(target)
    return row is not None and row.moves


def row(
    name: str, *overloads: OpOverload, kind: Kind, rule: Rule | None = None, moves: bool = False
) -> Row:
    """A row with a rule of its own: `rule(builder, node, *args, **kwargs)`. Views move elements."""
    return Row(name, overloads, kind, rule, moves=moves or kind == "view")


def rows() -> Iterator[Row]:
    """Every row, in the order of the modules that declare them."""
    from dicp.ops.rules import (
        activations,
        analysis,
        arithmetic,
        factories,
        indexing,
        joining,
        libraries,
        normalization,
        pooling,
        reductions,
        sampling,
        scans,
        special,
        views,
    )

    for module in (
        arithmetic,
        analysis,
        special,
        activations,
        views,
        factories,
        reductions,
        scans,
        normalization,
        indexing,
        joining,
        pooling,
        sampling,
        libraries,
    ):
        yield from module.rows()


@functools.cache
def table() -> dict[OpOverload, Row]:
    """Row of each overload. Built at the first call."""
    out: dict[OpOverload, Row] = {}
    for r in rows():
        for overload in r.overloads:
            assert overload not in out, f"{overload} has two rows"
            out[overload] = r
    return out
