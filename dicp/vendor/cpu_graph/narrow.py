"""64-bit integers that are small for certain, in 32 bits, where they differ between the lanes of a vector.

    lt(i1 // 2, 28)      ->      lt(i1 // 2 as int32, 28 as int32)

Mostly these are positions: what tells padding from the image, or one side of a mask from the other. A
register holds twice as many of them, and AVX2 neither multiplies nor divides 64-bit lanes, nor converts them
to floats.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Poly, Var
from dicp.ir.kernel import Kernel, expressions, rewrite_body
from dicp.vendor.cpu_graph.expression import SMALL

COMPARISONS = frozenset("lt le gt ge eq ne".split())
LOW, HIGH = -(1 << 31), (1 << 31) - 1

Bounds = tuple[int, int]


def narrowed(kernel: Kernel, along: Var | None) -> Kernel:
    """The kernel with such integers compared, converted and used as positions in 32 bits. along: the variable
    that differs between lanes."""
    if along is None or not any(e.op == "index" for s in kernel.body for e in expressions(s)):
        return kernel
    narrow = _Narrow(along)
    return replace(kernel, body=tuple(rewrite_body(kernel.body, narrow.consumer, narrow.position)))


class _Narrow:
    def __init__(self, along: Var) -> None:
        self.along = along
        self.known: dict[Expr, Bounds | None] = {}

    def consumer(self, x: Expr) -> Expr | None:
        """A comparison, or a cast, of small integers."""
        if x.op == "cast" and x.dtype != torch.int64 and self._pays(x.args):
            return Expr("cast", (self._small(x.args[0]),), x.dtype, x.note)
        if x.op in COMPARISONS and self._pays(x.args):
            return Expr(x.op, tuple(map(self._small, x.args)), x.dtype, x.note)
        return None

    def position(self, i: Index) -> Index:
        """An index, the parts of it that are found at run time small."""

        def atom(a: ix.Atom) -> Index | None:
            if isinstance(a, ix.Opaque) and self._pays((a.payload,)):
                return ix.of(ix.Opaque(self._small(a.payload), a.size))
            return None

        return ix.map_atoms(i, atom) if isinstance(i, Poly) else i

    def _pays(self, values: tuple[Expr, ...]) -> bool:
        return all(v.dtype == torch.int64 and self.bounds(v) is not None for v in values) and any(
            v.depends(self.along) for v in values
        )

    def _small(self, x: Expr) -> Expr:
        """A value with bounds, in 32 bits."""
        if x.op == "const":
            return ex.const(x.args[0], torch.int32)
        if not x.depends(self.along):
            return Expr("cast", (x,), torch.int32)
        if x.op == "where":
            return Expr("where", (x.args[0], *map(self._small, x.args[1:])), torch.int32, x.note)
        if x.op == "index":
            return Expr("index", x.args, torch.int32, x.note)
        return Expr(x.op, tuple(map(self._small, x.args)), torch.int32, x.note)

    # -- bounds ----------------------------------------------------------------------------------------------

    def bounds(self, x: Expr) -> Bounds | None:
        """The least and the greatest value, where these and all that it is made of are of 32 bits."""
        if x not in self.known:
            found = self._bounds(x) if x.dtype == torch.int64 else None
            self.known[x] = found if found is not None and LOW < found[0] and found[1] <= HIGH else None
        return self.known[x]

    def _bounds(self, x: Expr) -> Bounds | None:
        if x.op == "const":
            return x.args[0], x.args[0]
        if x.op == "index":
            return self._of_index(x.args[0])
        if x.op not in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where"):
            return None
        operands = [self.bounds(a) for a in x.args[x.op == "where" :]]
        if any(o is None for o in operands):
            return None
        return _combined(x.op, [o for o in operands if o is not None])

    def _of_index(self, i: Index) -> Bounds | None:
        low, high = ix.limit(i, upper=False), ix.limit(i, upper=True)
        if not isinstance(low, int) or not isinstance(high, int):
            return None
        divided = [a for a in ix.atoms(i) if isinstance(a, (ix.Div, ix.Mod))]
        found_late = any(isinstance(a, ix.Opaque) for a in ix.atoms(i))
        return (low, high) if not found_late and all(map(self._divides, divided)) else None

    def _divides(self, a: ix.Div | ix.Mod) -> bool:
        """Whether lanes can be divided so."""
        if not ix.depends(ix.of(a), self.along):
            return True
        low, high = ix.limit(a.num, upper=False), ix.limit(a.num, upper=True)
        small = isinstance(low, int) and isinstance(high, int) and 0 <= low and high < SMALL
        return small and isinstance(a.den, int)


def _combined(op: str, operands: list[Bounds]) -> Bounds:
    (a, b), *rest = operands
    if op == "neg":
        return -b, -a
    if op == "abs":
        return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
    c, d = rest[0]
    ends = {
        "add": (a + c, b + d),
        "sub": (a - d, b - c),
        "minimum": (min(a, c), min(b, d)),
        "maximum": (max(a, c), max(b, d)),
        "where": (min(a, c), max(b, d)),
    }
    products = (a * c, a * d, b * c, b * d)
    return ends.get(op, (min(products), max(products)))


__all__ = ["narrowed"]
