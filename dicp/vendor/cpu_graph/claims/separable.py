"""Depthwise-separable convolutions behind another one, in bands of which nothing wide leaves the caches
(include/dicp_separable.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.ops.conv_call import SeparableCall, pair, separable_call
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims import images
from dicp.vendor.cpu_graph.claims.common import SPACE, activation_of, space, whole_lines
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.microkernels import available

BAND, PIXELS, CHUNK, CHUNK_TALL = 1 << 16, 96, 64, 32
"""As in the header."""
DEEPEST = 512
"""Channels of the image, times the first's window, and of the result at the most: blocks of so many rows of
weights stay in the caches."""
GATHERED = 16
"""Channels of an image from which on a first convolution with a window is better off as a call of its own."""
LARGEST_WINDOW = 7
REPEATED = 1.5
"""How often a row of the middle is made at the most: bands overlap by what a window is larger than its
stride."""
CONVERSIONS = 1.5
"""What channels-last spares, in the layout pass's bytes: that image and result are brought into it, less
what the pass counts of any convolution."""

_PARAMETERS = (
    "const {T}* x, const {T}* w1, const float* b1, const {T}* w2, const float* b2, const {T}* w3, "
    "const float* b3, const {T}* other, {T}* y, const int64_t* sizes, " + SPACE
)
_SOURCE = """\
#include "dicp_separable.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  return separable<{types}>(x, w1, b1, w2, b2, w3, b3, other, y, sizes, {limits}, {{space, bytes, threads}});
}}
"""


@dataclass(frozen=True)
class Bands:
    """How the header cuts the work, of as many images as fit where their number varies."""

    chunk: int
    chunks: int
    results: int
    wide: int
    images: int
    rows: int
    tall: int


def supports(node: fx.Node) -> bool:
    """Whether the template makes this dicp::separable: of one dtype for which there are micro-kernels, with a
    square second window, and images of a known height and width that are not too wide for bands."""
    return _has_known_sizes(node) and _reads(node) and _fits(node)


def _call(node: fx.Node) -> SeparableCall:
    """With the values of the tensors."""
    call = separable_call(node, [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args])
    assert call is not None, node.target
    return call


def _has_known_sizes(node: fx.Node) -> bool:
    """All but the batch, none of them 0."""
    call = _call(node)
    images = [call.x, node.meta["val"]]
    operands = (call.w1, call.b1, call.w2, call.b2, call.w3, call.b3)
    weights = [v for v in operands if v is not None]
    sizes = [n for v in images for n in v.shape[1:]] + [n for v in weights for n in v.shape]
    return all(isinstance(n, int) and n > 0 for n in sizes)


def _reads(node: fx.Node) -> bool:
    """Whether all is of dtypes that the template takes; products of 16-bit types take pairs."""
    dtype, call = node.meta["val"].dtype, _call(node)
    tensors, biases = (call.x, call.w1, call.w2, call.w3, call.other), (call.b1, call.b2, call.b3)
    others = [v for v in tensors if v is not None and v.dtype != dtype]
    if others or any(v is not None and v.dtype != torch.float32 for v in biases):
        return False
    hidden, channels = call.w1.shape[:2]
    even = hidden % 2 == 0 and not (_is_pointwise(node) and channels % 2)
    return available(dtype) and (dtype == torch.float32 or even)


def _fits(node: fx.Node) -> bool:
    """Whether blocks of weights and bands stay in the caches, and more than that is not lost."""
    call = _call(node)
    first, second, stride = call.w1.shape, call.w2.shape, call.stride2
    square = second[2] == second[3] <= LARGEST_WINDOW and len({*stride}) == 1 and stride[0] <= second[2]
    result = node.meta["val"].shape
    small = max(math.prod(first[1:]), result[1]) <= DEEPEST and first[1] <= first[0]
    if not square or not small or not (_is_pointwise(node) or first[1] < GATHERED):
        return False
    cut = _bands(node, 1)
    if cut.tall * cut.wide * cut.chunk > BAND:
        return False
    return cut.rows == result[2] or cut.tall <= REPEATED * cut.rows * stride[0]


def gain(node: fx.Node) -> float:
    """What channels-last spares, in the layout pass's bytes."""
    if node.target is not torch.ops.dicp.separable.default:
        return 0.0
    values = (_call(node).x, node.meta["val"])
    return CONVERSIONS * sum(math.prod(size_hint(n) for n in v.shape) * v.element_size() for v in values)


def separable(node: fx.Node, config: Config) -> Claim | None:
    if not supports(node):
        return None
    return Claim(
        "separable: bands",
        _emit,
        out=True,
        strides=images.strides,
        prepare=_prepare,
        workspace=_workspace,
    )


