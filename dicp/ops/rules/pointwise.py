"""How an elementwise row becomes a value, and the small steps other rules share: broadcast, cast, map."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dicp.compat import promoted_dtypes
from dicp.ir import expr as ex
from dicp.ir.expr import Expr
from dicp.ir.index import Poly
from dicp.ir.value import Builder, Indices, Shape, Value
from dicp.ops.table import Body, Declined, Promote, Rule

# Scalar parameters that take part in type promotion, as the tensors do; other Scalars are settings of the op.
PROMOTING_SCALARS = frozenset(["self", "other", "exponent", "min", "max"])
# Tensor parameters that keep their own dtype.
SELECTORS = frozenset(["condition", "mask", "pred"])
# Parameters that say where or how a result is stored.
STORAGE_SETTINGS = frozenset(
    ["dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "inplace"]
)


def scalar_expr(x: Any, dtype: torch.dtype) -> Expr:
    """A number, symbolic integer or scalar expression as an Expr of a compute dtype."""
    if isinstance(x, Expr):
        return ex.cast(x, dtype)
    if isinstance(x, Poly):
        return ex.cast(ex.index_value(x), dtype)
    if isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real):
        raise Declined("a complex number")
    return ex.const(x, dtype)


def constant(value: Any, shape: Shape, dtype: torch.dtype) -> Value:
    """A tensor with one value everywhere."""
    element = ex.round_to(scalar_expr(value, dtype), dtype)
    return Value(shape, dtype, lambda idx: element)


def broadcast(x: Value, shape: Shape) -> Value:
    """x expanded to a shape it broadcasts to."""
    if x.shape == shape:
        return x
    lead = len(shape) - len(x.shape)
    stretched = tuple(n == 1 for n in x.shape)
    return Value(shape, x.dtype, lambda idx: x(tuple(
        0 if one else i for one, i in zip(stretched, idx[lead:], strict=True))))


def convert(x: Value, dtype: torch.dtype) -> Value:
    """x cast as the user asked: rounded to the values of a low-precision dtype. Whole numbers and truths are
    those of x as torch holds it."""
    if x.dtype == dtype:
        return x
    if not dtype.is_floating_point:
        return Value(x.shape, dtype, lambda idx: ex.cast(ex.round_to(x(idx), x.dtype), dtype))
    return Value(x.shape, dtype, lambda idx: ex.round_to(ex.cast(x(idx), dtype), dtype))


def retyped(x: Value, dtype: torch.dtype) -> Value:
    """x computed in another dtype; low-precision results are rounded only where they are stored."""
    return x if x.dtype == dtype else Value(x.shape, dtype, lambda idx: ex.cast(x(idx), dtype))


def pointwise(fn: Callable[..., Any], *operands: Value, shape: Shape, dtype: torch.dtype) -> Value:
    """fn of the operands' elements, broadcast to `shape`; the result cast to `dtype`."""
    spread = [broadcast(x, shape) for x in operands]
    return Value(shape, dtype, lambda idx: scalar_expr(fn(*(x(idx) for x in spread)), dtype))


@functools.cache
def _probe(dtype: torch.dtype, zero_dim: bool) -> torch.Tensor:
    return torch.empty(() if zero_dim else (1,), dtype=dtype, device="meta")


@functools.cache
def _promoted(kind: str, default: torch.dtype, *operands: Any) -> tuple[torch.dtype, torch.dtype]:
    return promoted_dtypes(kind, *(_probe(*x) if isinstance(x, tuple) else x(1) for x in operands))


def computation_dtypes(kind: Promote, operands: list[Any]) -> tuple[torch.dtype, torch.dtype]:
    """Dtype in which torch computes an op on these Values and numbers, and the dtype of its result."""
    keys: list[Any] = []
    for x in operands:
        if isinstance(x, Value):
            keys.append((x.dtype, not x.shape))
        elif isinstance(x, Expr):
            keys.append(float if x.dtype.is_floating_point else int)
        else:
            keys.append(int if isinstance(x, Poly) else type(x))
    if complex in keys:
        raise Declined("a complex number")
    return _promoted(kind, torch.get_default_dtype(), *keys)


@dataclass(frozen=True)
class Binding:
    """Arguments of an overload: operands in schema order (None where absent), and given settings."""

    operands: tuple[tuple[str, Any], ...]
    settings: dict[str, Any]


def bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
    """Sort arguments by the overload's schema."""
    operands: list[tuple[str, Any]] = []
    settings: dict[str, Any] = {}
    for pos, param in enumerate(target._schema.arguments):
        given = pos < len(args) and not param.kwarg_only
        value = args[pos] if given else kwargs.get(param.name, param.default_value)
        if "Tensor" in str(param.type) or param.name in PROMOTING_SCALARS:
            operands.append((param.name, value))
        elif (given or param.name in kwargs) and param.name not in STORAGE_SETTINGS:
            settings[param.name] = value
    return Binding(tuple(operands), settings)


def elementwise_rule(
    name: str, body: Body, promote: Promote, stepped: bool = False, narrow: bool = False
) -> Rule:
    """The rule of an elementwise row: operands are cast to the dtype torch computes in. narrow: numbers too
    are rounded where eager's roundings are asked for."""

    def rule(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
        rounded = stepped or narrow and b.rounds
        return apply_body(body, promote, bind(node.target, args, kwargs), *b.meta(node), stepped=rounded)

    rule.__name__ = name
    return rule


def apply_body(body: Body, promote: Promote, binding: Binding, shape: Shape, dtype: torch.dtype,
               stepped: bool = False, numbers: bool = True) -> Value:
    """The value whose element is `body` of the bound arguments' elements.

    stepped: a tiny change of an operand can change the result much (comparison, remainder, floor), so
    operands are rounded as torch holds them: to the dtype they are promoted to. numbers: what is not of that
    dtype too.
    """
    promoting = [x for name, x in binding.operands if name not in SELECTORS and x is not None]
    compute = None if promote == "NONE" else computation_dtypes(promote, promoting)[0]
    rounded = computation_dtypes("DEFAULT", promoting)[1] if stepped or promote == "ALWAYS_BOOL" else None

    def element(name: str, x: Any, idx: Indices) -> Expr | None:
        if x is None:
            return None
        value = x(idx) if isinstance(x, Value) else scalar_expr(x, compute or dtype)
        if compute is None or name in SELECTORS:
            return value
        value, given = ex.cast(value, compute), isinstance(x, Value) and x.dtype == rounded
        return value if rounded is None or not (numbers or given) else ex.round_to(value, rounded)

    spread = [(name, broadcast(x, shape) if isinstance(x, Value) else x) for name, x in binding.operands]
    return Value(shape, dtype, lambda idx: scalar_expr(
        body(*(element(name, x, idx) for name, x in spread), **binding.settings), dtype))
