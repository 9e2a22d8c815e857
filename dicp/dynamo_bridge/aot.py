"""Between Dynamo's graph and ours: AOTAutograd with dicp's decompositions, partitioner and inner compilers.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from dicp import compat
from dicp.compat import autograd
from dicp.compiler import Compiled, compile_graph, watched
from dicp.config import Config
from dicp.dynamo_bridge import saved
from dicp.dynamo_bridge.activations import Activations, result_names
from dicp.dynamo_bridge.lost_writes import refuse_lost_writes
from dicp.dynamo_bridge.recompiles import note_recompile
from dicp.ops.decompositions import decomposition_table
from dicp.passes.rematerialize import rematerialize
from dicp.passes.rounding import round_alike, round_stepped
from dicp.passes.written_inputs import view_written_inputs
from dicp.runtime.dump import say
from dicp.vendor.asking import has
from dicp.vendor.base import AnyVendor, Vendor, takes_graphs

ROLES = ("forward", "backward", "inference")
GRADIENTS = (
    "dicp: freeze does nothing where gradients are computed, since weights are about to change then; "
    "call the model under torch.no_grad() or torch.inference_mode()"
)


def compile_joint(
    gm: fx.GraphModule, example_inputs: Sequence[Any], vendor: AnyVendor, config: Config
) -> Callable[..., Any]:
    """Trace forward and (where gradients are needed) backward, and compile each; or take what torch's cache
    has of an earlier compile."""
    stored = autograd.must_save() or (
        not watched() and saved.can_save(gm, example_inputs, vendor, config)
    )
    note_recompile(config)
    tag = saved.cache_tag(vendor, config, saved.packages(gm)) if stored else None
    if tag is not None and autograd.must_save() and saved.beyond_key(gm, example_inputs):
        tag += os.urandom(16).hex()  # it has to be written, and must not be found
    with saved.loading_under(vendor, config):
        shortcut = None if tag is None else autograd.Shortcut(gm, example_inputs, tag)
        found = None if shortcut is None else shortcut.load()
    if found is not None:
        return found  # type: ignore[no-any-return]
    parts = _Parts(gm, vendor, config, stored, shortcut)
    try:
        with saved.loading_under(vendor, config):
            joint = autograd.aot_compile(
                gm,
                example_inputs,
                **{role: functools.partial(parts.compile, role) for role in ROLES},
                decompositions=_decompositions(vendor, config),
                partitioned=parts.partitioned,
                tag=tag,
                entry="" if shortcut is None else shortcut.entry,
            )
    except compat.trace_again():
        refuse_lost_writes(gm)
        raise
    if shortcut is not None:
        shortcut.note()
    return joint  # type: ignore[no-any-return]


class _Parts:
    """The graphs that AOTAutograd makes of one of Dynamo's."""

    def __init__(
        self, gm: fx.GraphModule, vendor: AnyVendor, config: Config, stored: bool, shortcut: Any
    ) -> None:
        self.gm, self.vendor, self.config = gm, vendor, config
        self.stored, self.shortcut = stored, shortcut
        self.activations = Activations()

    def compile(self, role: str, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        effects = _has_effects(graph)
        if role == "forward":
            compat.donate_nothing()
        lays_out = role == "forward" and not effects and not takes_graphs(self.vendor)
        if lays_out:
            self.activations.free(graph)
        elif role == "backward":
            self.activations.take(graph)
        names = result_names(graph) if lays_out else []
        if role != "backward" and not effects:
            view_written_inputs(graph, compat.views_of_inputs())
        if role == "inference":
            round_stepped(graph)
        weights = compat.weights_of(self.gm) if self.config.freeze and role == "inference" else {}
        if self.config.freeze and role == "forward":
            warnings.warn(GRADIENTS, stacklevel=2)
        compiled = compile_graph(graph, self.vendor, self.config, role, weights)
        _count(compiled)
        if lays_out:
            self.activations.laid_out(names, compiled)
        if not self.stored:
            return compiled.call
        late = not autograd.bundling()
        return saved.saved(compiled, self.config, self.shortcut, late=late, effects=effects)

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule, visible: int) -> None:
        """Edits a forward and its backward, given how many of the forward's results are not saved ones."""
        if _has_effects(forward):
            return
        round_alike(forward, backward)
        made = rematerialize(forward, backward, visible)
        self.activations.partitioned(backward, visible)
        if made.values:
            size = f"{made.nbytes / 2**20:.1f} MiB"
            what = f"{made.values} activations ({size}) are not kept: the backward makes them again"
            say(what, self.config)


def _decompositions(vendor: AnyVendor, config: Config) -> dict[Any, Any]:
    """Those of a vendor. Of a vendor that calls whatever aten op, under eager numerics fewer."""
    exact = config.numerics == "eager" and has(vendor, Vendor.aten_call)
    return decomposition_table(vendor.keeps, not takes_graphs(vendor), exact)


def _has_effects(graph: fx.GraphModule) -> bool:
    """Whether ordered effects add tokens to the results, so that their positions are not AOTAutograd's."""
    return any(n.op == "call_function" and str(n.target) == "with_effects" for n in graph.graph.nodes)


def _count(compiled: Compiled) -> None:
    """torch._dynamo.utils.counters["dicp"]: what graphs are made of, over all compiles and loads."""
    compat.counters().update({"graphs": 1, **compiled.counts})
