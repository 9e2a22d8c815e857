"""What a forward saves for its backward: which values, and how they lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.compat import fake_mode_of, known_equal, quiet_shapes
from dicp.compiler import Compiled
from dicp.ir.meta_keys import FREE_OUTPUTS
from dicp.passes.layout import relay
from dicp.schedule.defs import View


class Activations:
    """The saved values of one joint graph. The forward, compiled first, may lay them out as it likes; the
    backward is compiled for where they lie."""

    def __init__(self) -> None:
        self.visible = 0  # leading results of the forward, which reach the user
        self.names: set[str] = set()  # of the saved values, the same in both graphs
        self.strides: dict[str, tuple[Any, ...]] = {}

    def partitioned(self, backward: fx.GraphModule, visible: int) -> None:
        """Note what the backward takes."""
        self.visible = visible
        self.names = {n.name for n in backward.graph.nodes if n.op == "placeholder"}

    def free(self, forward: fx.GraphModule) -> None:
        """Let saved values keep whatever layout they get; what the user sees keeps eager's strides."""
        shown = set(_results(forward)[: self.visible])
        forward.meta[FREE_OUTPUTS] = tuple(
            k
            for k, node in enumerate(_results(forward))
            if isinstance(node, fx.Node)
            and node.name in self.names
            and node not in shown
            and node.op != "placeholder"
            and isinstance(node.meta.get("val"), torch.Tensor)
        )

    def laid_out(self, names: list[str | None], compiled: Compiled) -> None:
        """Note the strides of a compiled forward's results, of those `names` in their order."""
        lowered = compiled.program.lowered
        for name, result in zip(names, lowered.outputs, strict=True):
            if name in self.names and isinstance(result, View):
                self.strides[name] = tuple(lowered.symbols.size(s) for s in result.strides)

    def take(self, backward: fx.GraphModule) -> None:
        """Have saved values arrive with the strides that the forward gave them, and gradients leave with
        any."""
        backward.meta[FREE_OUTPUTS] = tuple(range(len(_results(backward))))
        given = [n for n in backward.graph.nodes if n.op == "placeholder" and n.name in self.strides]
        mode = fake_mode_of([n.meta["val"] for n in given])
        if mode is None:
            return
        laid_out = {}
        with mode, quiet_shapes(mode):
            for node in given:
                value, strides = node.meta["val"], self.strides[node.name]
                if not all(known_equal(a, b) for a, b in zip(value.stride(), strides, strict=True)):
                    laid_out[node] = value.as_strided(value.shape, strides)
        if laid_out:
            relay(backward, laid_out)


def result_names(graph: fx.GraphModule) -> list[str | None]:
    """The names of the values that a graph returns."""
    return [n.name if isinstance(n, fx.Node) else None for n in _results(graph)]


def _results(graph: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]
