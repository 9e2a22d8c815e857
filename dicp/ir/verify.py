"""Fake propagation: what a node's result must look like, for new nodes and as a check of whole graphs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dicp.compat import FakeTensor, FakeTensorMode, fake_mode_of, known_equal, quick_fake, quiet_shapes
from dicp.errors import VerifyError
from dicp.ir.meta_keys import STRIDE_WAIVED
from dicp.ir.printer import dtype_name, op_name, user_location

_COPIED_META = ("stack_trace", "original_aten", "nn_module_stack", "source_fn_stack", "seq_nr")
_DATA_DEPENDENT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def insert(
    graph: Graph,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node,
    value: Any = None,
) -> Node:
    """Add a call at the graph's insertion point, its `meta["val"]` inferred, its origin that of `like`.

    value: the result as a fake tensor, where the caller knows it: inferring takes most of a pass's time.
    Raises whatever the operator's fake implementation raises for arguments it refuses.
    """
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    for key in _COPIED_META:
        if key in like.meta:
            node.meta[key] = like.meta[key]
    if value is not None:
        node.meta["val"] = value
        return node
    try:
        node.meta["val"] = infer(node, fake_mode_of(_values([like, *node.all_input_nodes])))
    except BaseException:
        graph.erase_node(node)
        raise
    return node


def infer(node: Node, mode: FakeTensorMode | None = None) -> Any:
    """The fake result of one call_function node, computed from the `meta["val"]` of its inputs.

    Adds no guard and leaves no new symbol pending.
    """
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    quick = quick_fake(node.target, args, kwargs)
    if quick is not None:
        return quick
    mode = mode or fake_mode_of(_values(node.all_input_nodes)) or FakeTensorMode()
    with mode, quiet_shapes(mode):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def verify(gm: GraphModule) -> None:
    """Check the graph's structure, and every node's shape, dtype and stride against fresh fake propagation.

    Raises VerifyError naming the node, what was expected, what is there, and the user's line.
    """
    _check_structure(gm)
    mode = fake_mode_of(_values(gm.graph.nodes)) or FakeTensorMode()
    for node in gm.graph.nodes:
        if node.op == "call_function" and _is_checked(node):
            _check_node(node, mode)


def _values(nodes: Any) -> list[Any]:
    return [n.meta.get("val") for n in nodes]


def _value(node: Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    raise VerifyError(
        f"{node.name} = {op_name(node.target)}(...): meta['val'] is missing", where=_where(node)
    )


def _where(node: Node) -> str:
    return user_location(node) or ""


def _is_checked(node: Node) -> bool:
    """Higher-order operators carry subgraphs; what depends on data gets a new symbol at each propagation."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not any(tag in node.target.tags for tag in _DATA_DEPENDENT)
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _check_structure(gm: GraphModule) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the graph is malformed: {error}") from error
    body_began = False
    outputs = [n for n in gm.graph.nodes if n.op == "output"]
    if len(outputs) != 1 or next(iter(reversed(gm.graph.nodes))) is not outputs[0]:
        raise VerifyError(f"the graph needs one output, at its end; it has {len(outputs)}")
    for node in gm.graph.nodes:
        if node.op == "placeholder" and body_began:
            raise VerifyError(f"{node.name}: placeholders come before every other node")
        if node.op in ("call_method", "call_module"):
            raise VerifyError(f"{node.name}: a {node.op} node in a functional graph", where=_where(node))
        body_began = body_began or node.op not in ("placeholder", "get_attr")


def _check_node(node: Node, mode: FakeTensorMode) -> None:
    expected = node.meta.get("val")
    if "val" not in node.meta and _gives_nothing(node):  # torch inserts such without
        return
    if "val" not in node.meta:
        raise VerifyError(f"{_name(node)}: meta['val'] is missing", where=_where(node))
    try:
        actual = infer(node, mode)
    except VerifyError:
        raise
    except Exception as error:  # any operator may refuse its arguments in its own way
        raise VerifyError(
            f"{_name(node)}: fake propagation fails: {type(error).__name__}: {error}", where=_where(node)
        ) from error
    difference = _difference(expected, actual, ignore_stride=bool(node.meta.get(STRIDE_WAIVED)))
    if difference:
        raise VerifyError(f"{_name(node)}: {difference}", where=_where(node))


def _gives_nothing(node: Node) -> bool:
    """Whether the call has no result: a check."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def _name(node: Node) -> str:
    return f"{node.name} = {op_name(node.target)}({', '.join(n.name for n in node.all_input_nodes)})"


def _difference(expected: Any, actual: Any, ignore_stride: bool) -> str | None:
    """What sets the two apart in words, or None."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _tensor_difference(expected, actual, ignore_stride)
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(expected) != len(actual):
            return f"meta has {len(expected)} results, the operator gives {len(actual)}"
        found = (_difference(e, a, ignore_stride) for e, a in zip(expected, actual, strict=True))
        return next((f"result {i}: {text}" for i, text in enumerate(found) if text), None)
    if isinstance(expected, (int, torch.SymInt)) and isinstance(actual, (int, torch.SymInt)):
        return None if known_equal(expected, actual) else f"meta says {expected}, the operator gives {actual}"
    if isinstance(expected, torch.Tensor) != isinstance(actual, torch.Tensor):
        return f"meta has a {type(expected).__name__}, the operator gives a {type(actual).__name__}"
    return None


def _tensor_difference(expected: torch.Tensor, actual: torch.Tensor, ignore_stride: bool) -> str | None:
    if expected.dtype != actual.dtype:
        return f"meta says dtype {dtype_name(expected.dtype)}, the operator gives {dtype_name(actual.dtype)}"
    if not _same_sizes(expected.shape, actual.shape):
        return f"meta says shape {_sizes(expected.shape)}, the operator gives {_sizes(actual.shape)}"
    if expected.device != actual.device:
        return f"meta says device {expected.device}, the operator gives {actual.device}"
    if not ignore_stride and not same_stride(expected, actual):
        return f"meta says stride {_sizes(expected.stride())}, the operator gives {_sizes(actual.stride())}"
    return None


def _sizes(sizes: Sequence[Any]) -> str:
    return f"[{','.join(str(s) for s in sizes)}]"


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(known_equal(x, y) for x, y in zip(a, b, strict=True))


def same_stride(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides, but for dims of one element and for empty tensors, where strides mean nothing."""
    if any(known_equal(size, 0) for size in a.shape):
        return True
    rows = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(x, y) for size, x, y in rows)


def same_meta(a: Any, b: Any) -> bool:
    """Equal shape, dtype, device, stride, and as much conjugated and negated: the one value can stand for
    the other."""
    if not isinstance(a, FakeTensor) or not isinstance(b, FakeTensor):
        return False
    bits = a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
    return bits and _tensor_difference(a, b, ignore_stride=False) is None
