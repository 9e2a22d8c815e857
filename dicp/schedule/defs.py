"""What lowering produces: definitions of named tensors, in program order, and the buffers that may hold
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.ir import index as ix
from dicp.ir.expr import Expr, compute_dtype
from dicp.ir.index import Index, Var
from dicp.ir.value import Indices, Shape, Value
from dicp.schedule.symbols import Symbols
from dicp.vendor.base import Machine


@dataclass(eq=False)
class Buffer:
    """A named tensor in memory: sizes and strides in elements.

    kind: input (a graph input), packed (an input that only the vendor's library can read), constant (a tensor
    that the graph holds), temp (arena), output (allocated for the caller), library (allocated by a library
    call), extern (a result of an aten call made from Python), alias (what `base`, whose memory it is, holds
    once a scatter or a call has updated it).
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    strides: Shape
    kind: str = "temp"
    base: Buffer | None = None

    def flat(self, idx: Indices) -> Index:
        """Position, in elements, of a logical index."""
        total: Index = 0
        for i, s in zip(idx, self.strides, strict=True):
            total = total + i * s if isinstance(i, ix.Poly) else s * i + total
        return total

    @property
    def numel(self) -> Index:
        return ix.product(self.shape)

    @property
    def nbytes(self) -> Index:
        """Bytes that the memory has: with the gaps between rows that lie apart. Rows of symbolic sizes have
        none (claims ask for gaps where sizes are numbers)."""
        numel, span = self.numel, self.span
        elements = max(numel, span) if isinstance(numel, int) and isinstance(span, int) else numel
        return elements * self.dtype.itemsize

    @property
    def span(self) -> Index:
        """Elements from the first to beyond the last: fewer than `numel` where some share a place."""
        return _span(self.shape, self.strides)

    def value(self) -> Value:
        dtype = compute_dtype(self.dtype)
        return Value(self.shape, self.dtype, lambda idx: Expr("at", (self.name, idx), dtype))


def _span(shape: Shape, strides: Shape) -> Index:
    total: Index = 1
    for n, s in zip(shape, strides, strict=True):
        total = total + (s * (n - 1) if isinstance(s, ix.Poly) else (n - 1) * s)
    return total


@dataclass(eq=False)
class View:
    """A strided window on a buffer: what library and extern calls take as a tensor.

    Of a result only: conj, neg say that its elements are conjugates, negatives, of those in memory (torch's
    bits of a tensor); seen_as, that what lies in memory is read as another dtype, in whose elements strides
    and offset are then."""

    buffer: Buffer
    shape: Shape
    strides: Shape
    offset: Index = 0
    conj: bool = False
    neg: bool = False
    seen_as: torch.dtype | None = None

    @property
    def span(self) -> Index:
        """Elements from the first to beyond the last."""
        return _span(self.shape, self.strides)


@dataclass(frozen=True)
class Raw:
    """A value that only calls made from Python touch: a sparse or quantised tensor, a generator, a script
    object."""

    name: str


@dataclass(frozen=True)
class Host:
    """A number computed from sizes by the calling Python: `expr` is its sympy expression."""

    expr: Any


@dataclass(eq=False)
class Def:
    """One step of the lowered graph. `outputs` are the buffers it defines, `note` the op and the user's
    line."""

    outputs: tuple[Any, ...]
    note: str = ""


@dataclass(eq=False)
class Pointwise(Def):
    """outputs[0][index] = expr, for all `vars`."""

    vars: tuple[Var, ...] = ()
    expr: Expr = None  # type: ignore[assignment]
    index: Indices = ()


@dataclass(eq=False)
class Reduction(Def):
    """outputs[k][index] = k-th result of `kind` over rvars of expr; `scan` keeps every prefix. `rounded`: who
    reads it in the same kernel gets it rounded to its dtype, as memory would hold it."""

    vars: tuple[Var, ...] = ()
    rvars: tuple[Var, ...] = ()
    kind: str = "sum"
    expr: Expr = None  # type: ignore[assignment]
    index: Indices = ()
    scan: bool = False
    rounded: bool = False


@dataclass(eq=False)
class Scatter(Def):
    """outputs[0] (already holding the base: the same memory as `base`) at target(vars) mode= expr."""

    vars: tuple[Var, ...] = ()
    target: Indices = ()
    expr: Expr = None  # type: ignore[assignment]
    mode: str = "set"
    unique: bool = False
    base: Buffer = None  # type: ignore[assignment]


@dataclass(eq=False)
class Call(Def):
    """A library call (`claim` set) or an extern aten call. Tensor arguments are Views; other arguments are
    raw or Index.

    `node` is the FX node, for its target and for messages.
    """

    node: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    claim: Any = None
    results: tuple[Any, ...] = ()  # what the op returns, as `leaves` orders it: Buffer, Raw, Index or None
    host: bool = False  # a read or a check of numbers by the calling Python
    why: str = ""  # of an extern: what neither kernels nor libraries do


def leaves(val: Any) -> list[tuple[tuple[int, ...], Any]]:
    """What an op returns (tensors and numbers, in lists and tuples), each with the indices leading there."""
    if not isinstance(val, (list, tuple)):
        return [((), val)]
    return [((k, *path), leaf) for k, item in enumerate(val) for path, leaf in leaves(item)]


def views(x: Any) -> list[View]:
    """Every View inside a nested argument structure."""
    if isinstance(x, View):
        return [x]
    if isinstance(x, (list, tuple)):
        return [v for item in x for v in views(item)]
    if isinstance(x, dict):
        return [v for item in x.values() for v in views(item)]
    return []


def operands(x: Any) -> list[Any]:
    """Every View and symbolic number inside a nested argument structure, in order."""
    if isinstance(x, (View, ix.Poly)):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [v for item in x for v in operands(item)] if isinstance(x, (list, tuple)) else []


class Lowered:
    """The result of lowering: definitions in program order, and how inputs, outputs and mutations bind to
    buffers."""

    def __init__(self) -> None:
        self.defs: list[Def] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[Buffer | Index | None] = []
        self.outputs: list[Any] = []  # View | Index | None | input position wrapped in ("input", k)
        self.free: frozenset[int] = frozenset()  # positions of outputs with any layout (passes/facts.py)
        self.marked: set[str] = set()  # inputs that may be conjugated or negated (runtime/marked_tensors.py)
        self.mutated: set[str] = set()  # inputs that are written to
        self.constants: dict[str, torch.Tensor] = {}
        self.checks: list[str] = []  # messages of the run-time checks, by number (errors.check_error)
        self.symbols: Symbols = Symbols(None)
        self.machine = Machine(threads=1)
        self.device: torch.device | None = None  # of the tensors that were traced, with its index
        self.rounds = False  # whether values passed on inside a kernel are rounded as if through memory
