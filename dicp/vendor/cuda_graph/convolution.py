"""Who computes a convolution: cuDNN, or a template (templates/convolution.py).

Without measuring, cuDNN has what stands alone. The template comes first where it saves passes over the result
(an activation, a residual), which are what the time goes to while a sum has few terms. The constants have not
been measured on a GPU yet; the chooser measures what is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.ops.library import ACTIVATIONS
from dicp.schedule.defs import Call, View
from dicp.schedule.strides import dense_strides
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph import products
from dicp.vendor.cuda_graph.templates import Launched, claim
from dicp.vendor.cuda_graph.templates.convolution import convolution, kernels
from dicp.vendor.cuda_graph.templates.product import Plan

aten = torch.ops.aten
FUSED_TERMS = {torch.float32: 64, torch.bfloat16: 256, torch.float16: 256}
"""Terms of a sum up to which saving passes over the result is more than what cuDNN is faster by: less than a
product's, since the template computes addresses besides."""
Parts = tuple[Any, Any, Any, Any, Any, Any, Any, int, str]


def _parts(args: Sequence[Any], target: Any) -> Parts:
    """(x, w, bias, residual, stride, padding, dilation, groups, act) of either call."""
    if target is torch.ops.dicp.conv.default:
        return tuple(args)  # type: ignore[return-value]
    x, w, b, stride, padding, dilation, _, _, groups = args
    return x, w, b, None, stride, padding, dilation, groups, "none"


def _served(node: fx.Node) -> bool:
    """Whether the template has the form of a call."""
    x, w, *_, groups, _ = _parts(node.args, node.target)
    val = node.meta["val"]
    if node.target is aten.convolution.default and node.args[6]:
        return False
    if node.kwargs or groups != 1 or val.dim() != 4 or val.dtype not in products.FLOATS:
        return False
    tensors = [t for a in node.all_input_nodes if isinstance(t := a.meta["val"], torch.Tensor)]
    empty = any(size_hint(n) == 0 for t in (*tensors, val) for n in t.shape)
    return not empty and all(t.dtype == val.dtype for t in tensors)


def _terms(node: fx.Node) -> int:
    w = node.args[1].meta["val"]  # type: ignore[union-attr]
    return int(torch.Size([size_hint(n) for n in w.shape[1:]]).numel())


def supports(node: fx.Node) -> bool:
    """Whether dicp::conv is formed: where the template would compute it."""
    *_, residual, _, _, _, _, act = _parts(node.args, node.target)
    return _served(node) and (act != "none" or residual is not None) and _terms(node) <= _most_terms(node)


def _most_terms(node: fx.Node) -> int:
    return FUSED_TERMS[node.meta["val"].dtype]


def candidates(node: fx.Node, config: Any, library: Claim) -> list[Claim]:
    """The claims of a convolution, the one to take without measuring first."""
    if config.numerics == "eager" or not _served(node):
        return [library]
    made = [_template(node, config, plan) for plan in _plans(node)]
    first = node.target is torch.ops.dicp.conv.default
    return [made[0], library, *made[1:]] if first else [library, *made]


def _plans(node: fx.Node) -> list[Plan]:
    batch, channels, height, width = (size_hint(n) for n in node.meta["val"].shape)
    pixels = max(64, batch * height * width)  # as for rows that vary: tiles, not rows one by one
    cuts = products.plans(pixels, channels, _terms(node), 1, node.meta["val"].dtype, few=False, along_k=True)
    return list(dict.fromkeys(replace(p, split=1) for p in cuts))


def _template(node: fx.Node, config: Any, plan: Plan) -> Claim:
    def made(c: Call) -> Sequence[Launched]:
        x, w, b, residual, stride, padding, dilation, _, act = _parts(c.args, c.node.target)
        y = c.outputs[0]
        problem = convolution(
            x,
            w,
            b,
            residual,
            View(y, y.shape, y.strides),
            _pair(stride),
            _pair(padding),
            _pair(dilation),
            act,
            products.precision(),
        )
        return kernels(problem, plan, (c.note,) if c.note else (), config.interpret)

    return claim(f"convolution: Triton {plan}", made, strides=_strides, prepare=_in_layout(node))


def _pair(values: Sequence[Any]) -> tuple[int, int]:
    return (int(values[0]), int(values[-1]))


# -- the library ---------------------------------------------------------------------------------------------


def library(node: fx.Node) -> Claim:
    """A convolution, or its backward, by cuDNN."""
    return Claim(
        "convolution: cuDNN", lambda w, c: w._extern(c), strides=_strides, prepare=_in_layout(node)
    )


def library_of_all(node: fx.Node) -> Claim:
    """dicp::conv by cuDNN, and what follows it by aten."""

    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in c.args]
        w.line(f"result = {w.name('convolve', convolve)}({', '.join(args)})", c.note)
        w.keep(c, "result")

    return Claim("convolution: cuDNN, then aten", emit, strides=_strides, prepare=_in_layout(node))


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    act: str,
) -> torch.Tensor:
    """dicp::conv."""
    y = aten.convolution(x, w, b, stride, padding, dilation, False, [0] * len(stride), groups)
    y = y if residual is None else y.add_(residual)
    return ACTIVATIONS[act](y)


def _channels_last(v: View) -> bool:
    def far(d: int) -> int:
        stride = v.strides[d]
        return -stride if isinstance(stride, int) else -(1 << 40)

    order = sorted(range(len(v.shape)), key=far)
    return order in ([0, 2, 3, 1], [0, 2, 3, 4, 1])


def _strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """cuDNN answers in channels-last when an operand is; else as traced."""
    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    tensors = [a for a in args[:3] if isinstance(a, View) and len(a.shape) in (4, 5)]
    if not any(map(_channels_last, tensors)):
        return None

    def strides(v: Any) -> Any:
        if not isinstance(v, torch.Tensor) or v.dim() not in (4, 5):
            return None
        return dense_strides(tuple(lowering.index(s) for s in v.shape), (0, *range(2, v.dim()), 1))

    return [strides(v) for v in vals]


def _in_layout(node: fx.Node) -> Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]]:
    """The first operands stored in the layout that the layout pass chose for them."""
    count = 3 if node.target is aten.convolution_backward.default else 1

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        wanted = list(args)
        for k in range(min(count, len(args))):
            source = node.args[k]
            if isinstance(source, fx.Node) and "dicp_layout" in source.meta:
                wanted[k] = lowering.in_order(args[k], source.meta["dicp_layout"])
        return wanted

    return prepare


__all__ = ["candidates", "library", "library_of_all", "supports"]
