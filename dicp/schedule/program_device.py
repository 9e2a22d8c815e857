"""The device that a program runs on. Tensors elsewhere are handed on as they are, between calls of eager
PyTorch: kernels and libraries take addresses of one device alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx


class ProgramDevice:
    """Of a graph. kind: the type of device that the vendor runs programs on here; None where it does not say:
    then the type that it serves, `served`, if there is a tensor of it, or that of the first tensor.

    A number in a tensor of no dims on the CPU goes along with tensors of any device, as in eager PyTorch.
    """

    def __init__(self, gm: fx.GraphModule, kind: str | None, served: str) -> None:
        known = [(node, t, t.device) for node in gm.graph.nodes for t in _tensors(node)]
        devices = dict.fromkeys(device for _, _, device in known)  # to ask each tensor again takes long
        if len(devices) > 1:
            devices = dict.fromkeys([*(device for _, t, device in known if t.dim()), *devices])
        types = [d.type for d in devices]
        kind = kind or (served if served in types else next(iter(types), served))
        self.device = next((d for d in devices if d.type == kind), torch.device(kind))
        self.alone = all(device == self.device for device in devices)
        self.numbers = {
            node
            for node, t, _ in known
            if not self.alone and node.op in ("placeholder", "get_attr") and self._goes_along(node, t)
        }

    def holds(self, t: torch.Tensor) -> bool:
        return self.alone or t.device == self.device

    def takes(self, node: fx.Node) -> bool:
        """Whether the node's tensors are here, or numbers that go along."""
        return self.alone or node in self.numbers or all(self.holds(t) for t in _tensors(node))

    def elsewhere(self, node: fx.Node) -> torch.device | None:
        """Another device that a call has to do with."""
        if self.alone:
            return None
        others = [n for n in (node, *node.all_input_nodes) if not self.takes(n)]
        return next((t.device for n in others for t in _tensors(n) if not self.holds(t)), None)

    def _goes_along(self, node: fx.Node, t: torch.Tensor) -> bool:
        if t.dim() or t.device.type != "cpu" or self.holds(t):
            return False
        made = [_tensors(user) for user in node.users]
        return bool(made) and all(ts and all(self.holds(t) for t in ts) for ts in made)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    val: Any = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else (val,)
    return [v for v in vals if isinstance(v, torch.Tensor)]


__all__ = ["ProgramDevice"]
