"""What cuda_graph gives to libraries, all by way of aten: cuBLAS, cuDNN, the attention kernels torch ships,
CUB's sorts,
and torch's generator for random numbers (so that a seed means what it means under eager).

Products write into planned memory; the others allocate. Interpreted on CPU tensors, the same calls run there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph import attention, grouped, products
from dicp.vendor.cuda_graph.templates.convert import conversion

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Ops whose results their library allocates, by what serves them.
LIBRARY = {
    "attention": """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    "product": "_int_mm _addmm_activation _scaled_mm _grouped_mm",
    "pooling": "max_pool2d_with_indices max_pool2d_with_indices_backward",
    "sort": "sort topk",
    "generator": """native_dropout bernoulli rand rand_like randn randn_like randint randint_like randperm
    uniform normal
        normal_functional multinomial exponential geometric cauchy log_normal poisson""",
}


def claim_for(node: fx.Node, config: Any) -> Claim | None:
    """The call for a node, taken without measuring."""
    found = candidates(node, config)
    return found[0] if found else None


def candidates(node: fx.Node, config: Any) -> list[Claim]:
    """The calls that could serve a node, the one to take without measuring first; one under
    numerics="eager"."""
    make = _table().get(node.target)
    claim = make(node) if make is not None else None
    if claim is None:
        return []
    if node.target in _products() or node.target is torch.ops.dicp.linear.default:
        return products.candidates(node, config, claim)
    if node.target is aten._grouped_mm.default:
        return grouped.candidates(node, config, claim)
    if node.target in _attentions():
        return attention.candidates(node, config, claim)
    return [claim]


@functools.cache
def _attentions() -> frozenset[Any]:
    """Calls of attention that the template can make too."""
    names = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu")
    return frozenset([torch.ops.dicp.attention.default, *(getattr(aten, n).default for n in names)])


def keeps(op: Any) -> bool:
    """Whether some use of the op is claimed."""
    return op in _table()


def supports(target: Any, node: fx.Node) -> bool:
    """Whether a dicp::* call may be formed. Mostly products do not: the kernel that follows does the rest."""
    if target is torch.ops.dicp.linear.default:
        return products.supports_linear(node)
    if target is torch.ops.dicp.attention.default:
        val = node.meta.get("val")
        return isinstance(val, torch.Tensor) and val.dtype in FLOATS
    return False


def _through_aten(name: str, node: fx.Node) -> Claim:
    return Claim(name, lambda w, c: w._extern(c))


def _out(name: str, op: Any) -> Claim:
    """A call of an aten op that writes into planned memory."""

    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in c.args] + [f"{k}={w.value(v)}" for k, v in c.kwargs.items()]
        target = w.name(f"{name}_out", op)
        w.line(f"{target}({', '.join(args)}, out={w.into(c.outputs[0])})", c.note)

    return Claim(f"{name}: cuBLAS", emit, out=True)


@functools.cache
def _products() -> dict[Any, Callable[[fx.Node], Claim]]:
    outs = {
        aten.mm.default: aten.mm.out,
        aten.addmm.default: aten.addmm.out,
        aten.bmm.default: aten.bmm.out,
        aten.baddbmm.default: aten.baddbmm.out,
    }

    def claim(op: Any) -> Callable[[fx.Node], Claim]:
        return lambda node: _out(op._opname, outs[op])

    return {op: claim(op) for op in outs}


# -- convolution ---------------------------------------------------------------------------------------------


def _channels_last(v: View) -> bool:
    def far(d: int) -> int:
        stride = v.strides[d]
        return -stride if isinstance(stride, int) else -(1 << 40)

    order = sorted(range(len(v.shape)), key=far)
    return order in ([0, 2, 3, 1], [0, 2, 3, 4, 1])


def _conv_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """cuDNN answers in channels-last when an operand is; else as traced."""
    from dicp.schedule.strides import dense_strides

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


def _in_layout(count: int) -> Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]]:
    """The first operands stored in the layout that the layout pass chose for them."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        wanted = list(args)
        for k in range(min(count, len(args))):
            source = node.args[k]
            if isinstance(source, fx.Node) and "dicp_layout" in source.meta:
                wanted[k] = lowering.in_order(args[k], source.meta["dicp_layout"])
        return wanted

    return prepare


def _convolution(node: fx.Node) -> Claim:
    operands = 3 if node.target is aten.convolution_backward.default else 1
    return Claim(
        "convolution: cuDNN", lambda w, c: w._extern(c), strides=_conv_strides, prepare=_in_layout(operands)
    )


# -- attention -----------------------------------------------------------------------------------------------


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """dicp::attention by the best kernel torch has for it; [B, H, S, D] lying in memory as [B, S, H, D]."""
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        mask = mask.to(q.dtype)
    if causal and mask is not None:  # torch takes one or the other
        open_ = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = mask & open_ if mask.dtype == torch.bool else mask.masked_fill(~open_, float("-inf"))
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attention(node: fx.Node) -> Claim:
    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in (*c.args, *[None] * 6)[:6]]
        args[4] = args[4] if args[4] != "None" else "False"
        w.line(f"result = {w.name('attend', attend)}({', '.join(args)})", c.note)
        w.keep(c, "result")

    return Claim("attention", emit)


@functools.cache
def _table() -> dict[Any, Callable[[fx.Node], Claim | None]]:
    from dicp.ops.library import register

    register()
    table: dict[Any, Callable[[fx.Node], Claim | None]] = {**_products()}
    for served, names in LIBRARY.items():
        for name in names.split():
            packet = getattr(aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                op = getattr(packet, overload)
                if not op._schema.is_mutable:
                    table[op] = functools.partial(_through_aten, served)
    return table | {
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution,
        torch.ops.dicp.attention.default: _attention,
        torch.ops.dicp.linear.default: products.linear_library,
        aten._to_copy.default: conversion,
        torch.ops.prims.convert_element_type.default: conversion,
    }
