"""Templates that a model will need, as far as the calls of Dynamo's graph tell: they compile while
AOTAutograd traces it, on a core that would idle. What was guessed wrong lies in the cache for another model;
what was not guessed is compiled when the graph is lowered.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from dicp.compat import size_hint
from dicp.config import Config
from dicp.runtime.workers import worker_count
from dicp.vendor.base import Convolution
from dicp.vendor.cpu_graph.build import Unit, build
from dicp.vendor.cpu_graph.claims import (
    attention,
    attention_gradient,
    depthwise,
    gemv,
    linears,
    matmul,
    winograd,
)
from dicp.vendor.cpu_graph.claims.common import FLOATS, argument, onednn_has
from dicp.vendor.cpu_graph.expression import STORAGE

log = logging.getLogger("dicp.build")


def build_speculatively(gm: fx.GraphModule, config: Config) -> threading.Thread | None:
    """Start compiling what Dynamo's graph will need and the cache lacks, one after another; None where it is
    nothing. What fails here is of no consequence: the compile that follows does it again, and says."""
    if config.no_compile or config.numerics == "eager" or torch.is_autocast_enabled("cpu"):
        return None
    if worker_count(override=config.workers) == 1:  # one compiler at a time, and it may be needed
        return None
    units: dict[str, Unit] = {}
    try:
        for node in gm.graph.nodes:
            units |= {unit.source: unit for unit in _of(node)}
    except Exception as e:
        log.debug("no guess at templates beyond %d: %s", len(units), e)
    if not units:
        return None

    def compile_them() -> None:
        try:
            build(list(units.values()), dataclasses.replace(config, workers=1))
        except Exception as e:
            log.debug("templates were not compiled ahead: %s", e)

    thread = threading.Thread(target=compile_them, name="dicp-ahead")
    thread.start()
    return thread


def _of(node: fx.Node) -> Iterator[Unit]:
    """The templates of one call."""
    if node.op != "call_function":
        return
    if node.target is torch.conv2d:
        yield from _of_convolution(node)
    elif node.target is F.linear:
        yield from _of_linear(node)
    elif node.target is F.scaled_dot_product_attention:
        yield from _of_attention(node)


def _value(x: Any) -> Any:
    return x.meta.get("example_value") if isinstance(x, fx.Node) else None


def _differentiated(*values: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def _of_convolution(node: fx.Node) -> Iterator[Unit]:
    x, weight = (_value(argument(node, k, name, None)) for k, name in enumerate(("input", "weight")))
    y, groups = _value(node), argument(node, 6, "groups", 1)
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    how = [argument(node, at, name, n) for at, (name, n) in enumerate(defaults.items(), start=3)]
    if not all(isinstance(v, Tensor) and v.dim() == 4 for v in (x, weight, y)):
        return
    if not all(isinstance(n, (int, tuple, list)) for n in how):  # padding in words, what is computed
        return
    stride, padding, dilation = ((n, n) if isinstance(n, int) else (n[0], n[-1]) for n in how)
    sizes = (*stride, *padding, *x.shape, *weight.shape, *y.shape)
    if dilation != (1, 1) or not all(isinstance(n, int) for n in sizes):
        return
    dtype, window = weight.dtype, tuple(weight.shape[2:])
    if groups == 1:
        positions, size = y.numel() // y.shape[1], tuple(y.shape[2:])
        channels = (x.shape[1], y.shape[1])
        conv = Convolution(positions, size, channels, window, stride, padding, dtype, dtype)
        if winograd.pays_for(conv):
            yield _unit(*winograd.unit(dtype), "light")
            if _differentiated(weight) and dtype == torch.float32:
                yield Unit("winograd_gradient", winograd.WINDOW_UNIT, effort="light")
    elif groups == weight.shape[0] == x.shape[1] and onednn_has(dtype):
        in_a_block = window[1] <= 3 and not _differentiated(x, weight)  # which is one call (separable)
        if not in_a_block and depthwise.slides_faster(dtype, groups, (*stride, *dilation)):
            yield _unit(*depthwise.unit(STORAGE[dtype], "limited", window[1]))
        if _differentiated(weight):
            yield _unit(*depthwise.gradient_unit("window", STORAGE[dtype]))


def _of_linear(node: fx.Node) -> Iterator[Unit]:
    """Of few rows and weights that come from memory: those of one operand together, as rewrite_linears has
    them, with the activation, or the gate, that alone reads a result."""
    x, weight = (_value(argument(node, k, name, None)) for k, name in enumerate(("input", "weight")))
    if not all(isinstance(v, Tensor) and v.dtype in FLOATS for v in (x, weight)) or weight.dim() != 2:
        return
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or not rows:
        return
    if not gemv.are_few(rows, size_hint(x.shape[-1]), weight.dtype):
        return
    nbytes = size_hint(weight.numel()) * weight.element_size()
    if x.dtype != weight.dtype or weight.stride(1) != 1 or nbytes < matmul.FEW_BYTES:
        return
    kinds = {"T": STORAGE[x.dtype], "W": STORAGE[weight.dtype], "S": STORAGE[torch.float32]}
    differentiated = _differentiated(x, weight)  # what an activation reads is kept then
    act = "none" if differentiated else _activation(node)
    operand = argument(node, 0, "input", None)
    layers = [n for n in operand.users if n.target is F.linear]
    if act != "none" and any(_gates(node, n) for n in layers):
        yield _unit(*linears.unit(rows, 2, kinds, act, gated=True))
        return
    if any(_gates(n, node) for n in layers) and not differentiated:
        return
    alike = [n for n in layers if differentiated or _activation(n) == act]
    if 1 < len(alike) <= linears.MOST:
        yield _unit(*linears.unit(rows, len(alike), kinds, act, gated=False))
    else:
        yield _unit(*gemv.unit(rows, kinds, False, act))


def _gates(a: fx.Node, b: fx.Node) -> bool:
    """Whether act(a) * b is all that reads both."""
    user = next(iter(a.users), None)
    if user is None or a is b or _activation(a) == "none" or len(user.users) != 1 or len(b.users) != 1:
        return False
    product = next(iter(user.users))
    return product in b.users and product.target in (operator.mul, torch.mul)


def _activation(node: fx.Node) -> str:
    """The word of dicp::linear for the call that alone reads a node, "none" where there is none."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.op != "call_function":
        return "none"
    if user.target is F.gelu:
        return "gelu" if argument(user, 1, "approximate", "none") == "none" else "gelu_tanh"
    return {F.silu: "silu", torch.sigmoid: "sigmoid", torch.tanh: "tanh"}.get(user.target, "none")


