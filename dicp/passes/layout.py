"""Channels-last for convolutions, where that moves fewer bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dicp.compat import (
    FakeTensorMode,
    channels_last_fake,
    fake_mode_of,
    quick_fake,
    quiet_shapes,
    size_hint,
)
from dicp.ir.meta_keys import FREE_OUTPUTS, LAYOUT_KEY
from dicp.ir.verify import insert, same_stride
from dicp.ops.aliases import is_view
from dicp.ops.conv_call import conv_call, separable_call, the_conv_call
from dicp.ops.library import register
from dicp.ops.table import table
from dicp.passes.conv_matmul import convolution_of, parts_of, pays
from dicp.passes.facts import aten, bytes_of, is_channels_last, is_pure, mutated_arguments, value_of
from dicp.passes.freeze import constants_of
from dicp.passes.pack import packed_form
from dicp.vendor.base import LayoutCosts, VendorBase, takes_graphs

CHANNELS_LAST = (0, 2, 3, 1)
"""Dims from outermost to innermost in memory: the value of `node.meta[LAYOUT_KEY]`."""

# What reads strides, not only elements: gets its inputs as they were traced.
_STRIDE_READERS = (aten.as_strided.default, aten.view.dtype, aten.set_.source_Tensor)


@dataclasses.dataclass
class LayoutPlan:
    """The graph's values if convolutions ran channels-last, and what has to be converted for that."""

    values: dict[Node, Any]
    conversions: list[tuple[Node, Node, torch.memory_format]] = dataclasses.field(default_factory=list)
    """(consumer, source, format)"""
    cost: float = 0.0
    gain: float = 0.0
    gains: dict[Node, float] = dataclasses.field(default_factory=dict)
    """what each convolution spares (`_gain`)"""
    products: frozenset[Node] = frozenset()
    """convolutions that become matrix products, whose rows are channels-last positions, those of `packed`
    weights, and those of which `extra` says more"""
    packed: frozenset[Node] = frozenset()
    constants: frozenset[Node] = frozenset()
    extra: dict[Node, float] = dataclasses.field(default_factory=dict)
    """what the vendor says that a convolution spares besides (`VendorBase.channels_last_gain`)"""


def choose_layout(gm: GraphModule, vendor: VendorBase) -> GraphModule:
    """conv(x: [B,C,H,W])  ->  conv(clone(x, channels_last)), and what follows keeps that order.

    Plays the graph once more with every convolution fed channels-last: elementwise calls, pools and norms
    carry the order on as eager does; what needs other strides (a view, an output, which keeps the traced
    strides unless the caller frees it, a random or foreign call) gets a copy. If the copies move fewer bytes
    than the convolutions spare (LayoutCosts, sizes as seen while tracing), the graph becomes that one; else
    it stays.
    The decision is one for the whole graph. Every computed 4-D value whose order changed, and every copy into
    it, has `meta[LAYOUT_KEY]`.
    """
    if takes_graphs(vendor):  # a toolchain that sees the graph chooses its own layouts
        return gm
    register()
    if not any(_images(n) for n in gm.graph.nodes):
        return gm
    mode = fake_mode_of([value_of(n) for n in gm.graph.nodes])
    if mode is None:
        return gm
    costs = vendor.layout_costs
    with mode, quiet_shapes(mode):
        plan = LayoutPlan({}, constants=constants_of(gm))
        plan.packed = frozenset(n for n in gm.graph.nodes if packed_form(vendor, n, plan.constants))
        plan.products = plan.packed.union(n for n in gm.graph.nodes if _is_product(n, vendor))
        plan.extra = {n: vendor.channels_last_gain(n) for n in gm.graph.nodes if _images(n)}
        plan.products = plan.products.union(n for n, extra in plan.extra.items() if extra > 0)
        plan.gains = {n: _gain(n, plan, vendor) for n in plan.extra}
        if not _may_pay(gm, plan, costs) or not _plan(gm, plan, costs):
            return gm
    if plan.gain > plan.cost:
        _carry_out(gm.graph, plan)
    return gm


