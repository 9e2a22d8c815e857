"""Elementwise rows: arithmetic, comparison, logic, bits, selection and conversion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dicp.ir.expr import Expr
from dicp.ir.value import Builder, Value
from dicp.ops import scalar as s
from dicp.ops.rules.pointwise import apply_body, bind, broadcast, constant, convert, scalar_expr
from dicp.ops.table import Body, Declined, Row, elementwise, row


def scaled(x: Expr, factor: Any) -> Expr:
    """x * factor, computed in x's dtype; x itself when the factor is one."""
    return x if isinstance(factor, (int, float)) and factor == 1 else x * scalar_expr(factor, x.dtype)


def add(x: Expr, y: Expr, alpha: Any = 1) -> Expr:
    """x + alpha * y; on bool, logical or."""
    if x.dtype == torch.bool:
        return s.lor(x, y) if alpha else x
    return x + scaled(y, alpha)


def mul(x: Expr, y: Expr) -> Expr:
    """x * y; on bool, logical and."""
    return s.land(x, y) if x.dtype == torch.bool else x * y


def minimum(x: Expr, y: Expr) -> Expr:
    return s.land(x, y) if x.dtype == torch.bool else s.minimum(x, y)


def maximum(x: Expr, y: Expr) -> Expr:
    return s.lor(x, y) if x.dtype == torch.bool else s.maximum(x, y)


def clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """x limited to [low, high]; high wins where they cross, NaN anywhere gives NaN."""
    x = x if low is None else s.maximum(x, low)
    return x if high is None else s.minimum(x, high)


def power(x: Expr, y: Expr) -> Expr:
    """x ** y, by the same short forms as torch for constant exponents."""
    if y.op != "const":
        return s.pow_(x, y)
    n = y.args[0]
    if n == 0:
        return s.like(1, x)
    if n in (1, 2, 3):
        return x if n == 1 else x * x if n == 2 else x * x * x
    if x.dtype.is_floating_point and n in (0.5, -0.5, -1, -2):
        return s.sqrt(x) if n == 0.5 else s.rsqrt(x) if n == -0.5 else s.reciprocal(x if n == -1 else x * x)
    return s.pow_(x, y)


