"""PyTorch's operator database as plain rows; the only module of this package that imports it.

The database lives under `torch.testing._internal`: it ships in every wheel, and Inductor's own operator suite
runs over it, but it takes seconds to import, so nothing here is imported before a run begins.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

DATABASE = "torch.testing._internal.common_methods_invocations"
Kind = Literal["elementwise", "accumulating"]

# The values of these results are whatever the memory held: only their metadata can be compared.
UNDEFINED_VALUES = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

# Converting a NaN, an infinity or an out-of-range float to an integer is undefined in C++, in eager too; the
# magnitude of the least integer traps in eager's lcm.
UNDEFINED_ON_SPECIAL = frozenset({"byte", "char", "int", "lcm", "long", "short", "to"})

# "Unsafe" says it: whether results share memory is left open, and functionalization takes them for copies.
UNSPECIFIED_ALIASING = frozenset({"unsafe_chunk", "unsafe_split"})


@dataclass(frozen=True)
class Sample:
    """One call of an operator: `call(*args, **kwargs)`; `process` picks the differentiable part of a
    result.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    broadcasts_input: bool


@dataclass(frozen=True)
class Operator:
    """A row of the operator database."""

    name: str
    call: Callable[..., Any]
    inplace: Callable[..., Any] | None
    kind: Kind
    is_ufunc: bool
    is_reduction: bool
    arity: int
    dtypes: frozenset[torch.dtype]
    grad_dtypes: frozenset[torch.dtype]
    info: Any = None
    device: str = "cpu"
    own_samples: Callable[[torch.dtype, bool], Iterator[Sample]] | None = None

    def samples(self, dtype: torch.dtype, requires_grad: bool) -> Iterator[Sample]:
        """The database's samples, the same ones in every process."""
        torch.manual_seed(20230 + sum(map(ord, self.name)))
        if self.own_samples is not None:
            with torch.device(self.device):
                made = list(self.own_samples(dtype, requires_grad))
            yield from made
            return
        for s in self.info.sample_inputs(self.device, dtype, requires_grad=requires_grad):
            yield Sample(
                (s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad, bool(s.broadcasts_input)
            )


def _row(info: Any, device: str) -> Operator:
    from torch.testing._internal.opinfo import core

    kind = torch.device(device).type
    unary = isinstance(info, core.UnaryUfuncInfo)
    binary = isinstance(info, core.BinaryUfuncInfo)
    grads = frozenset(info.supported_backward_dtypes(kind)) if info.supports_autograd else frozenset()
    return Operator(
        name=info.full_name,
        call=info.op,
        inplace=info.inplace_variant,
        kind="elementwise" if unary or binary else "accumulating",
        is_ufunc=unary or binary,
        is_reduction=isinstance(info, core.ReductionOpInfo),
        arity=2 if binary else 1,
        dtypes=frozenset(info.supported_dtypes(kind)),
        grad_dtypes=grads,
        info=info,
        device=device,
    )


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _database() -> Any:
    """torch's module. It asks for expecttest, of which it uses the name of a base class alone: where that is
    not installed, as where PyTorch is only used, an empty stand-in serves while it is imported."""
    if importlib.util.find_spec("expecttest") is not None:
        return importlib.import_module(DATABASE)
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
    try:
        return importlib.import_module(DATABASE)
    finally:
        del sys.modules["expecttest"]


@functools.cache
def operators(device: str = "cpu") -> dict[str, Operator]:
    """Every operator of the database and of `extra.py` by its full name (`name` or `name.variant`),
    sorted.
    """
    database = _database()

    from .extra import EXTRA

    # Random operators are wrapped to seed themselves, which breaks the graph before the operator is reached.
    # This suite seeds every call itself.
    database.wrapper_set_seed = _unseeded
    rows = [_row(info, device) for info in database.op_db]
    rows += [dataclasses.replace(row, device=device) for row in EXTRA]
    return {row.name: row for row in sorted(rows, key=lambda r: r.name)}


def find(name: str, device: str = "cpu") -> Operator:
    """The operator of that full name."""
    return operators(device)[name]