def relay(gm: GraphModule, values: Mapping[Node, torch.Tensor]) -> None:
    """Give nodes other values, which differ in their strides. What follows is computed again; what needs the
    strides that were traced (a view, a call that reads them, a result that is not free) gets a copy."""
    traced: dict[Node, Any] = {n: value_of(n) for n, v in values.items() if not same_stride(value_of(n), v)}
    copies: dict[Node, Node] = {}

    def as_traced(source: Node, reader: Node) -> Node:
        if source not in copies:
            with gm.graph.inserting_before(reader):
                copies[source] = _laid_out_as(gm.graph, source, traced[source])
        return copies[source]

    mode = fake_mode_of(list(values.values())) or FakeTensorMode()
    with mode, quiet_shapes(mode):
        for node, value in values.items():
            node.meta["val"] = value
        for node in _followers(gm.graph, traced):
            new = _called(node, {n: value_of(n) for n in node.all_input_nodes})
            if new is None:
                for source in [n for n in node.all_input_nodes if n in traced]:
                    node.replace_input_with(source, as_traced(source, node))
                continue
            old, node.meta["val"] = value_of(node), new
            if not isinstance(old, torch.Tensor) or not same_stride(old, new):
                traced[node] = old
        output, free = gm.graph.output_node(), gm.meta.get(FREE_OUTPUTS, ())
        results = [
            as_traced(r, output) if isinstance(r, Node) and r in traced and i not in free else r
            for i, r in enumerate(output.args[0])  # type: ignore[arg-type]
        ]
        output.args = (type(output.args[0])(results),)


def _followers(graph: Graph, traced: Mapping[Node, Any]) -> Iterator[Node]:
    """The calls that read any of the nodes, to which the caller adds as it goes, in the graph's order."""
    pending = {user for node in traced for user in node.users}
    for node in graph.nodes:
        if not pending:
            return
        if node in pending:
            pending.remove(node)
            if node.op == "call_function":
                yield node
                pending.update(node.users if node in traced else ())


def _laid_out_as(graph: Graph, source: Node, like: torch.Tensor) -> Node:
    """A copy of the source with the order of dimensions that `like` has in memory."""
    order = sorted(range(like.dim()), key=lambda d: -size_hint(like.stride(d)))
    back = [order.index(d) for d in range(like.dim())]
    turned = insert(graph, aten.permute.default, (source, order), like=source)
    dense = {"memory_format": torch.contiguous_format}
    copy = insert(graph, aten.clone.default, (turned,), dense, like=source)
    return insert(graph, aten.permute.default, (copy, back), like=source)


def _is_product(node: Node, vendor: VendorBase) -> bool:
    conv = convolution_of(node)
    return any(pays(vendor, part, conv) for part in parts_of(node))


def _may_pay(gm: GraphModule, plan: LayoutPlan, costs: LayoutCosts) -> bool:
    """A bound without propagation: convolutions whose results leave the graph pay for those at least."""
    free = gm.meta.get(FREE_OUTPUTS, ())
    bound = 0.0
    for node in gm.graph.nodes:
        if _images(node) and (node in plan.products or _wants_channels_last(node, costs)):
            bound += plan.gains[node]
    results = gm.graph.output_node().args[0]
    for i, node in enumerate(results if isinstance(results, (list, tuple)) else [results]):
        if (
            isinstance(node, Node)
            and i not in free
            and _images(node)
            and not is_channels_last(value_of(node))
        ):
            bound -= costs.conversion * bytes_of(value_of(node))
    return bound > 0


def _images(node: Node) -> list[Node]:
    """Which operands of a 2-D convolution are activations, the first of them what it convolves or, of its
    gradients, the result's."""
    if (call := conv_call(node)) is not None:
        found = (call.grad, call.x) if call.is_backward else (call.x, call.other)
    elif (separable := separable_call(node)) is not None:
        found = (separable.x, separable.other)
    else:
        return []
    return [a for a in found if isinstance(a, Node)] if value_of(found[0]).dim() == 4 else []


def _weight(node: Node) -> Node:
    """Of a convolution; of dicp::separable the first."""
    if (separable := separable_call(node)) is not None:
        return separable.w1  # type: ignore[no-any-return]
    return the_conv_call(node).weight  # type: ignore[no-any-return]


def _plan(gm: GraphModule, plan: LayoutPlan, costs: LayoutCosts) -> bool:
    """Fill the plan; False where strides that somebody relies on could not be had back."""
    converted: dict[tuple[Node, torch.memory_format], Any] = {}
    free = gm.meta.get(FREE_OUTPUTS, ())
    for node in gm.graph.nodes:
        if node.op == "output":
            if not _plan_outputs(plan, node, free, converted, costs):
                return False
        elif node.op != "call_function":
            plan.values[node] = value_of(node)
        else:
            wanted = dict(_plan_inputs(plan, node, converted, costs))
            changed = [n for n in node.all_input_nodes if wanted[n] is not value_of(n)]
            plan.values[node] = value_of(node)
            if changed and not _plan_call(plan, node, wanted, changed, converted, costs):
                return False
    return True


