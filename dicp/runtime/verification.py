"""Calls whose results are compared with what was traced, and inputs with what they were (`DICP_VERIFY=1`).

A vendor that gives another dtype or size, hands an input's memory out as a result, or writes into an input
would have users see wrong values later, and elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.errors import VerifyError
from dicp.ir.printer import op_name, user_location
from dicp.ops.aliases import base_of
from dicp.passes.facts import mutated_arguments, writes_input


@dataclass(frozen=True)
class Due:
    """A result that is a strided tensor, as traced. given: it is an input, or a view of one, or may be.
    made_by: the op, and where the user calls it."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]  # None: symbolic
    given: bool
    made_by: str

    @staticmethod
    def of(result: Any) -> Due | None:
        """None for other results."""
        val = result.meta.get("val") if isinstance(result, fx.Node) else None
        if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
            return None
        shape = tuple(n if isinstance(n, int) else None for n in val.shape)
        return Due(val.dtype, shape, _may_be_given(result), maker(result))

    def mismatch(self, t: Any) -> str:
        """What it is instead of what is due; "" where dtype and sizes fit."""
        # torch's trace of what is quantised has the dtype that it had before
        alike = isinstance(t, torch.Tensor) and (t.dtype == self.dtype or t.is_quantized)
        if alike and t.dim() == len(self.shape):
            if all(want in (None, n) for n, want in zip(t.shape, self.shape, strict=True)):
                return ""
        is_now = f"{t.dtype} {list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        sizes = ["?" if n is None else n for n in self.shape]
        return f"{is_now}, where {self.dtype} {sizes} is due"


def _may_be_given(result: fx.Node) -> bool:
    """Whether it is an input's memory. A higher-order operator may hand its operands on."""
    base = base_of(result)
    if writes_input(base):
        return True
    if base.target is operator.getitem:
        base = base.args[0]  # type: ignore[assignment]
    return base.op in ("placeholder", "get_attr") or isinstance(base.target, torch._ops.HigherOrderOperator)


def maker(node: fx.Node) -> str:
    """An op and where the user calls it."""
    where = user_location(node)
    return op_name(node.target) + (f" ({where})" if where else "")


_WHOSE = "this is the vendor's, or a pass's"


class Verified:
    """The function of a graph's inputs, as one list. Made before the passes see the graph.

    owned: the caller keeps none of its inputs (a backward), so that they are not looked at."""

    def __init__(self, name: str, gm: fx.GraphModule, owned: bool) -> None:
        self.name = name
        self._boxed_call = True
        self.call: Callable[[list[Any]], Any] | None = None
        self.due = [Due.of(r) for r in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        written = {base_of(n) for call in gm.graph.nodes for n in mutated_arguments(call)}
        self.untouched = [] if owned else [k for k, n in enumerate(inputs) if n not in written]

    def __call__(self, args: list[Any]) -> Any:
        """Raises VerifyError."""
        assert self.call is not None
        given = list(args)
        before = {k: given[k].detach().clone() for k in self.untouched if _is_plain(given[k])}
        results = self.call(args)
        self._check_results(results, [t for t in given if _is_plain(t)])
        for k, was in before.items():
            if not _same(given[k], was):
                raise VerifyError(f"{self.name}: input {k} was written, which the graph does not do")
        return results

    def _check_results(self, results: Any, given: Sequence[torch.Tensor]) -> None:
        if not isinstance(results, (tuple, list)) or len(results) != len(self.due):
            gave = len(results) if isinstance(results, (tuple, list)) else type(results).__name__
            raise VerifyError(f"{self.name}: the program gave {gave}, where {len(self.due)} results are due")
        storages = {t.untyped_storage().data_ptr() for t in given if t.untyped_storage().nbytes()}
        for k, (t, due) in enumerate(zip(results, self.due, strict=True)):
            if due is None:
                continue
            what = f"{self.name}: result {k}, of {due.made_by}"
            if wrong := due.mismatch(t):
                raise VerifyError(f"{what}, is {wrong}", todo=_WHOSE)
            if not due.given and _is_plain(t) and t.untyped_storage().data_ptr() in storages:
                wrong = "shares the memory of an input, of which it is no view"
                raise VerifyError(f"{what}, {wrong}", todo=_WHOSE)


def _is_plain(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type != "meta"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


__all__ = ["Due", "Verified", "maker"]