def _prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    at = SeparableCall._fields.index
    out = list(images.prepare(at("x"), at("other"))(lowering, node, args))
    out[at("w1")] = lowering.in_order(args[at("w1")], images.CHANNELS_LAST)
    for k in map(at, ("b1", "w2", "b2", "w3", "b3")):
        if args[k] is not None:
            out[k] = lowering.operand(args[k], dense=True)
    return out


def _bands(node: fx.Node, threads: int) -> Bands:
    call, result = _call(node), node.meta["val"]
    hidden, _, taps, _ = call.w2.shape
    _, width = _middle(call)
    _, results, rows, columns = result.shape
    stride, pad = call.stride2[0], call.padding2[-1]
    batch = call.x.shape[0] if isinstance(call.x.shape[0], int) else None

    def tall(rows: int) -> int:
        return int((rows - 1) * stride + taps)

    wide = max(width + pad, (columns - 1) * stride + taps)
    chunk = min(CHUNK_TALL if wide * tall(rows) * CHUNK > BAND else CHUNK, whole_lines(hidden))
    fits = BAND // (chunk * wide)
    most = 1 if fits < taps + stride else (fits - taps) // stride + 1
    parts = -(-rows // most) if most < rows else 1
    if batch is not None and batch * parts < threads:
        parts = min(rows, -(-threads // max(batch, 1)))
    of_band, count = -(-rows // parts), 1
    if -(-rows // of_band) == 1:
        count = max(min(fits // tall(rows), BAND // (rows * columns * whole_lines(results))), 1)
        count = count if batch is None else min(count, -(-batch // threads))
    chunks = -(-hidden // chunk)
    return Bands(chunk, chunks, whole_lines(results), wide, max(count, 1), of_band, tall(of_band))


def _middle(call: SeparableCall) -> tuple[Any, Any]:
    """Height and width of what the first convolution makes."""
    size = zip(call.x.shape[2:], call.w1.shape[2:], pair(call.stride1), pair(call.padding1), strict=True)
    height, width = ((n + 2 * p - w) // s + 1 for n, w, s, p in size)
    return height, width


def _is_pointwise(node: fx.Node) -> bool:
    """Whether the first convolution is."""
    call = _call(node)
    return all(n == 1 for n in (*call.w1.shape[2:], *call.stride1)) and not any(call.padding1)


def _even(n: int) -> int:
    return -(-n // 2) * 2


def _workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
    """Bytes for as many threads as there are, and for fewer, whose bands may be larger."""
    return max(_bytes(node, threads) for threads in range(1, images.threads(lowering) + 1)) + 64


def _bytes(node: fx.Node, threads: int) -> int:
    cut, size = _bands(node, threads), node.meta["val"].element_size()
    first, window = _call(node).w1.shape, _call(node).w2.shape
    depth, area = _even(math.prod(first[1:])), math.prod(window[2:])
    weights = cut.chunks * cut.chunk * ((depth + cut.results) * size + 4 * (area + 2))
    gathered = 0 if _is_pointwise(node) else PIXELS * depth
    middle = ((cut.images * cut.tall * cut.wide + PIXELS) * cut.chunk + gathered) * size
    sums = 4 * (PIXELS * cut.chunk + cut.images * cut.rows * node.meta["val"].shape[3] * cut.results)
    return int(weights + threads * (middle + sums))


def _emit(w: Any, c: Call) -> None:
    call = SeparableCall(*c.args)
    out = c.outputs[0]
    assert out is not None
    y = View(out, out.shape, out.strides)
    hidden, _, taps, _ = call.w2.shape
    first = [*call.w1.shape[2:], *pair(call.stride1), *pair(call.padding1)]
    second = [hidden, *_middle(call), *pair(call.padding2), call.stride2[0]]
    lie = [s for v in (call.x, y, call.other) for s in images.pitch(v)]
    sizes, _ = w.ints([*call.x.shape, *first, *second, *y.shape[1:], *lie])
    word = STORAGE[out.dtype]
    acts = (call.act1, call.act2)
    of_acts = [activation_of(act) for act in acts]
    name = f"separable_{word}_{taps}_{'_'.join(acts)}"
    parameters = _PARAMETERS.format(T=word)
    types = ", ".join((word, str(taps), *(name.upper() for name, _ in of_acts)))
    limits = ", ".join(f"{{{low}, {high}}}" for _, (low, high) in of_acts)
    source = _SOURCE.format(name=name, parameters=parameters, types=types, limits=limits)
    operands = (call.x, call.w1, call.b1, call.w2, call.b2, call.w3, call.b3, call.other)
    given = [*map(w.pointer_to, operands), w.pointer(out)]
    w.call(c, w.template(name, parameters, source, "light"), [*given, sizes, *space(w, c)])


__all__ = ["gain", "separable", "supports"]
