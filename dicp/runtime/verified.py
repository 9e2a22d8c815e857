"""Calls whose results are compared with what was traced, and inputs with what they were (`DICP_VERIFY=1`).

A vendor that gives another dtype or size, hands an input's memory out as a result, or writes into an input
would have users see wrong values later, and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.errors import VerifyError
from dicp.ir.printer import op_name, user_location
from dicp.passes.facts import base_of, mutated_arguments


@dataclass(frozen=True)
class _Due:
    """A result as traced. given: it is an input, or a view of one."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]  # None: symbolic
    given: bool
    made_by: str
    where: str


class Verified:
    """The function of a graph's inputs, as one list. Made before the passes see the graph.

    owned: the caller keeps none of its inputs (a backward), so that they are not looked at."""

    def __init__(self, name: str, gm: fx.GraphModule, owned: bool) -> None:
        self.name = name
        self._boxed_call = True
        self.call: Callable[[list[Any]], Any] | None = None
        self.due = [_due(r) for r in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
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
            problem = _problem(t, due, storages)
            if problem:
                what = f"{self.name}: result {k} ({due.made_by}) {problem}"
                raise VerifyError(what, where=due.where, todo="this is the vendor's, or a pass's")


def _due(result: Any) -> _Due | None:
    val = result.meta.get("val") if isinstance(result, fx.Node) else None
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    shape = tuple(n if isinstance(n, int) else None for n in val.shape)
    given = base_of(result).op in ("placeholder", "get_attr")
    return _Due(val.dtype, shape, given, op_name(result.target), user_location(result) or "")


def _problem(t: Any, due: _Due, storages: set[int]) -> str:
    if not isinstance(t, torch.Tensor):
        return f"is {type(t).__name__}, traced as a tensor"
    sizes = ["?" if n is None else n for n in due.shape]
    fits = t.dtype == due.dtype and t.dim() == len(sizes)
    if not fits or any(want not in (None, n) for n, want in zip(t.shape, due.shape, strict=True)):
        return f"is {t.dtype} {list(t.shape)}, traced as {due.dtype} {sizes}"
    if not due.given and t.layout == torch.strided and t.untyped_storage().data_ptr() in storages:
        return "shares the memory of an input, of which it is no view"
    return ""


def _is_plain(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type != "meta"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


__all__ = ["Verified"]
