"""Graphs for the compiler's own tests, traced from ordinary PyTorch through the real importer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule


def graph_of(fn: Callable[..., Any], *inputs: Any, **options: Any) -> GraphModule:
    """The inference graph of `fn`; an input is a shape (float32, random) or a tensor."""
    return graphs_of(fn, *inputs, **options)["inference"]


def graphs_of(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = False,
    train: bool = False,
    decompositions: Mapping[Any, Any] | None = None,
    keep: Sequence[Any] = (),
) -> dict[str, GraphModule]:
    """The graphs AOTAutograd hands to a backend: "inference", or "forward" and "backward" where `train`.

    decompositions: None is core aten's; `keep` names overloads not to decompose.
    """
    found: dict[str, GraphModule] = {}

    def boxed(name: str) -> Callable[..., Any]:
        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            found[name] = gm
            return make_boxed_func(gm.forward)

        return compiler

    table = dict(core_aten_decompositions()) if decompositions is None else dict(decompositions)
    for op in keep:
        table.pop(op, None)
    backend = aot_autograd(
        fw_compiler=boxed("forward"),
        bw_compiler=boxed("backward"),
        inference_compiler=boxed("inference"),
        decompositions=table,
        partition_fn=min_cut_rematerialization_partition,
    )
    tensors = [t if isinstance(t, torch.Tensor) else torch.randn(t) for t in inputs]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.set_grad_enabled(train):
        out = compiled(*tensors)
        if train:
            first = out if isinstance(out, torch.Tensor) else out[0]
            first.sum().backward()
    return found
