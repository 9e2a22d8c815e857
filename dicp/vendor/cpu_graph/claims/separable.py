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

_X, _W1, _B1, _OTHER, _W2, _B2, _W3, _B3, _STRIDE1, _PADDING1, _STRIDE2, _PADDING2, _ACT1, _ACT2 = range(14)
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


def _values(node: fx.Node, *positions: int) -> list[torch.Tensor]:
    return [a.meta["val"] for k in positions if (a := node.args[k]) is not None]  # type: ignore[union-attr]


def _has_known_sizes(node: fx.Node) -> bool:
    """All but the batch, none of them 0."""
    images = [*_values(node, _X), node.meta["val"]]
    weights = _values(node, _W1, _B1, _W2, _B2, _W3, _B3)
    sizes = [n for v in images for n in v.shape[1:]] + [n for v in weights for n in v.shape]
    return all(isinstance(n, int) and n > 0 for n in sizes)


def _reads(node: fx.Node) -> bool:
    """Whether all is of dtypes that the template takes; products of 16-bit types take pairs."""
    dtype = node.meta["val"].dtype
    tensors, biases = _values(node, _X, _W1, _W2, _W3, _OTHER), _values(node, _B1, _B2, _B3)
    if any(v.dtype != dtype for v in tensors) or any(v.dtype != torch.float32 for v in biases):
        return False
    hidden, channels = tensors[1].shape[:2]
    even = hidden % 2 == 0 and not (_is_pointwise(node) and channels % 2)
    return available(dtype) and (dtype == torch.float32 or even)


def _fits(node: fx.Node) -> bool:
    """Whether blocks of weights and bands stay in the caches, and more than that is not lost."""
    first, second = (v.shape for v in _values(node, _W1, _W2))
    stride: Any = node.args[_STRIDE2]
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
    values = (node.args[_X].meta["val"], node.meta["val"])  # type: ignore[union-attr]
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
    out = list(images.prepare(_X, _OTHER)(lowering, node, args))
    out[_W1] = lowering.in_order(args[_W1], images.CHANNELS_LAST)
    for k in (_B1, _W2, _B2, _W3, _B3):
        if args[k] is not None:
            out[k] = lowering.operand(args[k], dense=True)
    return out


def _bands(node: fx.Node, threads: int) -> Bands:
    a: Any = node.args
    image, result = a[_X].meta["val"], node.meta["val"]
    hidden, _, taps, _ = a[_W2].meta["val"].shape
    _, width = _middle(image, a[_W1].meta["val"], a[_STRIDE1], a[_PADDING1])
    _, results, rows, columns = result.shape
    stride, pad = a[_STRIDE2][0], a[_PADDING2][-1]
    batch = image.shape[0] if isinstance(image.shape[0], int) else None

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


def _middle(image: Any, weight: Any, stride: Sequence[int], padding: Sequence[int]) -> tuple[Any, Any]:
    """Height and width of what the first convolution makes, of tensors or views."""
    size = zip(
        image.shape[2:], weight.shape[2:], (stride[0], stride[-1]), (padding[0], padding[-1]), strict=True
    )
    height, width = ((n + 2 * p - w) // s + 1 for n, w, s, p in size)
    return height, width


def _is_pointwise(node: fx.Node) -> bool:
    """Whether the first convolution is."""
    a: Any = node.args
    ones = (*a[_W1].meta["val"].shape[2:], *a[_STRIDE1])
    return all(n == 1 for n in ones) and not any(a[_PADDING1])


def _even(n: int) -> int:
    return -(-n // 2) * 2


def _workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
    """Bytes for as many threads as there are, and for fewer, whose bands may be larger."""
    return max(_bytes(node, threads) for threads in range(1, images.threads(lowering) + 1)) + 64


def _bytes(node: fx.Node, threads: int) -> int:
    cut, size = _bands(node, threads), node.meta["val"].element_size()
    first, window = (node.args[k].meta["val"].shape for k in (_W1, _W2))  # type: ignore[union-attr]
    depth, area = _even(math.prod(first[1:])), math.prod(window[2:])
    weights = cut.chunks * cut.chunk * ((depth + cut.results) * size + 4 * (area + 2))
    gathered = 0 if _is_pointwise(node) else PIXELS * depth
    middle = ((cut.images * cut.tall * cut.wide + PIXELS) * cut.chunk + gathered) * size
    sums = 4 * (PIXELS * cut.chunk + cut.images * cut.rows * node.meta["val"].shape[3] * cut.results)
    return int(weights + threads * (middle + sums))


def _emit(w: Any, c: Call) -> None:
    a = c.args
    out = c.outputs[0]
    assert out is not None
    y, x, other = View(out, out.shape, out.strides), a[_X], a[_OTHER]
    hidden, taps = a[_W2].shape[0], a[_W2].shape[2]
    pairs = [(p[0], p[-1]) for p in (a[_STRIDE1], a[_PADDING1], a[_PADDING2])]
    middle = _middle(x, a[_W1], a[_STRIDE1], a[_PADDING1])
    first = [*a[_W1].shape[2:], *pairs[0], *pairs[1]]
    second = [hidden, *middle, *pairs[2], a[_STRIDE2][0]]
    lie = [s for v in (x, y, other) for s in images.pitch(v)]
    sizes, _ = w.ints([*x.shape, *first, *second, *y.shape[1:], *lie])
    word = STORAGE[out.dtype]
    acts = (a[_ACT1], a[_ACT2])
    of_acts = [activation_of(act) for act in acts]
    name = f"separable_{word}_{taps}_{'_'.join(acts)}"
    parameters = _PARAMETERS.format(T=word)
    types = ", ".join((word, str(taps), *(name.upper() for name, _ in of_acts)))
    limits = ", ".join(f"{{{low}, {high}}}" for _, (low, high) in of_acts)
    source = _SOURCE.format(name=name, parameters=parameters, types=types, limits=limits)
    given = [w.pointer_to(a[k]) for k in (_X, _W1, _B1, _W2, _B2, _W3, _B3, _OTHER)]
    w.call(c, w.template(name, parameters, source, "light"), [*given, w.pointer(out), sizes, *space(w, c)])


__all__ = ["gain", "separable", "supports"]
