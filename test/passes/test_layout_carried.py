"""What the layout pass takes for channels-last without asking torch is what torch would say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from dicp.ir.verify import infer, same_stride
from dicp.ops.library import register
from dicp.ops.table import rows
from dicp.passes.layout import _carried_on

aten = torch.ops.aten
IMAGES = (2, 4, 3, 5)
ELEMENTWISE = [op for row in rows() if row.kind == "elementwise" for op in row.overloads]


def node_of(op: Any, mode: FakeTensorMode, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A call whose tensors are inputs of a graph."""
    graph = fx.Graph()

    def put(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = mode.from_tensor(a)
            return node
        return [put(x) for x in a] if isinstance(a, list) else a

    return graph.call_function(op, tuple(put(a) for a in args), kwargs)


def told_and_due(op: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The call traced with contiguous images, as it is told for channels-last ones, and as torch says."""
    mode = FakeTensorMode()
    node = node_of(op, mode, args, kwargs)
    node.meta["val"] = infer(node, mode)
    images = {}
    for n in node.all_input_nodes:
        value = n.meta["val"]
        with mode:
            images[n] = value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
    told = _carried_on(node, images)
    for n, value in images.items():
        n.meta["val"] = value
    return told, infer(node, mode)


def arguments(op: OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Of the schema: images for tensors, numbers for numbers, defaults for what has them."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for a in op._schema.arguments:
        kind = str(a.type)
        if kind == "Tensor" and a.name == "value":
            args.append(torch.ones(()))
        elif kind == "Tensor":
            args.append(torch.ones(IMAGES, dtype=torch.bool if a.name in ("condition", "mask") else dtype))
        elif a.name == "decimals":
            kwargs[a.name] = 2
        elif a.name == "rounding_mode":
            kwargs[a.name] = "floor"
        elif a.has_default_value() and a.name not in ("min", "max", "other"):
            if a.name == "dtype" and kind.startswith("Optional"):
                kwargs[a.name] = torch.float64 if op is aten._to_copy.default else None
        elif "Tensor" in kind:
            args.append(torch.ones(IMAGES, dtype=dtype))
        elif a.name == "dtype":
            args.append(torch.float64)
        else:
            args.append(1)
    return args, kwargs


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_elementwise_calls_carry_the_order_on(op: OpOverload) -> None:
    for dtype in (torch.float32, torch.bool, torch.int32, torch.complex64):
        args, kwargs = arguments(op, dtype)
        try:
            told, due = told_and_due(op, args, kwargs)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):  # no call of this dtype
            continue
        assert told is None or told.dtype == due.dtype and told.shape == due.shape
        assert told is None or same_stride(told, due)
        if op in (aten.add.Tensor, aten.silu.default, aten.relu.default, aten.where.self):
            assert told is not None
        return
    pytest.fail("called with no dtype")


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WINDOWS = [(1, 1, 1, False), (3, 1, 1, False), (3, 2, 2, False), (3, 1, 2, False), (3, 2, 1, True)]
"""Size, stride, dilation, and whether the convolution is transposed."""


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolutions_of_every_kind(window: tuple[int, int, int, bool], groups: int, dtype: torch.dtype) -> None:
    size, stride, dilation, transposed = window
    x, w = torch.randn(2, 8, 9, 9).to(dtype), torch.randn(8, 8 // groups, size, size).to(dtype)
    more = [[stride] * 2, [1, 1], [dilation] * 2, transposed, [0, 0], groups]
    told, due = told_and_due(aten.convolution.default, [x, w, None, *more], {})
    assert told is None or same_stride(told, due) and told.dtype == due.dtype


SHAPES = [(2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 3, 5), (2, 4, 1, 1), (2, 4, 1, 5), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions_and_group_norms_carry_the_order_on(shape: tuple[int, ...]) -> None:
    register()
    x, several = torch.randn(shape), shape[1] > 1 and shape[2] * shape[3] > 1
    for channels, dtype in itertools.product((6, 1), (torch.float32, torch.bfloat16)):
        w = torch.randn(channels, shape[1], 1, 1, dtype=dtype)
        args = [x.to(dtype), w, None, [1, 1], [0, 0], [1, 1]]
        for op, more in (
            (aten.convolution.default, [False, [0, 0], 1]),
            (torch.ops.dicp.conv.default, [1, "relu"]),
        ):
            each = [*args[:3], *([None] if more[-1] == "relu" else []), *args[3:], *more]
            told, due = told_and_due(op, each, {})
            assert told is None or same_stride(told, due) and told.dtype == due.dtype
            assert (told is not None) == (several and channels > 1)
    scale = torch.randn(shape[1])
    norm = [x, scale, scale, shape[0], shape[1], shape[2] * shape[3], 1, 1e-5]
    told, due = told_and_due(aten.native_group_norm.default, norm, {})
    assert (told is not None) == several
    unscaled = [x, None, None, *norm[3:]]
    for results, right in ((told, due), told_and_due(aten.native_group_norm.default, unscaled, {})):
        for a, b in zip(results or right, right):
            assert same_stride(a, b) and a.dtype == b.dtype and a.shape == b.shape
