"""Long rows that begin anywhere: 50,257 elements to a row, say.

No address of such a row but the first's is known to be that of a whole vector, so that a plain loop reads and
writes it an element at a time. Instead the loop walks from the last whole vector's begin before the row:

    first = row // V * V            where the walk begins
    lead = row - first              elements there of the row before
    at                              the walk's position, from 0
    r = at - lead                   the row's position; live_r where there is such an element

Vectors of 16 bytes that reach into the row are read whole: memory that is there at all is there by 16 bytes,
so that it does not matter if one ends beyond its buffer. Vectors within the row are written whole, and the
elements at its two ends one by one. That is in the first and the last steps, which are apart from the others:
those need no masks. V counts elements of the narrowest buffer; it is 1, and all of this plain, where a
buffer begins at no whole vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Store

BYTES = 16
"""Of a vector."""
PLACED = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
"""Reductions that take elements in any place of a tile."""


def narrowest(kernel: Kernel) -> int:
    """Bytes of an element, in the buffer where they are fewest."""
    return min((p.dtype.itemsize for p in kernel.params), default=4)


def vector(kernel: Kernel) -> int:
    """Elements that are a vector, or several, in every buffer of the kernel."""
    return BYTES // narrowest(kernel)


def begin_of_rows(kernel: Kernel, rows: Sequence[Axis]) -> Index | None:
    """Where a row begins in most buffers that have it, if it begins or ends at no whole vector.

    rows: the axes of what is reduced. None too where a statement cannot be taken from another place on.
    """
    if len(rows) != 1 or not isinstance(rows[0].size, int):
        return None
    r = rows[0].var
    begins: Counter[Index] = Counter()
    for s in kernel.body:
        if isinstance(s, Scan) or isinstance(s, Reduce) and s.kind not in PLACED:
            return None
        if isinstance(s, Store) and s.mode != "set":
            return None
        places = [e.args[1] for e in _unconditional(s.value) if e.op == "load"]
        places += [s.index] if isinstance(s, Store) else []
        begins.update(b for i in places if (b := _begin(i, r)) is not None)
    if not begins:
        return None
    begin = begins.most_common(1)[0][0]
    assert isinstance(begin, ix.Poly)
    distances = [rows[0].size, *(c for _, c in begin.terms)]
    return None if all(d % vector(kernel) == 0 for d in distances) else begin


def _unconditional(value: Expr) -> list[Expr]:
    """The expressions below a value that are computed for every element: no load under a condition, whose
    position may be none."""
    found: dict[Expr, None] = {}
    stack = [value]
    while stack:
        e = stack.pop()
        if e not in found:
            found[e] = None
            stack += (e.args[0], e.args[2]) if e.op == "masked" else ex.children(e)
    return list(found)


def _begin(i: Index, r: Var) -> Index | None:
    """Where the row of an access begins: one that goes along it, from a place that no data tells and that is
    not below 0 (Triton's division rounds towards it)."""
    split = ix.coefficient(i, r)
    if split is None or split[0] != 1 or not isinstance(split[1], ix.Poly):
        return None
    begin = split[1]
    if any(isinstance(a, ix.Opaque) for a in ix.atoms(begin)):
        return None
    low = ix.limit(begin, upper=False)
    return begin if low is not None and ix.nonnegative(low) else None


@dataclass(frozen=True)
class Walk:
    """The text of a loop along such rows. r: the reduced axis; width: elements of V; narrow: bytes of the
    narrowest buffer's elements."""

    begin: Index
    r: Axis
    width: int
    narrow: int

    @property
    def extent(self) -> int:
        assert isinstance(self.r.size, int)
        return self.r.size

    def address(self, i: Index) -> str | None:
        """Where an access is, told from the walk's begin: so many whole vectors behind; None if elsewhere."""
        own = _begin(i, self.r.var)
        ahead = None if own is None else own - self.begin
        if not isinstance(ahead, int) or ahead % self.width:
            return None
        return "first + at" + (f" + {ahead}" if ahead else "")

    def positions(self, begin: str) -> list[str]:
        """Before the loop; begin: the text of it."""
        return [f"row = {begin}", "first = row // V * V", "lead = row - first"]

    @property
    def rest(self) -> str:
        """Where the steps behind the whole ones begin, and where the walk ends at the latest."""
        return f"{self.extent} // R * R, {self.extent} + V - 1"

    @property
    def steps_at_ends(self) -> list[str]:
        """The loop over the first step and those behind the whole ones."""
        behind = f"{self.extent} // R"
        return [
            f"for end in range(0, 1 + ({self.extent} + V - 2) // R - {behind} + 1):",
            f"start = tl.where(end == 0, 0, ({behind} + end - 1) * R)",
        ]

    def head(self, whole: bool) -> list[str]:
        """Of a step: the element of each place, which of them there are, and which lie in vectors within the
        row; whole: all."""
        positions = ["at = start + tl.arange(0, R)[None, :].to(INDEX)", "r = at - lead", f"{self.r.var} = r"]
        masks = [
            f"live_r = (r >= 0) & (r < {self.extent})",
            f"whole_r = (at // V * V >= lead) & (at // V * V + V <= lead + {self.extent})",
        ]
        return positions + ([] if whole else masks)

    def read(self, live: str, itemsize: int) -> str:
        """The condition of a load, given that of its elements: vectors that begin in the row, or reach into
        it."""
        times = itemsize // self.narrow
        v = "V" if times == 1 else f"(V // {times} if V > 1 else 1)"
        return live.replace("live_r", f"(at // {v} * {v} < lead + {self.extent})")

    def store(self, where: str, value: str, live: str) -> list[str]:
        if "live_r" not in live:
            return [f"tl.store({where}, {value}{f', mask={live}' if live else ''})"]
        return [
            f"tl.store({where}, {value}, mask={live.replace('live_r', 'whole_r')})",
            "if V > 1:",
            f"    tl.store({where}, {value}, mask={live} & (whole_r == 0))",
        ]