def _plan_inputs(
    plan: LayoutPlan, node: Node, converted: dict[Any, Any], costs: LayoutCosts
) -> Iterator[tuple[Node, Any]]:
    """The node's inputs as it gets them: a convolution's activations channels-last."""
    activations = _images(node)
    if activations and node not in plan.products and not _wants_channels_last(node, costs):
        for source in node.all_input_nodes:
            value = plan.values[source]
            turned = source in activations and value is not value_of(source) and is_channels_last(value)
            if turned:
                value = _convert(plan, node, source, torch.contiguous_format, converted, costs.conversion)
            yield source, value
        return
    weight = _weight(node) if activations else None
    for source in node.all_input_nodes:
        value = plan.values[source]
        if source in activations and not is_channels_last(value):
            yield source, _convert(plan, node, source, torch.channels_last, converted, costs.conversion)
        elif source is weight and _weight_is_free(plan, source, node) and not is_channels_last(value):
            # The kernel that computes the weight may as well write it in this order.
            yield source, _convert(plan, node, source, torch.channels_last, converted, 0)
        else:
            yield source, value
    if activations:
        plan.gain += plan.gains[node]


def _wants_channels_last(node: Node, costs: LayoutCosts) -> bool:
    """Whether a convolution has positions enough for channels-last; what the user chose stays so."""
    call = conv_call(node)
    result = value_of(node if call is None else call.result)
    positions = size_hint(result.shape[0]) * size_hint(result.shape[2]) * size_hint(result.shape[3])
    return positions >= costs.min_positions or is_channels_last(result)


def _weight_is_free(plan: LayoutPlan, weight: Node, node: Node) -> bool:
    """Whether the weight is had channels-last without moving more, and wanted so: not by an algorithm of the
    vendor's own for one convolution, which reads it as it lies."""
    alone = node.target is not torch.ops.dicp.separable.default
    gathered = node in plan.products and parts_of(node) == ("result",)  # a product reads it row by row
    own = node in plan.packed or gathered or (alone and plan.extra.get(node, 0.0) > 0)
    return not own and (_is_made_for(weight, node) or weight in plan.constants)


def _is_made_for(source: Node, user: Node) -> bool:
    return source.op == "call_function" and len(source.users) == 1 and user in source.users


def _gain(node: Node, plan: LayoutPlan, vendor: VendorBase) -> float:
    """What one convolution spares; nothing where the user's own strides are channels-last. A weight costs
    nothing more that way where it is made in that order anyway, or for a product, and one that would be
    packed nothing at all: that is for channels-last images alone."""
    call, weight, extra, costs = conv_call(node), _weight(node), plan.extra[node], vendor.layout_costs
    x, result = _images(node)[0], node if call is None or not call.is_backward else call.x
    if is_channels_last(value_of(x)):
        return 0.0
    moved, nbytes = bytes_of(value_of(x)) + bytes_of(value_of(result)), bytes_of(value_of(weight))
    pointwise = all(size == 1 for size in value_of(weight).shape[2:])
    free = pointwise or weight in plan.constants or _is_made_for(weight, node)
    free = free or node in plan.packed or extra > 0
    loss = 0.0 if free else costs.weight_loss * nbytes * min(1.0, nbytes / costs.weight_bytes)
    strided = call is not None and any(step != 1 for step in call.stride)
    conv = convolution_of(node)
    gain = extra + (costs.weight_loss * nbytes if node in plan.packed else 0.0)
    for part in parts_of(node):
        gain += (costs.strided_gain if strided and part == "input" else costs.activation_gain) * moved
        gain -= 0.0 if pays(vendor, part, conv) else loss
    return gain


def _plan_call(
    plan: LayoutPlan,
    node: Node,
    wanted: dict[Node, Any],
    changed: list[Node],
    converted: dict[Any, Any],
    costs: LayoutCosts,
) -> bool:
    """The node's value for inputs in the new order; copies in the old order where it does not take them.
    False where that order is neither row-major nor channels-last."""
    value = _called(node, wanted)
    if value is not None:
        if not isinstance(value, (int, torch.SymInt)):  # sizes stay what they are
            plan.values[node] = value
        return True
    for source in changed:
        back = _order_of(value_of(source))
        if back is None:
            return False
        _convert(plan, node, source, back, converted, costs.conversion)
    return True


def _reads_strides(node: Node) -> bool:
    return not is_pure(node) and not mutated_arguments(node) or node.target in _STRIDE_READERS


def _called(node: Node, values: dict[Node, Any]) -> Any:
    """The node's value for inputs whose strides are not those traced; None where it depends on them."""
    if _reads_strides(node):
        return None
    if (carried := _carried_on(node, values)) is not None:
        return carried
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
    try:
        quick = quick_fake(node.target, args, kwargs)
        return node.target(*args, **kwargs) if quick is None else quick  # type: ignore[operator]
    except (RuntimeError, ValueError):  # a view that would need a copy
        return None


