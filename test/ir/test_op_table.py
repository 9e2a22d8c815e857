"""The op table against eager PyTorch: every rule, executed by the reference builder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dicp.ir.expr import index_value
from dicp.ir.value import Value
from dicp.ops import quantized
from dicp.ops.decompositions import OPENED, PRODUCTS, decomposition_table
from dicp.ops.reference import Reference, run
from dicp.ops.table import Declined, Row, table

aten = torch.ops.aten
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 2.5, 100.0, -100.0, math.inf, -math.inf, math.nan]


def lowered(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the op's rule gives, and what eager gives."""
    expected = op(*args, **kwargs)
    b = Reference()
    graph = torch.fx.Graph()
    holes = tree_map(lambda x: hole(graph, x) if isinstance(x, torch.Tensor) else x, args)
    node = graph.call_function(op, holes)
    node.meta["val"] = expected
    values, named = tree_map(lambda x: b.input(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    result = table()[op].lower(b, node, values, named)
    return tree_map(b.evaluate, result), expected


def hole(graph: torch.fx.Graph, x: torch.Tensor) -> torch.fx.Node:
    node = graph.placeholder("x")
    node.meta["val"] = x
    return node


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    """Same shape, dtype and values, NaN included."""
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, **tolerance)
        return
    torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False, **tolerance)


