"""Virtual tensors: what lowering rules compute with.

A `Value` is a shape, a dtype and a function from a logical index to the expression of that element. Views are
index transforms, elementwise ops compose expressions: nothing is computed or stored until a value is
materialised. `Builder` is what a lowering rule may ask of the lowering in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

from dicp.ir.expr import Expr
from dicp.ir.index import Index

Indices = tuple[Index, ...]
Shape = tuple[Index, ...]
ReduceKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "welford"]
ScanKind = Literal["sum", "prod", "max", "min", "logsumexp"]
KINDS = frozenset(get_args(ReduceKind)) | frozenset(get_args(ScanKind))
ScatterMode = Literal["set", "add", "mul", "max", "min"]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that can be asked for any of its elements. `dtype` is the storage dtype; elements are Exprs
    of its compute dtype (float32 for narrower floats). `rows_of`: the value whose rows (the last dim)
    these are, its other dims split or merged."""

    shape: Shape
    dtype: torch.dtype
    fn: Callable[[Indices], Expr]
    rows_of: Value | None = None

    def __call__(self, idx: Indices) -> Expr:
        assert len(idx) == len(self.shape), (idx, self.shape)
        return self.fn(idx)


class Builder(Protocol):
    """The lowering in progress, as its rules see it."""

    @property
    def rounds(self) -> bool:
        """Whether values of a low precision are rounded wherever eager rounds them."""

    def meta(self, node: Any) -> tuple[Shape, torch.dtype]:
        """Shape and dtype of an FX node's (single tensor) result, sizes as Index."""

    def index(self, value: Any) -> Index:
        """A Python int, SymInt or symbolic expression as an Index."""

    def realize(self, value: Value) -> Value:
        """The same tensor, computed once and read from memory."""

    def kept(self, value: Value) -> Value:
        """The same tensor, of which each element is read at many: computed once where the memory costs less
        than making it again."""

    def reduce(
        self,
        kind: ReduceKind,
        shape: Shape,
        extent: Shape,
        dtype: torch.dtype,
        fn: Callable[[Indices, Indices], Expr],
    ) -> Value:
        """Reduce fn(index, reduced index) over `extent`. sum/prod accumulate in the Expr's dtype; max/min
        propagate NaN; argmax/argmin give the first row-major position (int64) in `extent`; any/all give
        bool."""

    def welford(
        self, shape: Shape, extent: Shape, fn: Callable[[Indices, Indices], Expr]
    ) -> tuple[Value, Value]:
        """Mean and sum of squared deviations (m2) over `extent`, in one pass; float32 or float64."""

    def scan(
        self, kind: ScanKind, shape: Shape, axis: int, dtype: torch.dtype, fn: Callable[[Indices], Expr]
    ) -> Value:
        """Inclusive scan of fn along one axis."""

    def arg_scan(
        self,
        kind: Literal["max", "min"],
        shape: Shape,
        axis: int,
        dtype: torch.dtype,
        fn: Callable[[Indices], Expr],
    ) -> tuple[Value, Value]:
        """cummax / cummin: running best and its int64 position (last of equals, NaN wins), along one axis."""

    def scatter(
        self,
        base: Value,
        extent: Shape,
        fn: Callable[[Indices], tuple[Indices, Expr]],
        mode: ScatterMode,
        unique: bool = False,
    ) -> Value:
        """base, then for each index of `extent`, fn gives (target index, element) which is set into or
        combined with the target. Duplicates combine (add...); for "set" the last in row-major order wins.
        `unique`: targets are known to differ."""

    def indirect(self, position: Expr, size: Index, what: str, wrap: bool = True) -> Index:
        """A run-time integer as an index into a dimension of `size`. Negative counts from the end when
        `wrap`. Out of range raises IndexError (naming `what` and the user's line) when the program runs."""

    def nonzero(self, divisor: Expr, what: str) -> Expr:
        """An integer that is not 0. Where it is, the program raises ZeroDivisionError when it runs."""