def _carried_on(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a convolution, group norm or elementwise call on the CPU that gets images channels-last,
    which its result then is: for these torch need not be asked, which took more than half of this pass. None
    for other calls."""
    traced = value_of(node)
    images = [v for n in node.all_input_nodes if isinstance(v := values[n], torch.Tensor)]
    if not all(v.device.type == "cpu" for v in images):  # elsewhere norms and some convolutions differ
        return None
    if (call := conv_call(node)) is not None and not call.is_backward:
        return channels_last_fake(traced) if _lie_channels_last([values[call.x]], [traced]) else None
    if node.target is aten.native_group_norm.default:
        x, y, scaled = images[0], traced[0], node.args[1] is not None  # else the result is row-major
        laid_out = channels_last_fake(y) if scaled and _lie_channels_last([x], [y]) else None
        return None if laid_out is None else (laid_out, *traced[1:])
    if not _is_elementwise(node):
        return None
    if node.target is aten.masked_fill.Scalar:  # whose result is row-major whatever it gets
        return None
    same = isinstance(traced, torch.Tensor) and all(v.shape == traced.shape for v in images)
    return channels_last_fake(traced) if same and _lie_channels_last(images, [traced]) else None


def _is_elementwise(node: Node) -> bool:
    row = table().get(node.target)
    return row is not None and row.kind == "elementwise" and "memory_format" not in node.kwargs


def _lie_channels_last(values: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether all of these lie channels-last, and so that nobody takes them, or results of these sizes, for
    contiguous: one channel, or one position, is both."""
    images = all(v.dim() == 4 for v in (*values, *results))
    several = images and all(v.shape[1] > 1 and v.shape[2] * v.shape[3] > 1 for v in (*values, *results))
    return several and all(is_channels_last(v) for v in values)


def _convert(
    plan: LayoutPlan,
    consumer: Node,
    source: Node,
    order: torch.memory_format,
    converted: dict[Any, Any],
    cost: float,
) -> Any:
    """The source's value in the order; the first conversion is paid for, later consumers share it."""
    key = (source, order)
    if key not in converted:
        converted[key] = aten.clone.default(plan.values[source], memory_format=order)
        plan.cost += cost * bytes_of(value_of(source))
    plan.conversions.append((consumer, source, order))
    return converted[key]


def _plan_outputs(
    plan: LayoutPlan, output: Node, free: Any, converted: dict[Any, Any], costs: LayoutCosts
) -> bool:
    """What the graph returns, with the traced strides; of a value that is saved for the backward rather the
    copy that a convolution got, whose gradient would copy it again. False where strides could not be had
    back."""
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    for i, node in enumerate(results):
        if not isinstance(node, Node) or not isinstance(value_of(node), torch.Tensor):
            continue
        if i in free:
            if (node, torch.channels_last) in converted and not is_view(node):
                plan.conversions.append((output, node, torch.channels_last))
            continue
        traced, value = value_of(node), plan.values[node]
        if value is traced or same_stride(traced, value):
            continue
        back = _order_of(traced)
        if back is None:
            return False
        plan.conversions.append((output, node, back))
        plan.cost += costs.conversion * bytes_of(traced)
    return True


def _order_of(value: torch.Tensor) -> torch.memory_format | None:
    for order in (torch.contiguous_format, torch.channels_last):
        if (order is torch.contiguous_format or value.dim() == 4) and value.is_contiguous(
            memory_format=order
        ):
            return order
    return None


def _carry_out(graph: Graph, plan: LayoutPlan) -> None:
    """Insert the copies, and give every node the value it was planned with."""
    traced = {node: value_of(node) for node in plan.values}
    for node, value in plan.values.items():
        node.meta["val"] = value
    made: dict[tuple[Node, torch.memory_format], Node] = {}
    for consumer, source, order in plan.conversions:
        key = (source, order)
        if key not in made:
            with graph.inserting_before(consumer):
                made[key] = insert(
                    graph, aten.clone.default, (source,), {"memory_format": order}, like=source
                )
        consumer.replace_input_with(source, made[key])
    for node, value in plan.values.items():
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dim() == 4:
            if not same_stride(traced[node], value):
                node.meta[LAYOUT_KEY] = CHANNELS_LAST
    for (source, order), node in made.items():
        if order is torch.channels_last:
            node.meta[LAYOUT_KEY] = CHANNELS_LAST
            if _is_elementwise(source) and list(source.users) == [node]:
                source.meta[LAYOUT_KEY] = CHANNELS_LAST  # its kernel writes it where the copy would lie