def samples(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Special values, then random ones."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        x = torch.cat(
            [torch.tensor(SPECIAL, dtype=torch.float64), torch.randn(count, generator=g, dtype=torch.float64)]
        )
        return x[torch.randperm(len(x), generator=g)][:count].to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=g).bool()
    info = torch.iinfo(dtype)
    wide = torch.randint(max(info.min, -2**40), min(info.max, 2**40), (count // 2,), generator=g)
    small = torch.randint(max(info.min, -4), 5, (count - count // 2,), generator=g)
    return torch.cat([wide, small])[torch.randperm(count, generator=g)].to(dtype)


def elementwise_rows() -> list[tuple[Row, OpOverload]]:
    return [(r, op) for op, r in table().items() if r.kind == "elementwise"]


# Settings that have no default, or need another value than 0.5.
SETTINGS: dict[str, list[Any]] = {
    "approximate": ["none", "tanh"], "rounding_mode": ["trunc", "floor", None], "decimals": [0, 1, -1],
    "is_result": [False, True], "self_is_result": [False], "value": [2], "alpha": [1, 2], "eps": [None, 0.25],
    "min_val": [-1.5], "max_val": [1.5], "beta": [2.0], "negative_slope": [0.25], "n": [0, 1],
}
# Where eager disagrees with itself (between dtypes, or between the vector body of a loop and its tail).
UNLIKE_ITSELF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.isfinite,
    "gelu_backward": torch.isfinite,
    "pow": torch.isfinite,
    "hardswish_backward": torch.isfinite,
    "hardtanh_backward": torch.isfinite,
    "logit_backward": lambda x: x.isfinite() & (x != 0),
    "softshrink_backward": torch.isfinite,
    "hardshrink_backward": torch.isfinite,
}
NUMBERS = [2, 0.5, 3, True]


def calls(op: OpOverload, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments for every choice of settings; tensors take the dtypes in turn."""
    choices: list[list[Any]] = []
    params = op._schema.arguments
    kinds = itertools.cycle(dtypes)
    for pos, p in enumerate(params):
        kind = str(p.type)
        if kind == "Tensor" or kind == "Optional[Tensor]":
            dtype = torch.bool if p.name in ("mask", "condition") else next(kinds)
            x = samples(dtype, 48, seed=pos)
            ok = UNLIKE_ITSELF.get(op._overloadpacket.__name__)
            if ok is not None and op._overloadname != "Tensor_Tensor":
                x = torch.where(ok(x), x, 1)
            choices.append([x[0] if p.name == "value" and len(params) < 4 else x])
        elif p.name in SETTINGS:
            choices.append(SETTINGS[p.name])
        elif kind in ("number", "Optional[number]"):
            choices.append(NUMBERS if p.name in ("self", "other", "exponent") else [0.5, 1])
        elif kind == "float":
            choices.append([0.5])
        elif p.name == "dtype":
            choices.append(FLOATS + INTEGERS)
        else:
            choices.append([p.default_value])
    for chosen in itertools.product(*choices):
        args = [x for x, p in zip(chosen, params, strict=True) if not p.kwarg_only]
        kwargs = {p.name: x for x, p in zip(chosen, params, strict=True) if p.kwarg_only}
        yield args, kwargs


class TestElementwise:
    @pytest.mark.parametrize(
        "row,op", elementwise_rows(), ids=lambda x: str(x) if isinstance(x, OpOverload) else ""
    )
    def test_body_agrees_with_eager(self, row: Row, op: OpOverload) -> None:
        ran = 0
        kinds = [(d,) for d in FLOATS + INTEGERS] + [
            (torch.float32, torch.int64),
            (torch.int32, torch.bfloat16),
            (torch.uint8, torch.int16),
            (torch.bfloat16, torch.float32),
        ]
        for dtypes in kinds:
            for args, kwargs in calls(op, dtypes):
                try:
                    op(*args, **kwargs)
                except (RuntimeError, NotImplementedError, TypeError, IndexError, AssertionError):
                    continue
                try:
                    actual, expected = lowered(op, *args, **kwargs)
                except Declined:
                    continue
                low = any(
                    isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args
                )
                if low and kwargs.get("rounding_mode"):
                    continue  # eager rounds the quotient to bfloat16 before it drops the fraction
                try:
                    assert_same(actual, expected, **({"rtol": 0.02, "atol": 0.02} if low else {}))
                except AssertionError as e:
                    raise AssertionError(f"{dtypes} {args[1:]} {kwargs}: {e}") from None
                ran += 1
        assert ran, "eager accepted no arguments"


def f(*shape: int) -> torch.Tensor:
    """Distinct values: position errors show."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) - 7


Case = tuple[OpOverload, tuple[Any, ...]]

VIEWS: list[Case] = [
    (aten.view.default, (f(2, 3, 4), [6, 4])), (aten.view.default, (f(2, 3, 4), [4, 6])),
    (aten.view.default, (f(2, 1, 4), [8, 1, 1])), (aten.view.default, (f(0, 3), [3, 0])),
    (aten.view.default, (f(1), [])), (aten.reshape.default, (f(3, 4).t(), [2, 6])),
    (aten.permute.default, (f(2, 3, 4), [2, 0, -2])), (aten.transpose.int, (f(2, 3, 4), -1, 0)),
    (aten.t.default, (f(2, 3),)), (aten.t.default, (f(4),)), (aten.expand.default, (f(3, 1), [2, -1, 5])),
    (aten.squeeze.dim, (f(2, 1, 3), 1)), (aten.squeeze.default, (f(1, 2, 1),)),
    (aten.squeeze.dims, (f(1, 2, 1), [0])),
    (aten.unsqueeze.default, (f(2, 3), -1)), (aten.select.int, (f(2, 3, 4), -2, -1)),
    (aten.slice.Tensor, (f(7, 3), 0, 1, 6, 2)), (aten.slice.Tensor, (f(7, 3), 0, -5, 2**63 - 1)),
    (aten.slice.Tensor, (f(7, 3), 1, -9, 99)), (aten.slice.Tensor, (f(7, 3), 0, 5, 2)),
    (aten.split.Tensor, (f(7, 3), 3)), (aten.split_with_sizes.default, (f(7, 3), [2, 0, 5])),
    (aten.chunk.default, (f(2, 7), 3, 1)), (aten.unbind.int, (f(2, 3), 1)),
    (aten.as_strided.default, (f(4, 4), [2, 3], [4, 2])), (aten.diagonal.default, (f(3, 4, 5), 1, 1, -1)),
    (aten.diagonal.default, (f(3, 4), -1)), (aten.unfold.default, (f(7, 2), 0, 3, 2)),
    (aten.movedim.int, (f(2, 3, 4), 0, 2)), (aten.movedim.intlist, (f(2, 3, 4), [0, 1], [2, 0])),
    (aten.flip.default, (f(2, 3, 4), [0, -1])), (aten.flip.default, (f(), [])),
    (aten.roll.default, (f(3, 4), [1], [1])),
    (aten.roll.default, (f(3, 4), [5])), (aten.roll.default, (f(3, 4), [-1, 6], [0, 1])),
    (aten.repeat.default, (f(2, 3), [2, 1, 2])), (aten.repeat.default, (f(2, 3), [0, 1])),
    (aten.select_scatter.default, (f(3, 4), f(3) * 9, 1, -2)),
    (aten.slice_scatter.default, (f(7, 2), f(3, 2) * 9, 0, 1, 7, 2)),
    (aten.slice_scatter.default, (f(7, 2), f(7, 2) * 9)),
    (aten.slice_scatter.default, (f(7, 2), f(2, 2) * 9, 0, 4, 6)),
    (aten.diagonal_scatter.default, (f(3, 4), f(2) * 9, -1)),
    (aten.diagonal_scatter.default, (f(3, 4), f(3) * 9, 1)),
    (aten.clone.default, (f(2, 3),)),
]


FACTORIES: list[Case] = [
    (aten.full.default, ([2, 3], 1.5)), (aten.full.default, ([], True)), (aten.full_like.default, (f(2), 3)),
    (aten.new_full.default, (f(2), [3], 4)), (aten.scalar_tensor.default, (2.5,)),
    (aten.ones.default, ([2],)),
    (aten.zeros_like.default, (f(2, 2),)), (aten.new_zeros.default, (f(2), [0, 2])),
    (aten.arange.default, (5,)),
    (aten.arange.start, (2, 7)), (aten.arange.start_step, (1, 9, 3)),
    (aten.arange.start_step, (0.0, 1.0, 0.3)),
    (aten.arange.start_step, (5, 0, -2)), (aten.linspace.default, (0, 1, 7)),
    (aten.linspace.default, (3.0, -2.0, 1)),
    (aten.eye.default, (3,)), (aten.eye.m, (2, 4)), (aten.tril.default, (f(3, 4),)),
    (aten.triu.default, (f(2, 3, 4), -1)), (aten.tril.default, (f(3, 4), 1)),
]

x34, ints = f(2, 3, 4) / 5, torch.tensor([[3, -1, 3], [0, 7, 7]])
holes = torch.tensor([[1.0, math.nan, 3.0], [math.inf, -math.inf, 2.0]])
truths = torch.tensor([[True, False], [True, True]])
REDUCTIONS: list[Case] = [
    (aten.sum.default, (x34,)), (aten.sum.dim_IntList, (x34, [0, -1])),
    (aten.sum.dim_IntList, (x34, [], True)),
    (aten.sum.default, (truths,)), (aten.sum.dim_IntList, (ints.int(), [1], True)),
    (aten.sum.default, (f(),)),
    (aten.sum.dim_IntList, (f(0, 3), [0])), (aten.mean.default, (x34,)), (aten.mean.dim, (x34, [1], True)),
    (aten.mean.dim, (x34.bfloat16(), [1, 2])), (aten.prod.default, (x34 + 2,)),
    (aten.prod.dim_int, (ints, 1)),
    (aten.amax.default, (holes, [1])), (aten.amin.default, (x34, [0, 2], True)),
    (aten.amax.default, (truths, [0])),
    (aten.max.default, (ints,)), (aten.min.default, (holes,)), (aten.max.dim, (ints, 1)),
    (aten.min.dim, (holes, 0, True)), (aten.max.dim, (f(), 0)), (aten.argmax.default, (ints,)),
    (aten.argmax.default, (ints, 1, True)), (aten.argmax.default, (holes, 0)),
    (aten.argmin.default, (x34, None, True)),
    (aten.argmax.default, (f(), 0)), (aten.any.default, (truths,)), (aten.any.dim, (ints, 0)),
    (aten.all.dims, (x34, [0, 1], True)), (aten.all.default, (f(0),)), (aten.any.default, (ints.byte(),)),
    (aten.linalg_vector_norm.default, (x34,)), (aten.linalg_vector_norm.default, (x34, 1, [0], True)),
    (aten.linalg_vector_norm.default, (x34, math.inf, [1, 2])),
    (aten.linalg_vector_norm.default, (x34, 3.0, [-1])),
    (aten.linalg_vector_norm.default, (x34, 0, [0])),
    (aten.linalg_vector_norm.default, (x34, -math.inf, [0])),
    (aten.cumsum.default, (x34, 1)), (aten.cumsum.default, (ints.int(), -1)), (aten.cumsum.default, (f(), 0)),
    (aten.cumprod.default, (x34, 2)), (aten.logcumsumexp.default, (x34, 0)), (aten.cummax.default, (ints, 1)),
    (aten.cummin.default, (holes, 1)), (aten._softmax.default, (x34, 1, False)),
    (aten._softmax.default, (f(), 0, False)),
    (aten._softmax.default, (x34.bfloat16(), -1, False)), (aten._log_softmax.default, (x34, 2, False)),
    (aten._softmax_backward_data.default, (x34, x34.softmax(1), 1, torch.float32)),
    (aten._log_softmax_backward_data.default, (x34, x34.log_softmax(1), 1, torch.float32)),
    (aten.native_layer_norm.default, (x34, [3, 4], f(3, 4), f(3, 4), 1e-5)),
    (aten.native_layer_norm.default, (x34, [4], None, None, 1e-5)),
    (aten.native_group_norm.default, (x34, f(3), None, 2, 3, 4, 3, 1e-5)),
    (aten.native_group_norm.default, (f(2, 4, 3) / 5, f(4), f(4), 2, 4, 3, 2, 1e-5)),
    (aten._native_batch_norm_legit_functional.default, (x34, f(3), f(3), f(3), f(3) + 9, True, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_no_training.default, (x34, f(3), None, f(3), f(3) + 9, 0.1, 1e-5)),
    (aten._native_batch_norm_legit.no_stats, (x34, None, None, True, 0.1, 1e-5)),
]
CORRECTIONS = [{}, {"correction": 0}, {"correction": 2.0, "keepdim": True}]


i3 = torch.tensor([2, 0, 1])
i22 = torch.tensor([[0, 2], [-1, 1]])
mask23 = torch.tensor([[True, False, True], [False, False, True]])
g23 = torch.tensor([[1, 0, 1], [0, 0, 1]])
INDEXING: list[Case] = [
    (aten.embedding.default, (f(5, 3), i22.abs())), (aten.index_select.default, (f(2, 3, 4), 1, i3)),
    (aten.embedding_dense_backward.default, (f(2, 2, 3), i22.abs(), 5, 1, False)),
    (aten.gather.default, (f(3, 4), 1, g23)), (aten.gather.default, (f(), 0, torch.tensor(0))),
    (aten.take.default, (f(3, 4), i22)), (aten.index.Tensor, (f(3, 4), [i22])),
    (aten.index.Tensor, (f(3, 4, 5), [None, i22, i3[:2]])),
    (aten.index.Tensor, (f(3, 4, 5), [i22, None, i3[:2]])),
    (aten.index.Tensor, (f(3, 4, 5), [None, None, i3])), (aten.index.Tensor, (f(3), [torch.tensor(1)])),
    (aten._unsafe_masked_index.default, (f(3, 4), mask23, [g23, i3 + 7 * (i3 > 9)], 5.0)),
    (aten._unsafe_masked_index_put_accumulate.default, (f(3, 4), mask23, [g23, i3], f(2, 3))),
    (aten.bucketize.Tensor, (holes * 3, torch.tensor([-1.0, 0, 3, 3, 9]))),
    (aten.searchsorted.Tensor, (f(2, 7), f(2, 5) * 2)),
    (aten.index_put.default, (f(3, 4), [i3, i3], f(3))), (aten.index_put.default, (f(3, 4), [i3], f(4))),
    (aten.index_put.default, (f(3, 4), [None, i22], f(3, 2, 2), True)),
    (aten.index_put.default, (f(2, 3), [mask23], torch.tensor(5.0))),
    (aten.index_put.default, (f(2, 3, 4), [mask23], f(4), True)),
    (aten.index_put.default, (f(2, 3, 4), [mask23], f(1, 4))),
    (aten.scatter.src, (f(3, 4), 1, torch.tensor([[1, 0, 3], [0, 2, 1]]), f(3, 4) * 9)),
    (aten.scatter.value, (f(3, 4), 0, g23, 2.5)),
    (aten.scatter.reduce, (f(3, 4), 1, g23, f(3, 4))), (aten.scatter_add.default, (f(3, 4), 1, g23, f(2, 3))),
    (aten.scatter_add.default, (f(), 0, torch.tensor([0]), f(1))),
    (aten.scatter_add.default, (f(3, 4).bfloat16(), 0, g23, f(2, 3).bfloat16())),
    *[(aten.scatter_reduce.two, (f(3, 4), 1, g23, f(2, 3) / 2, r))
      for r in ("sum", "prod", "mean", "amax", "amin")],
    (aten.scatter_reduce.two, (ints, 1, g23, ints * 3 - 5, "mean")),
    (aten.index_add.default, (f(3, 4), 1, i3, f(3, 3))),
    (aten.index_add.default, (f(3), 0, torch.tensor([1, 1]), f(2))),
    (aten.index_copy.default, (f(3, 4), 0, i3, f(3, 4) * 2)),
    (aten.index_fill.int_Scalar, (f(3, 4), 1, i3, 8)),
    (aten.index_fill.int_Tensor, (f(3, 4), 0, torch.tensor([-1]), torch.tensor(3.0))),
    (aten.index_reduce.default, (f(3, 4), 0, torch.tensor([1, 1]), f(2, 4), "amax")),
    (aten.cat.default, ([f(2, 3), f(2, 1), f(2, 0), f(2, 4)], 1)), (aten.cat.default, ([f(0), f(2, 3)], -2)),
    (aten.cat.default, ([ints, f(1, 3)],)), (aten.stack.default, ([f(2, 3), f(2, 3) * 2], -1)),
    (aten.constant_pad_nd.default, (f(2, 3), [1, 2, 0, -1], 4)),
    (aten.constant_pad_nd.default, (f(3), [-1, 1])),
    (aten.reflection_pad1d.default, (f(2, 5), [2, 4])),
    (aten.reflection_pad2d.default, (f(1, 4, 5), [1, 2, 3, 0])),
    (aten.replication_pad2d.default, (f(1, 4, 5), [1, 2, 3, 0])),
    (aten.replication_pad1d.default, (f(2, 5), [-1, 6])),
    (aten.reflection_pad2d_backward.default, (f(1, 7, 8), f(1, 4, 5), [1, 2, 3, 0])),
    (aten.replication_pad1d_backward.default, (f(2, 11), f(2, 5), [2, 4])),
]
img = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(3))
vol = torch.randn(2, 5, 6, 7, generator=torch.Generator().manual_seed(4))
POOLING: list[Case] = [
    (aten.max_pool2d_with_indices.default, (img, [3, 3], [2, 2], [1, 1])),
    (aten.max_pool2d_with_indices.default, (img, [2, 3], [], [0, 1], [2, 1], True)),
    (aten.max_pool2d_with_indices.default, (img, [6, 6], [1, 1], [2, 2])),
    (aten.max_pool2d_with_indices.default, (img.bfloat16()[0], 2)),
    (aten.max_pool2d_with_indices.default, (torch.full((1, 3, 3), -math.inf), 2, 2, 1)),
    (aten.max_pool3d_with_indices.default, (vol, [2, 2, 2], [2, 1, 2], [1, 0, 1])),
    (aten.avg_pool2d.default, (img, [3, 3], [2, 2], [1, 1])),
    (aten.avg_pool2d.default, (img, [3, 2], [2, 2], [1, 0], True, False)),
    (aten.avg_pool2d.default, (img, [3, 2], [2, 2], [1, 1], True)),
    (aten.avg_pool2d.default, (img, 2, [], 0, False, True, 3)), (aten.avg_pool3d.default, (vol, 2, [], 1)),
    (aten.avg_pool2d.default, (img, [7, 9])),
    (aten.avg_pool2d_backward.default, (f(2, 3, 4, 5), img, [3, 3], [2, 2], [1, 1], False, True, None)),
    (aten.avg_pool2d_backward.default, (f(2, 3, 4, 5), img, [3, 3], [2, 2], [1, 1], False, False, None)),
    (aten.avg_pool2d_backward.default, (f(2, 3, 3, 3), img, [2, 3], [2, 3], [0, 0], False, True, None)),
    (aten._adaptive_avg_pool2d.default, (img, [1, 1])), (aten._adaptive_avg_pool2d.default, (img, [3, 4])),
    (aten._adaptive_avg_pool2d.default, (img, [9, 3])), (aten._adaptive_avg_pool3d.default, (vol, [2, 3, 5])),
    (aten._adaptive_avg_pool2d_backward.default, (f(2, 3, 1, 1), img)),
    (aten._adaptive_avg_pool2d_backward.default, (f(2, 3, 3, 4), img)),
    (aten._adaptive_avg_pool2d_backward.default, (f(2, 3, 9, 3), img)),
    (aten.adaptive_max_pool2d.default, (img, [3, 4])), (aten.adaptive_max_pool3d.default, (vol, [2, 3, 2])),
    (aten.adaptive_max_pool2d.default, (img, [1, 1])),
]
UNLIKE_SELF = ("sum", "prod", "mean", "amax", "amin")


def label(x: Any) -> str | None:
    if isinstance(x, tuple):
        return ",".join("x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else str(a) for a in x)[
            :60
        ]
    return str(x) if isinstance(x, OpOverload) else None


class TestRules:
    @pytest.mark.parametrize("op,args", VIEWS, ids=label)
    def test_view_agrees_with_eager(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        assert_same(*lowered(op, *args), rtol=0, atol=0)

    @pytest.mark.parametrize("op,args", FACTORIES, ids=label)
    def test_factory_agrees_with_eager(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        assert_same(*lowered(op, *args), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("op,args", REDUCTIONS, ids=label)
    def test_reduction_agrees_with_eager(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        assert_same(*lowered(op, *args))

    @pytest.mark.parametrize("dim", [None, [0, 2], [1]], ids=str)
    @pytest.mark.parametrize("op", [aten.var.correction, aten.std.correction, aten.var_mean.correction,
                                    aten.std_mean.correction], ids=str)
    def test_spread_agrees_with_eager(self, op: OpOverload, dim: list[int] | None) -> None:
        for settings in CORRECTIONS:
            assert_same(*lowered(op, x34, dim, **settings))
            assert_same(*lowered(op, x34.double(), dim, **settings))

    @pytest.mark.parametrize("op,args", INDEXING, ids=label)
    def test_indexing_agrees_with_eager(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        kwargs = {"reduce": "multiply"} if op is aten.scatter.reduce else {}
        assert_same(*lowered(op, *args, **kwargs))

    @pytest.mark.parametrize("reduce", UNLIKE_SELF)
    def test_scatter_reduce_without_self_agrees_with_eager(self, reduce: str) -> None:
        for x, src in ((f(3, 4), f(2, 3) / 2), (ints.repeat(2, 1), ints * 3 - 5)):
            assert_same(*lowered(aten.scatter_reduce.two, x, 1, g23, src, reduce, include_self=False))

    def test_searchsorted_right(self) -> None:
        assert_same(*lowered(aten.searchsorted.Tensor, f(2, 7), f(2, 5) * 2, right=True))
        assert_same(*lowered(aten.bucketize.Tensor, holes, f(9), out_int32=True, right=True))

    @pytest.mark.parametrize("op,args", POOLING, ids=label)
    def test_pooling_agrees_with_eager(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        assert_same(*lowered(op, *args))

    @pytest.mark.parametrize("window", [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 0, 2), (5, 1, 2, 1)], ids=str)
    def test_max_pool_backward_agrees_with_eager(self, window: tuple[int, ...]) -> None:
        k, st, p, d = ([n] * 2 for n in window)
        y, at = aten.max_pool2d_with_indices(img, k, st, p, d)
        assert_same(
            *lowered(aten.max_pool2d_with_indices_backward.default, f(*y.shape), img, k, st, p, d, False, at)
        )
        y, at = aten.adaptive_max_pool2d(img, [3, 2])
        assert_same(*lowered(aten.adaptive_max_pool2d_backward.default, f(*y.shape), img, at))


class TestTable:
    def test_each_overload_has_one_row_that_names_it(self) -> None:
        for op, r in table().items():
            assert isinstance(op, OpOverload) and op in r.overloads
            assert not op._schema.is_mutable, f"{op} writes into its arguments"

    def test_rows_have_a_rule_unless_a_library_serves_them(self) -> None:
        for r in table().values():
            assert (r.rule is None) == (r.kind in ("contraction", "random", "library")), r.name

    def test_no_decomposition_of_a_row_or_of_what_the_vendor_keeps(self) -> None:
        kept = aten.nll_loss_forward.default
        assert kept in decomposition_table()
        given = decomposition_table(lambda op: op is kept)
        assert kept not in given
        of_some_uses = {*PRODUCTS, "median", "nanmedian", "_embedding_bag"}
        assert {op._opname for op in set(given) & set(table())} == OPENED | of_some_uses
        assert aten.native_dropout.default not in given

    def test_ops_that_an_import_defines_later_are_taken_apart_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        late = aten._pad_packed_sequence.default
        assert late not in decomposition_table()
        monkeypatch.setattr(quantized, "decompositions", lambda: {late: lambda *args: args})
        assert late in decomposition_table()

    def test_a_product_with_more_to_it_opens_unless_the_vendor_keeps_it(self) -> None:
        assert aten.addmm.default in decomposition_table()
        whole = decomposition_table(lambda op: op is aten.addmm.default)[aten.addmm.default]
        assert whole(torch.ones(3), torch.ones(2, 4), torch.ones(4, 3)) is NotImplemented

    def test_a_vendor_without_kernels_gets_the_core_set_but_what_it_keeps(self) -> None:
        given = decomposition_table(lambda op: op is aten._softmax.default, kernels=False)
        assert aten.gelu_backward.default in given and aten._softmax.default not in given
        assert aten.gelu_backward.default not in decomposition_table()
        assert aten.bernoulli.default not in given

    def test_declined_says_why(self) -> None:
        with pytest.raises(Declined, match="complex64"):
            lowered(aten.add.Tensor, torch.ones(2, dtype=torch.complex64), f(2))
        with pytest.raises(Declined, match="mask"):
            lowered(aten.index.Tensor, f(3), [torch.tensor([True, False, True])])

    def test_index_out_of_range_is_an_error(self) -> None:
        for bad in (torch.tensor([3]), torch.tensor([-4])):
            b = Reference()
            at = b.indirect(b.input(bad)((0,)), 3, "index")
            with pytest.raises(IndexError):
                b.evaluate(Value((1,), torch.int64, lambda idx: index_value(at)))  # noqa: B023


class Compiled:
    """A function through AOTAutograd, its graphs run by the rules of the table."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool = False) -> None:
        self.externs: set[str] = set()
        self.random = False

        def compile_graph(g: torch.fx.GraphModule, _: Any) -> Any:
            kinds = {table()[n.target].kind for n in g.graph.nodes if n.target in table()}
            self.random |= "random" in kinds

            def call(*args: Any) -> list[Any]:
                out, externs = run(g, list(args))
                self.externs |= externs
                return list(out)

            return make_boxed_func(call)

        self.fn = aot_function(
            fn, compile_graph, compile_graph, decompositions=decomposition_table(), dynamic=dynamic
        )

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def with_gradients(fn: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """Results, then the gradients of their weighted sum."""
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    out = [x for x in tree_flatten(fn(*leaves))[0] if isinstance(x, torch.Tensor)]
    loss = sum(
        ((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in out if x.requires_grad),
        torch.zeros(()),
    )
    wanted = [a for a in leaves if a.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else []
    return [*out, *(g for g in grads if g is not None)]


w, gain = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(5)) / 5, f(4) / 9
GRAPHS: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("layer_norm", lambda x, g: torch.nn.functional.layer_norm(x, x.shape[-1:], g, g * 2), (x34, gain)),
    ("rms_norm", lambda x, g: torch.nn.functional.rms_norm(x, x.shape[-1:], g), (x34, gain)),
    ("softmax", lambda x: (x.softmax(-1), x.log_softmax(1)), (x34,)),
    ("group_norm", lambda x: torch.nn.functional.group_norm(x, 3), (x34,)),
    ("batch_norm", lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), (img,)),
    ("cross_entropy", lambda x, t: torch.nn.functional.cross_entropy(x, t), (f(5, 7) / 9, torch.arange(5))),
    ("views", lambda x:
     x.transpose(0, 1).reshape(x.shape[1], -1).unflatten(1, (x.shape[0], -1)).flip(0), (x34,)),
    ("slices", lambda x: torch.cat([x[:, 1:], x[:, :-1] * 2], -1).chunk(2, -1)[1], (x34,)),
    ("rotary", lambda x:
     torch.cat([-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]], -1) * x.cos(), (x34,)),
    ("embedding", lambda e, i: torch.nn.functional.embedding(i, e).sum(0), (f(9, 4), ints.abs())),
    ("index", lambda x, i: x[:, i, 1:].relu() + x[:, -2:, -1:], (x34, torch.tensor([1, -1]))),
    ("causal", lambda x:
     x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), -9.0).softmax(-1), (f(2, 5, 5) / 9,)),
    ("pool", lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1), (img,)),
    ("mean_pool", lambda x: torch.nn.functional.adaptive_avg_pool2d(x.relu(), 1).flatten(1), (img,)),
    ("upsample", lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear"), (img,)),
    ("gelu", lambda x: torch.nn.functional.gelu(x) * torch.nn.functional.silu(x.sigmoid()), (x34,)),
    ("cumsum", lambda x: x.cumsum(-1) + x.var(1, keepdim=True), (x34,)),
]


class TestGraphs:
    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    @pytest.mark.parametrize("name,fn,args", GRAPHS, ids=[g[0] for g in GRAPHS])
    def test_gradients_agree_with_eager(
        self, name: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...], dynamic: bool
    ) -> None:
        compiled = Compiled(fn, dynamic)
        assert_same(with_gradients(compiled, *args), with_gradients(fn, *args), rtol=1e-4, atol=1e-5)
        assert not compiled.externs


# Ops whose result depends on values, or which AOTAutograd does not trace alone.
UNTRACEABLE = ("equal", "item", "nonzero", "unique", "masked_select", "sparse", "to_", "resize", "cov",
               "gaussian_nll_loss")
DATABASE = [o for k, o in enumerate(op_db) if k % 6 == 0 and torch.float32 in o.supported_dtypes("cpu")
            and not o.name.startswith(("linalg", "fft", "jiterator", "_refs")) and not any(
                n in o.name for n in UNTRACEABLE)]


class TestDatabase:
    @pytest.mark.parametrize("info", DATABASE, ids=lambda o: o.name + o.variant_test_name)
    def test_first_sample_agrees_with_eager(self, info: Any) -> None:
        sample = next(iter(info.sample_inputs("cpu", torch.float32)))
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = dict(zip(places, tensors, strict=True))
            x, args, kwargs = tree_unflatten([given.get(k, v) for k, v in enumerate(flat)], spec)
            return [t for t in tree_flatten(info.op(x, *args, **kwargs))[0] if isinstance(t, torch.Tensor)]

        tensors = [flat[k].detach() for k in places]
        compiled = Compiled(fn)
        with torch.no_grad():
            expected = fn(*(t.clone() for t in tensors))
            actual = compiled(*tensors)
        if not compiled.random and "empty" not in info.name:
            assert_same(list(actual), expected)


@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle"])
def test_only_the_cpu_shuffles_pixels_in_order(name: str) -> None:
    """Channels-last images stay so by its kernels, and not by the one of all other devices."""
    op = getattr(torch.ops.aten, name).default
    parts = decomposition_table()[op]
    x = torch.empty(2, 36, 4, 4).contiguous(memory_format=torch.channels_last)
    anywhere = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
    assert parts(x, 2).stride() == op(x, 2).stride()
    assert parts(x.to("meta"), 2).stride() == op._op_dk(anywhere, x, 2).stride() != op(x, 2).stride()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_shuffled_channels_lie_as_eagers(groups: int) -> None:
    """New memory, of an order that is the operand's where that is one of images."""
    op = torch.ops.aten.channel_shuffle.default
    images = torch.randn(2, 8, 3, 5)
    for x in (images, images.contiguous(memory_format=torch.channels_last), images.mT):
        found, eager = decomposition_table()[op](x, groups), op(x, groups)
        assert torch.equal(found, eager) and found.stride() == eager.stride()
        assert found.data_ptr() != x.data_ptr()


def test_an_encoder_layer_is_taken_apart_unless_exact() -> None:
    """Its module calls one operator in inference, which would be an extern call."""
    op = torch.ops.aten._transformer_encoder_layer_fwd.default
    assert op in decomposition_table() and op not in decomposition_table(exact=True)
    assert op not in decomposition_table(lambda other: other is op)
