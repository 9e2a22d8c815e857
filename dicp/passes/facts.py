"""What passes ask about nodes: which is pure, which is a view of what, which is a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from dicp.compat import known_equal, size_hint
from dicp.ir.meta_keys import FREE_OUTPUTS
from dicp.ops.aliases import is_view

aten = torch.ops.aten
prims = torch.ops.prims

_PURE_NAMESPACES = ("aten", "prims", "dicp")
_UNIFORM_MAKERS = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_UNIFORM_KEEPERS = (
    aten.view.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
)


def value_of(argument: object) -> Any:
    """The fake tensor (or symbolic number) a node stands for; any other argument as it is."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def is_tensor(argument: object) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def rank(node: Node) -> int:
    """The number of dims of a tensor, -1 for anything else."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1


def same_shape(a: object, b: object) -> bool:
    """Whether two tensor nodes have the same shape for all values of the size symbols."""
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dim() != y.dim():
        return False
    return all(known_equal(m, n) for m, n in zip(x.shape, y.shape))


def same_dtype(a: object, b: object) -> bool:
    return value_of(a).dtype == value_of(b).dtype


def is_plain_sum(node: Node) -> bool:
    """Whether a product that is added to something is added as it is: neither has a factor."""
    return all(factor == 1 for factor in node.kwargs.values())


def is_contiguous(node: Node) -> bool:
    """Whether the strides are those of a contiguous tensor for all values of the size symbols."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not known_equal(size, 1) and not known_equal(stride, expected):
            return False
        expected = expected * size
    return True


def mutated_arguments(node: Node) -> list[Node]:
    """The nodes whose memory a call writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [
                v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Node)
            ]
    return found


def writes_input(node: Node) -> bool:
    """Whether a call is the write of a mutated graph input, of which AOTAutograd leaves one for each."""
    return node.target is aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def is_pure(node: Node) -> bool:
    """Whether the call may be dropped when unused: no write, no effect, no random number drawn."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        return (
            target.namespace in _PURE_NAMESPACES
            and not schema.is_mutable
            and len(schema.returns) > 0
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
    # What is left besides operators: arithmetic on sizes, and higher-order operators, which may do anything.
    return getattr(target, "__module__", "") in ("_operator", "math") or target in _SYMBOLIC_FUNCTIONS


def erase_dead(graph: Graph) -> None:
    """Erase the calls whose results nobody uses and nobody would miss. Graph.eliminate_dead_code would check
    the whole graph before, which takes as long as a rewrite."""
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)


_SYMBOLIC_FUNCTIONS = {
    torch.sym_max,
    torch.sym_min,
    torch.sym_not,
    torch.sym_ite,
    torch.sym_float,
    torch.sym_int,
}


def is_plain_cast(node: Node) -> bool:
    """Whether the node changes the dtype and nothing else."""
    if node.target is prims.convert_element_type.default:
        return True
    if node.target is not aten._to_copy.default or not is_tensor(node.args[0]):
        return False
    x = value_of(node.args[0])
    device = node.kwargs.get("device")
    same_device = device is None or torch.device(device) == x.device  # type: ignore[arg-type]
    return same_device and node.kwargs.get("memory_format") in (None, torch.preserve_format)


def is_saved(node: Node) -> bool:
    """Whether a forward keeps the result, or a view of it, for its backward, and no caller sees it."""
    output = node.graph.output_node()
    free = getattr(node.graph.owning_module, "meta", {}).get(FREE_OUTPUTS, ())
    saved = {output.args[0][k] for k in free}  # type: ignore[index]
    chain = [node]
    while chain:
        n = chain.pop()
        if n in saved:
            return True
        chain += [u for u in n.users if is_view(u) and u.args[0] is n]
    return False


def outputs_of(graph: Graph) -> list[Node]:
    """The nodes the graph returns."""
    results = graph.output_node().all_input_nodes
    return list(results)


def uniform_value(argument: object) -> int | float | bool | None:
    """The Python number every element of a constant tensor has (rounded to its dtype), or None."""
    if isinstance(argument, (int, float)):
        return argument
    if not is_tensor(argument) or not isinstance(argument, Node) or argument.op != "call_function":
        return None
    value: object = None
    if argument.target in _UNIFORM_MAKERS:
        value = argument.args[_UNIFORM_MAKERS[argument.target]]
    elif argument.target in (*_ZEROS, *_ONES):
        value = int(argument.target in _ONES)
    elif argument.target in _UNIFORM_KEEPERS:
        value = uniform_value(argument.args[0])
    if not isinstance(value, (int, float)):
        return None
    try:
        return torch.tensor(value, dtype=argument.meta["val"].dtype).item()  # type: ignore[no-any-return]
    except (RuntimeError, OverflowError, ValueError):  # the dtype cannot hold it: eager does what it does
        return None


def bytes_of(value: torch.Tensor) -> int:
    """Of its elements; where sizes are symbolic, at those that were traced."""
    return math.prod(size_hint(n) for n in value.shape) * value.element_size()


def is_channels_last(value: torch.Tensor) -> bool:
    """Whether these are images (4 dims) that lie dense in that order."""
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def users_through_views(node: Node) -> Iterator[Node]:
    """Every node that may read the memory of `node`."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from users_through_views(user)
