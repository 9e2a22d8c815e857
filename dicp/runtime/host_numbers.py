"""Numbers that a program's Python function computes from sizes at each call.

Written as Python wherever that means the same: evaluating a sympy expression costs as much as a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean
from torch.utils._sympy.functions import (
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PowByNatural,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

_RELATIONS = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
}
_INFIX = {sympy.Add: "+", sympy.Mul: "*", sympy.And: "and", sympy.Or: "or"}
_DIVISIONS = {FloorDiv: "//", CleanDiv: "//", Mod: "%", PythonMod: "%", IntTrueDiv: "/", FloatTrueDiv: "/"}
_CONVERSIONS = {ToFloat: "float", TruncToInt: "int", RoundToInt: "round"}


def python_text(e: Any) -> str | None:
    """The expression as Python text, its symbols by name; None where it is not spelled here. Of floats, too,
    of which sympy does not keep NaN, infinities and the zero's sign."""
    if isinstance(e, sympy.Integer):
        return str(e) if e >= 0 else f"({e})"
    if isinstance(e, sympy.Symbol):
        return str(e) if str(e).isidentifier() else None
    if isinstance(e, sympy.Float):
        return repr(float(e))
    if e is sympy.true or e is sympy.false:
        return repr(bool(e))
    parts = [python_text(a) for a in e.args]
    if not parts or any(p is None for p in parts):
        return None
    kind = type(e)
    if kind in _INFIX:
        return "(" + f" {_INFIX[kind]} ".join(parts) + ")"  # type: ignore[arg-type]
    if kind in _RELATIONS:
        return f"({parts[0]} {_RELATIONS[kind]} {parts[1]})"
    if kind in _DIVISIONS:
        return f"({parts[0]} {_DIVISIONS[kind]} {parts[1]})"
    if kind in (sympy.Pow, PowByNatural) and isinstance(e.args[1], sympy.Integer) and e.args[1] > 0:
        return f"({parts[0]} ** {parts[1]})"
    if kind in _CONVERSIONS:
        return f"{_CONVERSIONS[kind]}({parts[0]})"
    if kind is sympy.Not:
        return f"(not {parts[0]})"
    if kind in (Max, Min):
        return f"{kind.__name__.lower()}({', '.join(parts)})"  # type: ignore[arg-type]
    return None


@dataclass(frozen=True)
class HostFunction:
    """What has no Python text, evaluated by sympy. Can be pickled."""

    expr: Any  # a sympy expression
    free: tuple[Any, ...]  # its symbols, in the order of the arguments
    convert: Callable[[Any], Any] = int

    def __call__(self, *values: int | float) -> Any:
        known = map(sympy.sympify, values)
        return self.convert(self.expr.xreplace(dict(zip(self.free, known, strict=True))))


def host_size(expr: Any, values: dict[str, Any], name: str) -> str:
    """Python text of an integer; what the text calls is added to `values`, under `name`."""
    return python_text(expr) or _call(expr, values, name, int)


def host_number(expr: Any, values: dict[str, Any], name: str) -> str:
    """Python text of a truth value, or else of a float."""
    text = python_text(expr)
    if text is None:
        return _call(expr, values, name, number)
    truth = isinstance(expr, Boolean) and not isinstance(expr, sympy.Symbol)  # to sympy a symbol is both
    return text if truth else f"float({text})"


def _call(expr: Any, values: dict[str, Any], name: str, convert: Callable[[Any], Any]) -> str:
    free: Sequence[Any] = sorted(expr.free_symbols, key=str)
    values[name] = HostFunction(expr, tuple(free), convert)
    return f"{name}({', '.join(map(str, free))})"


def number(value: Any) -> bool | float:
    """A sympy truth value or number as Python's own."""
    return bool(value) if isinstance(value, (bool, Boolean)) else float(value)


__all__ = ["HostFunction", "host_number", "host_size", "python_text"]
