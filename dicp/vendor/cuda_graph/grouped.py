"""Who computes a product of groups (`aten._grouped_mm`): aten, or the template (templates/grouped.py).

From Hopper on aten has a kernel of CUTLASS's, and the chooser measures both. Before, it reads the offsets on
the host, which waits for the device and which no CUDA graph can hold: there the template comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cuda_graph import products
from dicp.vendor.cuda_graph.templates import Launched, Operand, claim
from dicp.vendor.cuda_graph.templates.grouped import Axis, Grouped, kernels
from dicp.vendor.cuda_graph.templates.product import Tiling

HOPPER = (9, 0)


def candidates(node: fx.Node, config: Config, library: Claim) -> list[Claim]:
    """The claims of a product of groups, the one to take without measuring first."""
    axis = _axis(node)
    if config.numerics == "eager" or axis is None:
        return [library]
    made = [_template(node, config, axis, tiling) for tiling in _tilings(node, axis)]
    return [library, *made] if _has_kernel() else [*made[:1], library, *made[1:]]


def _has_kernel() -> bool:
    """Whether aten has a kernel for groups on this GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


def _axis(node: fx.Node) -> Axis | None:
    """Along which axis the groups lie; None where the template has no such form."""
    a, b, offsets, bias, dtype = (*node.args, *[None] * 3)[:5]
    val = node.meta["val"]
    if offsets is None or bias is not None or node.kwargs or dtype not in (None, val.dtype):
        return None
    x, y = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    if val.dtype not in products.FLOATS or not x.dtype == y.dtype == val.dtype:
        return None
    forms: dict[tuple[int, int], Axis] = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}
    return forms.get((x.dim(), y.dim()))


def _tilings(node: fx.Node, axis: Axis) -> list[Tiling]:
    """Ways to cut it, best first, for groups of equal size."""
    x, y, offsets = (n.meta["val"] for n in node.args[:3])  # type: ignore[union-attr]
    groups = max(1, size_hint(offsets.shape[0]))
    extents = {"m": size_hint(x.shape[-2]), "n": size_hint(y.shape[-1]), "k": size_hint(x.shape[-1])}
    extents[axis] = max(1, extents[axis] // groups)
    m, n, k = extents["m"], extents["n"], extents["k"]
    along_k = size_hint(y.stride(-2)) == 1
    cuts = products.tilings(m, n, k, groups, x.dtype, few=False, along_k=along_k, widest=128)
    return list(dict.fromkeys(replace(p, split=1) for p in cuts))


def _template(node: fx.Node, config: Config, axis: Axis, tiling: Tiling) -> Claim:
    def made(c: Call) -> Sequence[Launched]:
        return kernels(_grouped(c, axis), tiling, (c.note,) if c.note else (), config.interpret)

    return claim(f"_grouped_mm: Triton {tiling}", made, prepare=dense(2))


def _grouped(c: Call, axis: Axis) -> Grouped:
    a, b, offsets = c.args[:3]
    y = c.outputs[0]
    return Grouped(
        "grouped_mm",
        offsets.shape[0],
        y.shape[-2],
        y.shape[-1],
        a.shape[-1],
        _operand("a", a),
        _operand("b", b),
        _operand("out", View(y, y.shape, y.strides)),
        precision=products.precision(),
        offsets=Operand("offsets", offsets, (1,)),
        axis=axis,
    )


def _operand(name: str, v: View) -> Operand:
    """What has no groups is the same for all."""
    return Operand(name, v, (0, *v.strides) if len(v.shape) == 2 else tuple(v.strides))


__all__ = ["candidates"]
