"""Size symbols: from Dynamo's sympy expressions to Index, and back to where a program finds their values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
from torch.utils._sympy.symbol import SymT, symbol_is_type

from dicp.compat import example_value, known_equal, size_hint, symbolic_size
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var

UNKNOWN = 256  # what a size counts as that the example does not tell


class Symbols:
    """Converts sizes to Index. `host` holds the expressions that are not polynomials with modulo, floor
    divisions among them: they become size symbols of their own, computed once per call."""

    def __init__(self, shape_env: Any | None) -> None:
        self.shape_env = shape_env
        self.backed: dict[sympy.Symbol, Var] = {}
        self.host: dict[sympy.Expr, Var] = {}
        self.expressions: dict[Var, sympy.Expr] = {}
        self.converted: dict[sympy.Expr, Index] = {}
        self.quotients: dict[sympy.Expr, Index] = {}  # what floor divisions are
        self.hints: dict[Var, int] = {}  # values in the example
        self.given: set[sympy.Symbol] = set()  # known when the program starts: its inputs tell them
        self.lengths: set[sympy.Expr] = set()  # what is the size of a tensor, and so not negative

    def length(self, n: int | torch.SymInt) -> Index:
        """The size of a tensor as an Index. Sizes come before what is made of them."""
        if isinstance(n, torch.SymInt):
            self.lengths.add(n.node.expr)
        return self.index(n)

    def index(self, value: Any) -> Index:
        """An int, SymInt or sympy expression as an Index."""
        if isinstance(value, (int, ix.Poly)):
            return int(value) if isinstance(value, int) else value
        if isinstance(value, torch.SymInt):
            e = value.node.expr
            # what torch broadcast has a guard that says so, and no other index than 0
            if e not in self.converted and size_hint(value, UNKNOWN) == 1 and known_equal(value, 1):
                self.converted[e] = 1
            return self.index(e)
        if isinstance(value, sympy.Integer):
            return int(value)
        e = sympy.sympify(value)
        if e not in self.converted:
            self.converted[e] = self._convert(e)
        return self.converted[e]

    def _convert(self, e: sympy.Expr) -> Index:
        if isinstance(e, sympy.Integer):
            return int(e)
        if isinstance(e, sympy.Symbol):
            return ix.of(self.symbol(e))
        if isinstance(e, sympy.Add):
            quotient, shift = _shifted_quotient(e)
            if quotient is not None and self._is_division(quotient):
                return self._quotient(quotient, shift)
            total: Index = 0
            for a in e.args:
                total = total + self._convert(a)
            return total
        if isinstance(e, sympy.Mul) and all(
            not isinstance(a, sympy.Rational) or a.is_integer for a in e.args
        ):
            return ix.product(self._convert(a) for a in e.args)
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and e.exp > 0:
            return ix.product([self._convert(e.base)] * int(e.exp))
        if self._is_division(e):
            return self._quotient(e, 0)
        if isinstance(e, (Mod, PythonMod)) and ix.nonnegative(self._convert(e.args[1]) - 1):
            return ix.mod(self._convert(e.args[0]), self._convert(e.args[1]))
        return ix.of(self._on_host(e))

    def _on_host(self, e: sympy.Expr) -> Var:
        if e not in self.host:
            var = Var(f"h{len(self.host)}", None, self._low(e))
            self.host[e] = var
            self.expressions[var] = e
        return self.host[e]

    def _is_division(self, e: sympy.Expr) -> bool:
        return isinstance(e, (FloorDiv, CleanDiv)) and ix.nonnegative(self._convert(e.args[1]) - 1)

    def _quotient(self, e: sympy.Expr, shift: int) -> Index:
        """A floor division plus a number. The first such sum becomes a symbol, and later ones are made of it:
        what a convolution leaves of a size, 1 + (n - 1) // 2, then stays one factor in the products that
        sizes and positions are, which can be told apart again."""
        if e not in self.quotients:
            plain = ix.floordiv(self._convert(e.args[0]), self._convert(e.args[1]))
            if any(isinstance(a, ix.Div) for a in ix.atoms(plain)):
                plain = ix.of(self._on_host(e + shift)) - shift
            self.quotients[e] = plain
        return self.quotients[e] + shift

    def hint(self, i: Index) -> int:
        """The value of an index at the sizes of the example; sizes that it does not tell count as 256."""
        return int(ix.evaluate(i, self._hint))

    def _hint(self, a: Any) -> int:
        if a not in self.hints:
            e = self.expressions.get(a)
            self.hints[a] = UNKNOWN if e is None else example_value(self.shape_env, e, UNKNOWN)
        return self.hints[a]

    def size(self, i: Index) -> int | torch.SymInt:
        """An index as torch has it."""

        def symbol(a: Any) -> torch.SymInt:
            e = self.expressions[a]
            read = any(symbol_is_type(s, SymT.UNBACKED_INT) for s in e.free_symbols)
            return symbolic_size(self.shape_env, e, None if read else self._hint(a))

        return ix.evaluate(i, symbol)  # type: ignore[no-any-return]

    def scalar(self, e: sympy.Expr, read: Mapping[sympy.Expr, Expr] = MappingProxyType({})) -> Expr | None:
        """A float computed from sizes and from what is `read`, as a float64 expression; None where an
        operation has no primitive."""
        if e in read:
            return read[e]
        if isinstance(e, (sympy.Float, sympy.Rational, sympy.Integer)) or e.is_number:
            return ex.const(float(e), torch.float64)
        if e.is_integer and not isinstance(e, sympy.Symbol) or isinstance(e, sympy.Symbol) and e.is_integer:
            return ex.cast(ex.index_value(self.index(e)), torch.float64)
        name = type(e).__name__
        parts = [self.scalar(a, read) for a in e.args]
        if any(p is None for p in parts) or not parts:
            return None
        args: list[Any] = parts
        if name == "ToFloat":
            return args[0]  # type: ignore[no-any-return]
        if name.startswith("OpaqueUnaryFn_"):
            op = name.removeprefix("OpaqueUnaryFn_")
            return ex.unary(op, args[0]) if op in ex.UNARY else None
        word = {
            "IntTrueDiv": "div",
            "FloatTrueDiv": "div",
            "Add": "add",
            "Mul": "mul",
            "Pow": "pow",
            "FloatPow": "pow",
            "PowByNatural": "pow",
            "Max": "maximum",
            "Min": "minimum",
        }.get(name)
        if word is None:
            return None
        out = args[0]
        for a in args[1:]:
            out = ex.binary(word, out, a)
        return out  # type: ignore[no-any-return]

    def late(self, i: Index) -> bool:
        """Whether an index names a size that is only known while the program runs (read from data)."""
        return bool(self.unbacked(i))

    def unbacked(self, i: Index) -> set[sympy.Symbol]:
        """The sizes read from data that an index is made of."""
        found = [self.expressions[a] for a in ix.atoms(i) if isinstance(a, Var) and a in self.expressions]
        free = {s for e in found for s in e.free_symbols} - self.given
        return {s for s in free if symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))}

    def give(self, *sizes: Any) -> None:
        """Note sizes of the graph's inputs."""
        exprs = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
        self.given.update(e for e in exprs if isinstance(e, sympy.Symbol))

    def symbol(self, s: sympy.Symbol) -> Var:
        """The variable of a symbol of torch's."""
        if s not in self.backed:
            var = Var(str(s), None, self._low(s))
            self.backed[s] = var
            self.expressions[var] = s
        return self.backed[s]

    def _low(self, e: sympy.Expr) -> int | None:
        """A lower bound that is not negative; None where there is none: of numbers that are no sizes."""
        unbound = 0 if e in self.lengths or e.is_nonnegative else None
        if self.shape_env is None:
            return unbound
        try:
            low = self.shape_env.bound_sympy(e).lower
        except (AttributeError, KeyError, TypeError, ValueError):
            return unbound
        return int(low) if isinstance(low, (int, sympy.Integer)) and low >= 0 else unbound


def _shifted_quotient(e: sympy.Add) -> tuple[sympy.Expr | None, int]:
    """(q, c) of a floor division plus a number, q + c."""
    number, rest = e.as_coeff_Add()
    return (rest, int(number)) if isinstance(rest, (FloorDiv, CleanDiv)) else (None, 0)
