"""Between Dynamo's graph and ours: AOTAutograd with dicp's decompositions, partitioner and inner compilers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp import compat
from dicp.compiler import Compiled, compile_graph, watched
from dicp.dynamo_bridge import saved
from dicp.dynamo_bridge.recompiles import note_recompile
from dicp.ops.decompositions import decomposition_table
from dicp.passes.facts import FREE_OUTPUTS
from dicp.passes.layout import repropagate
from dicp.passes.rematerialize import rematerialize
from dicp.passes.written_inputs import view_written_inputs
from dicp.runtime.dump import say
from dicp.schedule.defs import View
from dicp.vendor.base import takes_graphs

GRADIENTS = (
    "dicp: freeze does nothing where gradients are computed, since weights are about to change then; "
    "call the model under torch.no_grad() or torch.inference_mode()"
)


def compile_joint(
    gm: fx.GraphModule, example_inputs: Sequence[Any], vendor: Any, config: Any
) -> Callable[..., Any]:
    """Trace forward and (where gradients are needed) backward, and compile each; or take what torch's cache
    has of an earlier compile."""
    stored = compat.must_save() or (not watched() and saved.can_save(gm, vendor, config))
    note_recompile(config)
    tag = saved.cache_tag(vendor, config) if stored else None
    with saved.loading_under(vendor, config):
        shortcut = None if tag is None else compat.Shortcut(gm, example_inputs, tag)
        found = None if shortcut is None else shortcut.load()
    if found is not None:
        return found  # type: ignore[no-any-return]

    def inner(role: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            effects = _has_effects(graph)
            if role == "forward":
                compat.donate_nothing()
            if role == "forward" and not effects:
                _free_saved_strides(graph)
            elif role == "backward":
                _saved_as_given(graph, inputs)
            if role != "backward" and not effects:
                view_written_inputs(graph, compat.views_of_inputs())
            weights = compat.weights_of(gm) if config.freeze and role == "inference" else {}
            if config.freeze and role == "forward":
                warnings.warn(GRADIENTS, stacklevel=2)
            compiled = compile_graph(graph, vendor, config, role, weights)
            _count(compiled)
            if role == "forward" and not effects:
                compat.report_output_strides(output_strides(compiled))
            if not stored:
                return compiled.call
            return saved.saved(compiled, shortcut, late=not compat.bundling(), effects=effects)

        return compile_inner

    def partitioned(forward: fx.GraphModule, backward: fx.GraphModule, visible: int) -> None:
        if _has_effects(forward):
            return
        made = rematerialize(forward, backward, visible)
        if made.values:
            size = f"{made.nbytes / 2**20:.1f} MiB"
            say(f"{made.values} activations ({size}) are not kept: the backward makes them again", config)

    with saved.loading_under(vendor, config):
        joint = compat.aot_compile(
            gm,
            example_inputs,
            forward=inner("forward"),
            backward=inner("backward"),
            inference=inner("inference"),
            decompositions=decomposition_table(vendor.keeps, kernels=not takes_graphs(vendor)),
            partitioned=partitioned,
            tag=tag,
        )
    if shortcut is not None:
        shortcut.note()
    return joint  # type: ignore[no-any-return]


def _has_effects(graph: fx.GraphModule) -> bool:
    """Whether ordered effects add tokens to the results, so that their positions are not AOTAutograd's."""
    return any(n.op == "call_function" and str(n.target) == "with_effects" for n in graph.graph.nodes)


def _free_saved_strides(graph: fx.GraphModule) -> None:
    """Values saved for backward may keep whatever layout they have; what the user sees keeps eager's
    strides."""
    visible = compat.visible_outputs()
    symbolic = any(isinstance(n.meta.get("val"), torch.SymInt) for n in graph.graph.nodes)
    if visible is None or symbolic:
        return
    results = next(iter(reversed(graph.graph.nodes))).args[0]
    shown = set(results[:visible])
    graph.meta[FREE_OUTPUTS] = tuple(
        k
        for k, node in enumerate(results)
        if k >= visible
        and isinstance(node, fx.Node)
        and node.op != "placeholder"
        and node not in shown
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _saved_as_given(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Saved values arrive with the strides the forward gave them, which may differ from those that were
    traced; gradients may leave with any."""
    graph.meta[FREE_OUTPUTS] = tuple(range(len(next(iter(reversed(graph.graph.nodes))).args[0])))
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    changed = False
    for node, given in zip(placeholders, inputs, strict=True):
        if isinstance(given, torch.Tensor) and given.stride() != node.meta["val"].stride():
            node.meta["val"], changed = given, True
    if changed:
        repropagate(graph)


def output_strides(compiled: Compiled) -> list[Any]:
    """Strides of each output of a graph of static sizes; None for what we did not lay out."""
    outputs = compiled.program.lowered.outputs
    if any(
        isinstance(o, View) and not all(isinstance(s, int) for s in (*o.shape, *o.strides)) for o in outputs
    ):
        return []
    return [o.strides if isinstance(o, View) else None for o in outputs]


def _count(compiled: Compiled) -> None:
    """torch._dynamo.utils.counters["dicp"]: what graphs are made of, over all compiles and loads."""
    compat.counters().update({"graphs": 1, **compiled.counts})
