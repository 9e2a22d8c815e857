"""Calls that eager refuses and fake tensors let pass. They stay calls of the aten op, which then raises what
the user would see without a compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

aten = torch.ops.aten
DIMS = ("dim", "dim1", "dim2")


def misuse(node: fx.Node) -> str | None:
    """Why eager refuses this call; None where nothing is known against it."""
    check = _checks().get(node.target)  # type: ignore[arg-type]
    return None if check is None else check(node)


def _one_dtype(node: fx.Node) -> str | None:
    dtypes = {v.dtype for v in _tensors(node)}
    return f"operands of {' and '.join(sorted(map(str, dtypes)))}" if len(dtypes) > 1 else None


def _no_floats(node: fx.Node) -> str | None:
    dtype = next((v.dtype for v in _tensors(node) if v.is_floating_point()), None)
    return None if dtype is None else f"no bits of {dtype}"


def _some_elements(node: fx.Node) -> str | None:
    empty = any(isinstance(n, int) and n == 0 for v in _tensors(node) for n in v.shape)
    return "the extreme of no elements" if empty else None


def _dims_in_range(node: fx.Node) -> str | None:
    rank = max(1, next(_tensors(node)).dim())
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in DIMS:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, int) and not -rank <= given < rank:
                return f"dim {given} of {rank}"
    return None


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for operand in node.all_input_nodes:
        val = operand.meta.get("val")
        if isinstance(val, torch.Tensor):
            yield val


@functools.cache
def _checks() -> dict[OpOverload, Callable[[fx.Node], str | None]]:
    from dicp.ops.library import register

    register()
    dicp: Any = torch.ops.dicp
    dims = (aten._softmax, aten.sort, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter)
    bits = (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not)
    one_dtype = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, dicp.linear, dicp.conv)
    return {
        **{op: _dims_in_range for packet in dims for op in _overloads(packet)},
        **{op: _no_floats for packet in bits for op in _overloads(packet)},
        **{op: _one_dtype for packet in one_dtype for op in _overloads(packet)},
        aten.max.default: _some_elements,
        aten.min.default: _some_elements,
    }


def _overloads(packet: Any) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]