def _of_attention(node: fx.Node) -> Iterator[Unit]:
    names = ("query", "key", "value", "attn_mask")
    q, k, v, mask = (_value(argument(node, at, name, None)) for at, name in enumerate(names))
    if not isinstance(q, Tensor) or q.dim() != 4 or argument(node, 4, "dropout_p", 0.0):
        return
    if not isinstance(q.shape[2], int) or q.dtype not in FLOATS:
        return
    added = mask.dtype if isinstance(mask, Tensor) and mask.is_floating_point() else q.dtype
    if q.shape[2] <= attention.DECODED_ROWS and isinstance(k, Tensor):
        if size_hint(k.numel(), attention.FEW_BYTES) * k.element_size() >= attention.FEW_BYTES:
            yield _unit(*attention.rows_unit(q.dtype, added))
        return
    if q.shape[2] < attention.FEW_ROWS:
        return
    unit = attention.tiles_unit(q.dtype, added)
    if unit is not None:
        yield _unit(*unit)
        if _differentiated(q, k, v) and attention.multiplied(q.dtype) == q.dtype:
            yield _unit(*attention_gradient.unit(q.dtype, added))


def _unit(name: str, parameters: str, source: str, effort: Any = "full") -> Unit:
    return Unit(name, source, effort=effort)


__all__ = ["build_speculatively"]
