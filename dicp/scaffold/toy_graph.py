"""toy_graph: a vendor whose toolchain takes graphs, in one file. Its "chip" is NumPy;
its toolchain turns a graph into a tape: calls, and the slots that their arguments are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx

import dicp

aten = torch.ops.aten
DTYPES = (torch.float32, torch.int64, torch.bool)


def reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims, keep=False: fn(x, axis=tuple(dims) or None, keepdims=keep)


def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


# What the chip computes.
CALLS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: np.add,
    aten.sub.Tensor: np.subtract,
    aten.mul.Tensor: np.multiply,
    aten.div.Tensor: np.divide,
    aten.pow.Tensor_Scalar: np.power,
    aten.neg.default: np.negative,
    aten.exp.default: np.exp,
    aten.log.default: np.log,
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.le.Scalar: np.less_equal,
    aten.where.self: np.where,
    aten.mm.default: np.matmul,
    aten._softmax.default: softmax,
    aten.sum.dim_IntList: reduction(np.sum),
    aten.mean.dim: reduction(np.mean),
    aten.mean.default: np.mean,
    aten.amax.default: reduction(np.max),
    aten.permute.default: np.transpose,
    aten.view.default: np.reshape,
    aten.expand.default: lambda x, sizes: np.broadcast_to(
        x, [x.shape[k - len(sizes)] if n == -1 else n for k, n in enumerate(sizes)]
    ),
    aten.unsqueeze.default: np.expand_dims,
    aten.sym_size.int: lambda x, d: x.shape[d],
}


@dataclass(frozen=True)
class Slot:
    """Where a value lies while the tape plays."""

    number: int


class Tape:
    """What the toolchain makes of a graph. It can be pickled, so that programs are kept in torch's caches."""

    def __init__(self, gm: fx.GraphModule) -> None:
        slots = {node: Slot(k) for k, node in enumerate(gm.graph.nodes)}
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        dtypes = [getattr(n.meta.get("val"), "dtype", None) for n in calls]
        self.tape = [
            (n.target, fx.node.map_arg(n.args, slots.get), slots[n], dtype) for n, dtype in zip(calls, dtypes)
        ]
        self.results = [slots[n] for n in gm.graph.output_node().args[0]]
        self.length = len(slots)

    def __call__(self, *inputs: Any) -> list[Any]:
        values: list[Any] = [x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in inputs]
        values += [None] * (self.length - len(values))

        def value(a: Any) -> Any:
            if isinstance(a, Slot):
                return values[a.number]
            return type(a)(map(value, a)) if isinstance(a, (list, tuple)) else a

        for call, args, slot, dtype in self.tape:
            found = CALLS.get(call, call)(*value(args))
            if dtype is not None:
                found = np.asarray(found).astype(str(dtype)[6:], copy=False)
            values[slot.number] = found
        results = map(value, self.results)
        return [torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in results]


class ToyGraph:
    """See dicp.vendor.base.GraphVendor."""

    name, device = "toy_graph", "cpu"

    def available(self, config: Any) -> str | None:
        return None

    def keeps(self, op: Any) -> bool:
        return op in CALLS

    def supports(self, target: Any, node: fx.Node) -> bool:
        vals = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        known = all(v.dtype in DTYPES for v in vals if isinstance(v, torch.Tensor))
        return target in CALLS and known and not node.kwargs

    def fingerprint(self, config: Any) -> str:
        return f"toy_graph 1, numpy {np.__version__}"

    def build(self, gm: fx.GraphModule, config: Any) -> Callable[..., list[Any]]:
        return Tape(gm)

    def load(self, artifact: Any, config: Any) -> Callable[[list[Any]], Any]:
        return artifact.function({})  # type: ignore[no-any-return]


vendor = ToyGraph()
backend = dicp.backend(vendor)
