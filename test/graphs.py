"""Graphs for the compiler's own tests, traced from ordinary PyTorch through the real importer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dicp.compat import size_hint
from dicp.ir.verify import insert, same_stride, verify
from dicp.vendor.base import VendorBase


@functools.cache
def core_aten() -> Mapping[Any, Any]:
    """torch's table, which takes a tenth of a second to make."""
    return dict(core_aten_decompositions())


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
    partitioned: Callable[[GraphModule, GraphModule, int], Any] | None = None,
) -> dict[str, GraphModule]:
    """The graphs AOTAutograd hands to a backend: "inference", or "forward" and "backward" where `train`.

    decompositions: None is core aten's; `keep` names overloads not to decompose. partitioned: edits forward
    and backward, given how many of the forward's results are not saved ones.
    """
    found: dict[str, GraphModule] = {}

    def boxed(name: str) -> Callable[..., Any]:
        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            found[name] = gm
            return make_boxed_func(gm.forward)

        return compiler

    def partition(joint: Any, given: Any, **options: Any) -> tuple[Any, Any]:
        graphs = min_cut_rematerialization_partition(joint, given, **options)
        if partitioned is not None:
            partitioned(*graphs, options["num_fwd_outputs"])
            for gm in graphs:
                gm.recompile()
        return graphs

    table = dict(core_aten() if decompositions is None else decompositions)
    for op in keep:
        table.pop(op, None)
    backend = aot_autograd(
        fw_compiler=boxed("forward"),
        bw_compiler=boxed("backward"),
        inference_compiler=boxed("inference"),
        decompositions=table,
        partition_fn=partition,
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


class CheckPass:
    """Runs a pass and holds what every pass owes: a verified graph that computes the same."""

    rtol, atol = 1e-5, 1e-5

    def check(self, run: Callable[..., GraphModule], gm: GraphModule, *vendor: Any) -> GraphModule:
        inputs = example_inputs(gm)
        expected = run_eagerly(gm, inputs)
        verify(gm)
        gm = run(gm, *vendor)
        verify(gm)
        actual = run_eagerly(gm, inputs)
        torch.testing.assert_close(actual, expected, rtol=self.rtol, atol=self.atol)
        for before, after in zip(expected, actual, strict=True):
            if isinstance(before, torch.Tensor):
                assert after.shape == before.shape and same_stride(after, before)
        return gm


def example_inputs(gm: GraphModule, seed: int = 0) -> list[Any]:
    """Real inputs as the placeholders' metas describe them, symbolic sizes at their hints."""
    generator = torch.Generator().manual_seed(seed)
    return [_example(n.meta["val"], generator) for n in gm.graph.nodes if n.op == "placeholder"]


def _example(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return size_hint(value)
    shape, stride = [size_hint(s) for s in value.shape], [size_hint(s) for s in value.stride()]
    result = torch.empty_strided(shape, stride, dtype=value.dtype)
    if value.dtype.is_floating_point:
        # Vectors positive: one may be a running variance.
        random = (
            torch.randn(shape, generator=generator)
            if len(shape) > 1
            else torch.rand(shape, generator=generator) + 0.1
        )
        return result.copy_(random)
    return result.copy_(torch.randint(0, 2, shape, generator=generator))


def run_eagerly(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The graph's results by eager PyTorch, then its inputs as it leaves them."""
    copies = [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    torch.manual_seed(0)
    results = torch.fx.Interpreter(gm).run(*copies)
    return [*results, *copies]


def with_mutation(gm: GraphModule) -> GraphModule:
    """The graph with its first input overwritten halfway by an in-place call, as a custom kernel would."""
    first = next(n for n in gm.graph.nodes if n.op == "placeholder")
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    with gm.graph.inserting_before(calls[1]):
        insert(gm.graph, torch.ops.aten.zero_.default, (first,), like=first)
    gm.recompile()
    return gm


@dataclasses.dataclass(frozen=True)
class claims(VendorBase):
    """A vendor for the passes: claims the dicp::* calls for which `accepts` holds."""

    accepts: Callable[[torch.fx.Node], bool] = lambda node: True

    def supports(self, target: Any, node: torch.fx.Node) -> bool:
        return target.namespace == "dicp" and self.accepts(node)