def power_rule(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    binding = bind(node.target, args, kwargs)
    exponent = binding.operands[1][1]
    if isinstance(exponent, int) and exponent < 0 and not b.meta(node)[1].is_floating_point:
        raise Declined("an integer to a negative power, an error in eager")
    base = binding.operands[0][1]
    root = isinstance(exponent, float) and abs(exponent) == 0.5
    if root and isinstance(base, Value) and base.dtype == torch.float16:
        return apply_body(s.pow_, "DEFAULT", binding, *b.meta(node))  # as eager's: of -inf and -0 they differ
    # an exponent of which only the rounding is a whole number would make NaN of a negative base
    stepped = isinstance(exponent, Value) or b.rounds
    return apply_body(power, "DEFAULT", binding, *b.meta(node), stepped=stepped, numbers=b.rounds)


def divide(x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return x / y
    return s.div_trunc(x, y) if rounding_mode == "trunc" else s.div_floor(x, y)


def divide_rule(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
    """True division gives floats; division with a rounding mode keeps integers."""
    binding = bind(node.target, args, kwargs)
    if binding.settings.get("rounding_mode") is None:
        return apply_body(divide, "INT_TO_FLOAT", binding, *b.meta(node))
    checked = guarded(b, node, divide)  # by a number with all its digits, as eager
    return apply_body(checked, "DEFAULT", binding, *b.meta(node), stepped=True, numbers=False)


def guarded(b: Builder, node: torch.fx.Node, body: Body) -> Body:
    """The body of an integer division: by zero it is an error on the CPU, as in eager; a GPU gives some
    number."""
    if node.meta["val"].device.type != "cpu":
        return body
    name = node.target._opname  # type: ignore[union-attr]

    def checked(x: Expr, y: Expr, **settings: Any) -> Expr:
        whole = not y.dtype.is_floating_point and y.dtype != torch.bool
        return body(x, b.nonzero(y, name) if whole else y, **settings)  # type: ignore[no-any-return]

    return checked


def division(name: str, *overloads: Any, body: Body, numbers: bool = True) -> Row:
    """The row of a division that gives integers for integers. numbers: they are rounded as well."""

    def rule(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Value:
        binding = bind(node.target, args, kwargs)
        checked = guarded(b, node, body)
        return apply_body(checked, "DEFAULT", binding, *b.meta(node), stepped=True, numbers=numbers)

    rule.__name__ = name
    return Row(name, overloads, "elementwise", rule, body, stepped=frozenset(overloads))


def lerp(start: Expr, end: Expr, weight: Any) -> Expr:
    """start + weight * (end - start), from the nearer end, as torch computes it."""
    w = scalar_expr(weight, start.dtype)
    return s.where(s.sabs(w) < 0.5, start + w * (end - start), end - (end - start) * (1 - w))


def masked_fill(x: Expr, mask: Expr, value: Any) -> Expr:
    return s.where(mask, value if isinstance(value, Expr) else scalar_expr(value, x.dtype), x)


def to_copy(b: Builder, node: torch.fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A cast the user asked for: `aten._to_copy`, `prims.convert_element_type`."""
    shape, dtype = b.meta(node)
    return convert(broadcast(x, shape), dtype)


def copy(b: Builder, node: torch.fx.Node, x: Value, src: Any, non_blocking: bool = False) -> Value:
    """src: a tensor, or a number."""
    if not isinstance(src, Value):
        return constant(src, x.shape, x.dtype)
    return convert(broadcast(src, x.shape), x.dtype)


def arithmetic_rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    yield elementwise("add", aten.add.Tensor, aten.add.Scalar, prims.add.default, body=add, narrow=True)
    yield elementwise("sub", aten.sub.Tensor, aten.sub.Scalar, prims.sub.default, narrow=True,
                      body=lambda x, y, alpha=1: x - scaled(y, alpha))
    yield elementwise(
        "rsub", aten.rsub.Tensor, aten.rsub.Scalar, narrow=True,
        body=lambda x, y, alpha=1: y - scaled(x, alpha),
    )
    yield elementwise("mul", aten.mul.Tensor, aten.mul.Scalar, prims.mul.default, body=mul)
    yield Row("div", (aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode,
                      aten.true_divide.Tensor, aten.true_divide.Scalar), "elementwise", divide_rule, divide,
              stepped=frozenset((aten.div.Tensor_mode, aten.div.Scalar_mode)))
    yield division("floor_divide", aten.floor_divide.default, aten.floor_divide.Scalar, body=s.div_floor,
                   numbers=False)
    yield division("remainder", aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor,
                   body=s.remainder)
    yield division("fmod", aten.fmod.Tensor, aten.fmod.Scalar, body=s.fmod)
    yield Row("pow", (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar), "elementwise",
              power_rule, power, stepped=frozenset((aten.pow.Tensor_Tensor, aten.pow.Scalar)))
    yield elementwise("square", aten.square.default, body=lambda x: x * x, promote="BOOL_TO_LONG")
    yield elementwise("neg", aten.neg.default, prims.neg.default, body=s.neg)
    yield elementwise("abs", aten.abs.default, prims.abs.default,
                      body=lambda x: x if x.dtype == torch.bool else s.sabs(x))
    yield elementwise("sign", aten.sign.default, aten.sgn.default, stepped=True,
                      body=lambda x: x if x.dtype == torch.bool else s.sign(x))
    yield elementwise("gcd", aten.gcd.default, body=s.gcd)
    yield elementwise("lcm", aten.lcm.default, body=s.lcm)
    yield elementwise("lerp", aten.lerp.Scalar, aten.lerp.Tensor, body=lerp)
    yield elementwise("addcmul", aten.addcmul.default, body=lambda x, a, b, value=1: x + scaled(a, value) * b)
    yield elementwise("addcdiv", aten.addcdiv.default, body=lambda x, a, b, value=1: x + scaled(a, value) / b)


def comparison_rows() -> Iterator[Row]:
    aten = torch.ops.aten
    for name, body in {"eq": s.eq, "ne": s.ne, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
                       "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y}.items():
        op = getattr(aten, name)
        yield elementwise(name, op.Tensor, op.Scalar, body=body, promote="ALWAYS_BOOL")
    yield elementwise("isnan", aten.isnan.default, body=is_nan, promote="ALWAYS_BOOL")
    yield elementwise("isinf", aten.isinf.default, body=is_infinite, promote="ALWAYS_BOOL")
    yield elementwise("isfinite", aten.isfinite.default, promote="ALWAYS_BOOL",
                      body=lambda x: s.lnot(s.lor(is_nan(x), is_infinite(x))))
    yield elementwise(
        "isposinf", aten.isposinf.default, body=lambda x: is_infinite(x, "+"), promote="ALWAYS_BOOL"
    )
    yield elementwise(
        "isneginf", aten.isneginf.default, body=lambda x: is_infinite(x, "-"), promote="ALWAYS_BOOL"
    )
    yield elementwise("signbit", aten.signbit.default, promote="ALWAYS_BOOL", body=lambda x:
                      s.const(False, torch.bool) if x.dtype == torch.bool else
                      s.signbit(x) if x.dtype.is_floating_point else x < 0)
    yield elementwise("minimum", aten.minimum.default, body=minimum)
    yield elementwise("maximum", aten.maximum.default, body=maximum)
    yield elementwise("fmin", aten.fmin.default, body=lambda x, y: minimum(x, y) if x.dtype == torch.bool
                      else s.fmin(x, y))
    yield elementwise("fmax", aten.fmax.default, body=lambda x, y: maximum(x, y) if x.dtype == torch.bool
                      else s.fmax(x, y))
    yield elementwise("clamp", aten.clamp.default, aten.clamp.Tensor, body=clamp)
    yield elementwise("clamp_min", aten.clamp_min.default, aten.clamp_min.Tensor, body=clamp)
    yield elementwise("clamp_max", aten.clamp_max.default, aten.clamp_max.Tensor,
                      body=lambda x, high: clamp(x, None, high))


def is_nan(x: Expr) -> Expr:
    """Whether x is not a number; never for integers."""
    return s.isnan(x) if x.dtype.is_floating_point else s.const(False, torch.bool)


def is_infinite(x: Expr, side: str = "+-") -> Expr:
    """Whether x is an infinity of the given sign; never for integers."""
    if not x.dtype.is_floating_point:
        return s.const(False, torch.bool)
    return s.isinf(x) if side == "+-" else s.eq(x, float(f"{side}inf"))


def logic_rows() -> Iterator[Row]:
    aten = torch.ops.aten
    for name in ("and", "or", "xor"):
        logical, bitwise = getattr(aten, f"logical_{name}"), getattr(aten, f"bitwise_{name}")
        on_bool, on_bits = getattr(s, f"l{name}"), getattr(s, f"b{name}")
        yield elementwise(f"logical_{name}", logical.default, body=on_bool, promote="ALWAYS_BOOL")
        yield elementwise(f"bitwise_{name}", bitwise.Tensor, bitwise.Scalar, bitwise.Scalar_Tensor,
                          body=lambda x, y, on_bool=on_bool, on_bits=on_bits:
                          on_bool(x, y) if x.dtype == torch.bool else on_bits(x, y))
    yield elementwise("logical_not", aten.logical_not.default, body=s.lnot, promote="ALWAYS_BOOL")
    yield elementwise("bitwise_not", aten.bitwise_not.default, body=lambda x: ~x)
    left, right = aten.bitwise_left_shift, aten.bitwise_right_shift
    yield elementwise("shl", left.Tensor, left.Tensor_Scalar, left.Scalar_Tensor, aten.__lshift__.Tensor,
                      aten.__lshift__.Scalar, body=s.shl)
    yield elementwise("shr", right.Tensor, right.Tensor_Scalar, right.Scalar_Tensor, aten.__rshift__.Tensor,
                      aten.__rshift__.Scalar, body=s.shr)


def selection_rows() -> Iterator[Row]:
    aten, prims = torch.ops.aten, torch.ops.prims
    yield elementwise(
        "where",
        aten.where.self,
        aten.where.ScalarSelf,
        aten.where.ScalarOther,
        aten.where.Scalar,
        prims.where.default,
        body=s.where,
    )
    yield elementwise("masked_fill", aten.masked_fill.Scalar, aten.masked_fill.Tensor, body=masked_fill,
                      promote="NONE")
    yield elementwise("fill", aten.fill.Scalar, aten.fill.Tensor, body=lambda x, value: value, promote="NONE")
    yield row("to", aten._to_copy.default, prims.convert_element_type.default,
              kind="elementwise", rule=to_copy, moves=True)
    yield row("copy", aten.copy.default, kind="elementwise", rule=copy, moves=True)


def rows() -> Iterator[Row]:
    yield from arithmetic_rows()
    yield from comparison_rows()
    yield from logic_rows()
    yield from selection_rows()
