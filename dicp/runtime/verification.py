"""Functions of a vendor's making whose results are compared with what was traced; and, with `DICP_VERIFY=1`,
whose inputs are compared with what they were.

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

from dicp.errors import DicpError, VendorError, VerifyError
from dicp.ir.printer import op_name, user_location
from dicp.ops.aliases import base_of
from dicp.passes.facts import mutated_arguments, writes_input


@dataclass(frozen=True)
class Due:
    """A result that is a strided tensor, as traced. given: it is an input, or a view of one, or may be.
    made_by: the op, and where the user calls it."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]  # None: symbolic
    device: str
    given: bool
    made_by: str

    @staticmethod
    def of(result: Any) -> Due | None:
        """None for other results."""
        val = result.meta.get("val") if isinstance(result, fx.Node) else None
        if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
            return None
        shape = tuple(n if isinstance(n, int) else None for n in val.shape)
        return Due(val.dtype, shape, val.device.type, _may_be_given(result), maker(result))

    def mismatch(self, t: Any) -> str:
        """What it is instead of what is due; "" where dtype, sizes and device fit."""
        # torch's trace of what is quantised has the dtype that it had before
        alike = isinstance(t, torch.Tensor) and (t.dtype == self.dtype or t.is_quantized)
        if alike and t.dim() == len(self.shape):
            if all(want in (None, n) for n, want in zip(t.shape, self.shape, strict=True)):
                there = t.device.type
                return "" if there == self.device else f"on {there}, where one on {self.device} is due"
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


def results_due(gm: fx.GraphModule) -> tuple[Due | None, ...]:
    """Of a graph."""
    return tuple(Due.of(r) for r in gm.graph.output_node().args[0])  # type: ignore[union-attr]


def check_results(
    found: Any, due: Sequence[Due | None], whose: str, error: type[DicpError] = VendorError, todo: str = ""
) -> None:
    """Raises the error, which begins with whose results they are."""
    if not isinstance(found, (tuple, list)):
        raise error(f"{whose} gave {type(found).__name__}, where a tuple or list is due", todo=todo)
    if len(found) != len(due):
        raise error(f"{whose} gave {len(found)} of {len(due)} results", todo=todo)
    for k, (t, one) in enumerate(zip(found, due, strict=True)):
        if one is not None and (wrong := one.mismatch(t)):
            which = f"result {k + 1} of {len(found)}, of {one.made_by}"
            raise error(f"{whose} gave as {which}, {wrong}", todo=todo)


class Checked:
    """A function that a vendor made, whose results are what was traced (VendorError if not), and whose
    exceptions tell which function raised them. Can be pickled where the vendor's can."""

    def __init__(self, run: Callable[..., Any], due: Sequence[Due | None], label: str) -> None:
        self.run, self.due, self.label = run, tuple(due), label

    def __call__(self, *args: Any) -> Any:
        try:
            found = self.run(*args)
        except Exception as e:  # as the vendor's code raised it
            e.add_note(f"raised by {self.label}")
            raise
        check_results(found, self.due, self.label)
        return found


class Verified:
    """The function of a graph's inputs, as one list. Made before the passes see the graph.

    label: whose function it is. owned: the caller keeps none of its inputs (a backward), so that they are not
    looked at."""

    def __init__(self, label: str, vendor: str, gm: fx.GraphModule, owned: bool) -> None:
        self.label, self.todo = label, f"this is {vendor}'s, or a pass's"
        self._boxed_call = True
        self.call: Callable[[list[Any]], Any] | None = None
        self.due = results_due(gm)
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.names = [n.name for n in inputs]
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
                wrong = f"wrote input {k} ({self.names[k]}), which the graph does not do"
                raise VerifyError(f"{self.label} {wrong}", todo=self.todo)
        return results

    def _check_results(self, results: Any, given: Sequence[torch.Tensor]) -> None:
        check_results(results, self.due, self.label, VerifyError, self.todo)
        storages = {t.untyped_storage().data_ptr() for t in given if t.untyped_storage().nbytes()}
        for k, (t, due) in enumerate(zip(results, self.due, strict=True)):
            given_away = due is not None and not due.given and _is_plain(t)
            if given_away and t.untyped_storage().data_ptr() in storages:
                which = f"result {k + 1} of {len(results)}, of {due.made_by}"  # type: ignore[union-attr]
                wrong = f"gave as {which}, memory of an input, of which it is no view"
                raise VerifyError(f"{self.label} {wrong}", todo=self.todo)


def _is_plain(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type != "meta"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


__all__ = ["Checked", "Due", "Verified", "check_results", "maker", "results_due"]
