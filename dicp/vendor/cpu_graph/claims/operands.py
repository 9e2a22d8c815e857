"""What our templates of matrix products are given (struct Product of include/dicp_product.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal
from dicp.ir import index as ix
from dicp.ir.memory_order import order_of
from dicp.ops.library import NARROW_WEIGHTS
from dicp.schedule.defs import Call, View
from dicp.vendor.cpu_graph.claims.common import FLOATS, activation_of, argument, aten, dtype_of
from dicp.vendor.cpu_graph.expression import STORAGE


@dataclass(frozen=True)
class Operands:
    """Positions of a call's operands: y = act(x w * scale + bias) + other. x: [(B,) ..., K].

    transposed: w is [(B,) N, K], else [(B,) K, N].
    """

    x: int
    w: int
    bias: int | None = None
    other: int | None = None
    scale: int | None = None
    transposed: bool = False
    act: str = "none"


def operands_of(node: fx.Node) -> Operands | None:
    """Of a product that the templates have the form of."""
    ops, act = torch.ops.dicp, argument
    if node.target is ops.linear.default:
        return Operands(0, 1, bias=2, other=3, transposed=True, act=act(node, 4, "act", "none"))
    if node.target is ops.scaled_linear.default:
        return Operands(0, 1, scale=2, bias=3, other=4, transposed=True, act=act(node, 5, "act", "none"))
    if node.target in (aten.mm.default, aten.bmm.default):
        return Operands(0, 1)
    if node.target not in (aten.addmm.default, aten.baddbmm.default) or not _is_plain_sum(node):
        return None
    added, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if node.target is aten.addmm.default and _same(added.shape, result.shape[-1:]):
        return Operands(1, 2, bias=0)
    return Operands(1, 2, other=0) if _same(added.shape, result.shape) else None


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether an addmm or baddbmm neither scales the product nor what is added."""
    return all(node.kwargs.get(k, 1) == 1 for k in ("beta", "alpha"))


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(known_equal(m, n) for m, n in zip(a, b, strict=True))


def reads(node: fx.Node, at: Operands) -> bool:
    """Whether the templates have the dtypes of the operands."""
    dtype, w = dtype_of(node), dtype_of(node.args[at.w])
    return dtype in FLOATS and dtype_of(node.args[at.x]) == dtype and w in (dtype, *NARROW_WEIGHTS)


def is_batched(node: fx.Node) -> bool:
    return node.target in (aten.bmm.default, aten.baddbmm.default)


def as_traced(lowering: Any, node: fx.Node, args: Sequence[Any], *positions: int) -> list[Any]:
    """What has to be written for the call lies in the order that it was traced in, so that what is computed
    from a weight is written as the weight lies, not transposed; what is in memory stays as it is."""
    args = list(args)
    for k in positions:
        order = order_of(node.args[k].meta["val"])  # type: ignore[union-attr]
        if len(order) == 2 or order[0] == 0:  # batches outermost, or BLAS copies all of them
            args[k] = lowering.operand(args[k], order=order)
    return args


def prepare(
    lowering: Any, node: fx.Node, args: Sequence[Any], at: Operands, columns_of_x: bool = False
) -> Sequence[Any]:
    """Dense rows of x (or columns, if those may be), dense bias and other, and a weight of which one dim is
    dense."""
    given = args[at.w]
    args = as_traced(lowering, node, args, at.w)
    for k in (at.bias, at.other, at.scale):
        if k is not None and k < len(args) and args[k] is not None:
            args[k] = lowering.operand(args[k], dense=True)
    x, w = lowering.operand(args[at.x]), lowering.operand(args[at.w])
    lies_well = len(x.shape) == len(w.shape) and (x.strides[-1] == 1 or columns_of_x and x.strides[-2] == 1)
    args[at.x] = x if lies_well else lowering.operand(args[at.x], dense=True)
    args[at.w] = w if 1 in w.strides[-2:] else lowering.operand(given, dense=True)
    return args


def product_words(
    sizes: tuple[Any, Any, Any, Any],
    *,
    x: Sequence[Any],
    w: Sequence[Any],
    y: Sequence[Any],
    other: Sequence[Any] = (0, 0),
    scale: Sequence[Any] = (0, 0),
) -> list[Any]:
    """struct Product of dicp_product.h: batch, rows, columns and depth; strides as it has them."""
    return [*sizes, *x, *w, *y, *other, *scale]


@dataclass(frozen=True)
class Given:
    """A call's operands; of those after w, those that are."""

    x: View
    w: View
    scale: View | None
    bias: View | None
    other: View | None
    y: Any
    batched: bool
    transposed: bool

    @property
    def rows(self) -> Any:
        """Of each of the batch."""
        return self.x.shape[1] if self.batched else ix.product(self.x.shape[:-1])

    @property
    def across(self) -> bool:
        """Whether the columns of w are dense, not its depth."""
        n, k = self._dims_of_w
        # where both dims are dense, one of them has a single element
        return not (self.w.strides[k] == 1 and (self.w.strides[n] != 1 or self.w.shape[n] == 1))

    @property
    def _dims_of_w(self) -> tuple[int, int]:
        """Columns, and depth."""
        return (-2, -1) if self.transposed else (-1, -2)

    def kinds(self) -> dict[str, str]:
        """The types of the parameters."""
        scale = torch.float32 if self.scale is None else self.scale.buffer.dtype
        return {
            "T": STORAGE[self.y.dtype],
            "W": STORAGE[self.w.buffer.dtype],
            "S": STORAGE[scale],
        }

    def sizes(self) -> list[Any]:
        """The words of struct Product."""
        x, w, n, k = self.x, self.w, *self._dims_of_w
        columns, depth, batched = w.shape[n], w.shape[k], self.batched
        flat = len(x.shape) == len(w.shape)
        return product_words(
            (x.shape[0] if batched else 1, self.rows, columns, depth),
            x=(x.strides[0] if batched else 0, *(x.strides[-2:] if flat else (depth, 1))),
            w=(w.strides[0] if batched else 0, w.strides[k], w.strides[n]),
            y=(self.y.strides[0] if batched else 0, columns),
            other=(0 if self.other is None or not batched else self.other.strides[0], columns),
            scale=(0, 0 if self.scale is None or self.scale.shape in ((), (1,)) else 1),
        )


def given(call: Call, at: Operands) -> Given:
    args = [*call.args, *[None] * 5]
    bias, other, scale = (None if k is None else args[k] for k in (at.bias, at.other, at.scale))
    return Given(
        args[at.x], args[at.w], scale, bias, other, call.outputs[0], is_batched(call.node), at.transposed
    )


PARAMETERS = (
    "const {T}* x, const {W}* w, const {S}* scale, const {T}* bias, const {T}* other, {T}* y, "
    "const int64_t* sizes, float low, float high"
)


def arguments(writer: Any, g: Given, act: str, result: str | None = None) -> list[str]:
    """In the order of PARAMETERS. result: the pointer of y's memory, where that is not planned."""
    sizes, _ = writer.ints(g.sizes())
    pointers = [writer.pointer_to(v) for v in (g.x, g.w, g.scale, g.bias, g.other)]
    _, limits = activation_of(act)
    return [*pointers, writer.pointer(g.y) if result is None else result, sizes, *limits]


__all__ = [
    "PARAMETERS",
    "Given",
    "Operands",
    "arguments",
    "given",
    "is_batched",
    "operands_of",
    "prepare",
    "product_words",
    "reads",
]
