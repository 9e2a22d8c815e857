"""Calls that eager refuses and fake tensors let pass. They stay calls of the aten op, which then raises what
the user would see without a compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dicp.compat import known_true

aten = torch.ops.aten
DIMS = ("dim", "dim1", "dim2")


def is_misuse(node: fx.Node) -> bool:
    """Whether eager is known to refuse this call, or may refuse it for a size that is read from data."""
    refuses = _refusals().get(node.target)  # type: ignore[arg-type]
    return refuses is not None and refuses(node)


def _mixed_dtypes(node: fx.Node) -> bool:
    return len({v.dtype for v in _tensors(node)}) > 1


def _floats(node: fx.Node) -> bool:
    return any(v.is_floating_point() for v in _tensors(node))


def _no_elements(node: fx.Node) -> bool:
    return any(_may_be_empty(n) for v in _tensors(node) for n in v.shape)


def _no_elements_along(node: fx.Node) -> bool:
    shape, dim = next(_tensors(node)).shape, node.args[1]
    return bool(shape) and _may_be_empty(shape[dim])  # type: ignore[call-overload]


def _may_be_empty(n: int | torch.SymInt) -> bool:
    """Whether a size is 0, or read from data and maybe 0: other symbols have a guard."""
    if isinstance(n, int):
        return n == 0
    return bool(free_unbacked_symbols(n)) and not known_true(n > 0)


def _dim_out_of_range(node: fx.Node) -> bool:
    rank = max(1, next(_tensors(node)).dim())
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in DIMS:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, int) and not -rank <= given < rank:
                return True
    return False


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for operand in node.all_input_nodes:
        val = operand.meta.get("val")
        if isinstance(val, torch.Tensor):
            yield val


@functools.cache
def _refusals() -> dict[OpOverload, Callable[[fx.Node], bool]]:
    from dicp.ops.library import register

    register()
    dicp: Any = torch.ops.dicp
    dims = (aten._softmax, aten.sort, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter)
    bits = (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not)
    one_dtype = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, dicp.linear)
    return {
        **{op: _dim_out_of_range for packet in dims for op in _overloads(packet)},
        **{op: _floats for packet in bits for op in _overloads(packet)},
        **{op: _mixed_dtypes for packet in one_dtype for op in _overloads(packet)},
        aten.max.default: _no_elements,
        aten.min.default: _no_elements,
        aten.max.dim: _no_elements_along,
        aten.min.dim: _no_elements_along,
    }


def _overloads(packet: Any) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]
