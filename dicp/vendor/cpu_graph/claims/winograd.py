"""3x3 convolutions by fewer multiplications (include/dicp_winograd.h, dicp_winograd_grad.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.ops.conv_call import conv_call, pair, the_conv_call
from dicp.passes.freeze import is_constant
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims import rectified
from dicp.vendor.cpu_graph.claims.common import LIMITS, SPACE, aten, onednn_has, space, whole_lines
from dicp.vendor.cpu_graph.claims.images import pitch, prepare, strides, threads
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.microkernels import available

BLOCK, GAP, CHUNK = 64, 16, 128
SLICE_BYTES, SLICE_RESULTS = 4 << 20, 128
FEW_RESULTS = {torch.float32: 64, torch.bfloat16: 32}
TILES_AT_ONCE = {torch.float32: 288, torch.bfloat16: 128}
"""The header's constants that its workspace depends on: TILE_BLOCK and RESULT_BLOCK, GAP, CHUNK, those
of a slice, FEW_RESULTS and TILES_AT_ONCE."""
MOST_LANES = 16  # of a vector, wherever the program is built
TILE = {torch.float32: 2, torch.bfloat16: 4}
"""Rows and columns of results that are one tile, N of the header: as many as do not show in results of a
dtype."""

FEW_CHANNELS, FEW_TILES = 16, 4
FEW_TILES_OF_CONSTANT = {torch.float32: 32, torch.bfloat16: 16}
FILLED = {torch.float32: 0.0, torch.bfloat16: 0.8}
"""Under which oneDNN's convolution is as fast, or its convolution by constant weights: channels, tiles, the
part of the tiles that is results (docs/cpu_graph.md has the table)."""

SPARED = {torch.float32: 0.4, torch.bfloat16: 0.2}
"""Part of oneDNN's time that it spares where it pays."""
BYTE_OPERATIONS = {torch.float32: 7.0, torch.bfloat16: 14.0}
"""Operations of a convolution in the time that the layout pass counts for moving one byte."""

_PARAMETERS = (
    "const {x}* x, const {x}* w, const {x}* bias, const float* wide, const {x}* other, {x}* y, "
    f"const int64_t* sizes, bool flipped, float low, float high, {SPACE}, bool* finite"
)
_UNIT = """\
#include "dicp_winograd.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  const Workspace own{{space, bytes, threads}};
  return winograd<{tile}, {x}>(x, w, {{bias, wide, other, {{low, high}}}}, y, sizes, flipped, own, finite);
}}
"""


def unit(dtype: torch.dtype) -> tuple[str, str, str]:
    """Name, parameters and source of the function for images of a dtype."""
    word = STORAGE[dtype]
    name, parameters = f"winograd_{word}", _PARAMETERS.format(x=word)
    return name, parameters, _UNIT.format(name=name, parameters=parameters, tile=TILE[dtype], x=word)


_WINDOW_PARAMETERS = (
    f"const float* x, const float* grad, float* w, const int64_t* sizes, {SPACE}, bool* finite"
)
WINDOW_UNIT = f"""\
#include "dicp_winograd_grad.h"
using namespace dicp;

DICP_EXPORT int32_t winograd_gradient({_WINDOW_PARAMETERS}) {{
  return winograd_window(x, grad, w, sizes, {{space, bytes, threads}}, finite);
}}
"""


@dataclass(frozen=True)
class Window:
    """A convolution, or the gradient of one's input, which is a convolution of the result's gradient with the
    window turned by 180 degrees."""

    image: fx.Node
    weight: fx.Node
    sizes: tuple[int, int, int, int]
    """batch, rows and columns of the result, as seen while tracing, and its channels"""

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.meta["val"].dtype  # type: ignore[no-any-return]

    @property
    def channels(self) -> int:
        return int(self.weight.meta["val"].numel()) // (9 * self.sizes[3])


def window_of(node: fx.Node) -> Window | None:
    """What the templates compute of this node: images of a dtype of TILE, a 3x3 window, stride 1; the
    gradient of the window in float32 only."""
    call = conv_call(node) if node.target is not aten.convolution.default else None
    if call is None or call.act not in LIMITS or call.transposed:
        return None
    image, made = (call.grad, call.x) if call.is_backward else (call.x, node)
    result, val = made.meta["val"], call.weight.meta["val"]
    fits = (
        (not call.is_backward or call.mask[0] or val.dtype == torch.float32)
        and serves(val.dtype)
        and all(v.dtype == val.dtype for v in (image.meta["val"], result))
        and val.dim() == 4
        and tuple(val.shape[2:]) == (3, 3)
        and all(isinstance(n, int) for n in val.shape)
        and all(s == 1 for s in (*call.stride, *call.dilation, call.groups))
        and all(0 <= p <= 2 for p in call.padding)
    )
    if not fits:
        return None
    batch, channels, rows, columns = (size_hint(n) for n in result.shape)
    return Window(image, call.weight, (batch, rows, columns, channels))


def serves(dtype: torch.dtype) -> bool:
    """Images of a dtype, but where the library lacks it: there they are float32's (passes/widen.py)."""
    return dtype in TILE and available(torch.float32) and onednn_has(dtype)


def is_ahead(node: fx.Node) -> bool:
    """Whether the template computes this node, and pays."""
    window = window_of(node)
    return window is not None and pays(window)


def pays(window: Window) -> bool:
    """Whether it is ahead of oneDNN's convolution, and of its gradients."""
    *positions, results = window.sizes
    return _pays(window.dtype, (window.channels, results), positions, is_constant(window.weight))


def pays_for(conv: Any) -> bool:
    """The same of a dicp.passes.conv_matmul.Convolution, whose weight may be any."""
    fits = conv.window == (3, 3) and conv.stride == (1, 1) and all(0 <= p <= 2 for p in conv.padding)
    positions = (conv.positions // math.prod(conv.size), *conv.size)
    return fits and serves(conv.dtype) and _pays(conv.dtype, conv.channels, positions, False)


def _pays(dtype: torch.dtype, channels: tuple[int, int], positions: Sequence[int], constant: bool) -> bool:
    """constant: oneDNN has the weight in the order it wants, into which it brings others at each call."""
    side, count = TILE[dtype], tiles(dtype, positions)
    needed, filled = (FEW_TILES_OF_CONSTANT[dtype], FILLED[dtype]) if constant else (FEW_TILES, 0.0)
    full = math.prod(positions) >= filled * count * side * side
    return min(channels) >= FEW_CHANNELS and count >= needed and full


def tiles(dtype: torch.dtype, positions: Sequence[int]) -> int:
    """Of batch, rows and columns."""
    batch, rows, columns = positions
    side = TILE[dtype]
    return batch * -(-rows // side) * -(-columns // side)


def gain(node: fx.Node) -> float:
    """What channels-last spares a convolution by way of this algorithm, in the layout pass's bytes."""
    window = window_of(node)
    if window is None or not pays(window):
        return 0.0
    operations = 18.0 * window.channels * math.prod(window.sizes)
    return SPARED[window.dtype] * operations / BYTE_OPERATIONS[window.dtype]


def forward() -> Claim:
    """y = act(conv(x, w) + bias + other)"""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        results, channels = args[1].shape[:2]
        return convolution_bytes(node.meta["val"], channels, results, threads(lowering))

    return Claim(
        "conv: Winograd",
        _emit_forward,
        out=True,
        strides=strides,
        prepare=prepare(0, 3, bias=2),
        workspace=workspace,
    )


def input_gradient() -> Claim:
    """The first result of convolution_backward, where only that is asked for."""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        results, channels = args[2].shape[:2]
        return convolution_bytes(node.meta["val"][0], results, channels, threads(lowering))

    return Claim(
        "convolution_backward: Winograd",
        _emit_input,
        out=True,
        strides=strides,
        prepare=prepare(0),
        workspace=workspace,
    )


def weight_gradient() -> Claim:
    """The second result of convolution_backward, where only that is asked for."""

    def strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
        return [None, None, None]  # as traced

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        results, channels = args[2].shape[:2]
        return gradient_bytes(channels, results, threads(lowering))

    return Claim(
        "convolution_backward: Winograd",
        _emit_weight,
        out=True,
        strides=strides,
        prepare=prepare(0, 1),
        workspace=workspace,
    )


def convolution_bytes(result: torch.Tensor, channels: int, results: int, threads: int) -> int:
    """Of the header's workspace: of the way that it goes, or of both at the most where that is not known."""
    positions = [n for k, n in enumerate(result.shape) if k != 1]
    at_once = TILES_AT_ONCE[result.dtype]
    known = all(isinstance(n, int) for n in positions)
    count = tiles(result.dtype, positions) if known else at_once
    many = _bytes_of_many(result.dtype, channels, results, threads)
    if count > at_once:
        return many
    few = _bytes_of_few(result.dtype, channels, count, threads)
    return few if known and results >= threads * MOST_LANES else max(many, few)


def _places(dtype: torch.dtype) -> int:
    return (TILE[dtype] + 2) ** 2


def _spread(tiles: int, channels: int) -> tuple[int, int]:
    """Elements of a place of spread tiles, and of one of the zeros."""
    row = whole_lines(channels) + 16
    return tiles * row + 16, row


def _bytes_of_many(dtype: torch.dtype, channels: int, results: int, threads: int) -> int:
    """A block of tiles and their products for each thread, a slice of weights."""
    places, (spread, zeros) = _places(dtype), _spread(BLOCK, channels)
    block = places * (channels * BLOCK + GAP)
    most = max(SLICE_BYTES // (4 * block), SLICE_RESULTS // BLOCK)  # blocks of a slice
    own = places * (spread + BLOCK * BLOCK + 16) + zeros
    return 4 * (threads * own + min(-(-results // BLOCK), most) * block) + 64


def _bytes_of_few(dtype: torch.dtype, channels: int, tiles: int, threads: int) -> int:
    """All tiles; for each thread their products with a block of results, a chunk of weights."""
    places, (spread, zeros) = _places(dtype), _spread(tiles, channels)
    weights = places * (CHUNK * FEW_RESULTS[dtype] + GAP)
    own = weights + 16 + places * (tiles * FEW_RESULTS[dtype] + 16) + zeros
    return 4 * (places * spread + threads * own) + 64


def gradient_bytes(channels: int, results: int, threads: int) -> int:
    """The same of the window's gradient: both images and sums for each thread, sums of parts of the tiles."""
    sums = 16 * (64 * 128 + 16)
    own = 16 * (48 * 128 + 16) + 16 * (64 * 64 + 16) + sums + 16 * 256 + channels + results + 16
    pairs = -(-channels // 128) * -(-results // 64)
    parts = -(-2 * threads // pairs)
    return 4 * (threads * own + (parts * pairs * sums if parts > 1 else 0)) + 64


def _emit_forward(w: Any, c: Call) -> None:
    """The call; where something was not finite, the library's convolution, which keeps it in its window."""
    call = the_conv_call(c.node, c.args)
    x, weight, bias, other = call.x, call.weight, call.bias, call.other
    y = _emit(w, c, (x, weight, bias, other), call.padding, weight.strides, call.act, flipped=False)
    added = "nullptr" if other is None else w.tensor(other)
    pads, _ = w.ints(pair(call.padding))
    w.call(c, "convolve_into", [w.tensor(y), w.tensor(x), w.tensor(weight), w.optional(bias), added, pads])
    if call.act in rectified.TOPS:
        rectified.rectify(w, y, w.pointer_to(y), call.act)
    w.lines.append("}")


def _emit_input(w: Any, c: Call) -> None:
    call = the_conv_call(c.node, c.args)
    weight, turned_pads = call.weight, [2 - p for p in call.padding]
    turned = (weight.strides[1], weight.strides[0], *weight.strides[2:])
    y = _emit(w, c, (call.grad, weight, None, None), turned_pads, turned, "none", flipped=True)
    pads, _ = w.ints(pair(call.padding))
    w.call(c, "gradient_into", [*(w.tensor(v) for v in (y, call.grad, call.x, weight)), pads, "0"])
    w.lines.append("}")


def _emit_weight(w: Any, c: Call) -> None:
    call = the_conv_call(c.node, c.args)
    grad, x, weight = call.grad, call.x, call.weight
    out = c.outputs[1]
    assert out is not None
    sizes, _ = w.ints(
        [*x.shape, *grad.shape[1:], *pair(call.padding), *pitch(x), *pitch(grad), 0, 0, 0, *out.strides]
    )
    name = w.template("winograd_gradient", _WINDOW_PARAMETERS, WINDOW_UNIT, "light")
    finite = w.fresh("finite")
    w.lines.append(f"bool {finite} = true;")
    pointers = [w.pointer_to(x), w.pointer_to(grad), w.pointer(out)]
    w.call(c, name, [*pointers, sizes, *space(w, c), f"&{finite}"])
    w.lines.append(f"if (!{finite}) {{")
    pads, _ = w.ints(pair(call.padding))
    y = View(out, out.shape, out.strides)
    w.call(c, "gradient_into", [*(w.tensor(v) for v in (y, grad, x, weight)), pads, "1"])
    w.lines.append("}")


def _emit(w: Any, c: Call, given: Any, padding: Any, strides: Any, act: str, flipped: bool) -> View:
    """The template's call, and the beginning of what is done where something was not finite; the result."""
    x, weight, bias, other = given
    out = c.outputs[0]
    assert out is not None
    y = View(out, out.shape, out.strides)
    sizes, _ = w.ints(
        [*x.shape, *y.shape[1:], *pair(padding)]
        + [s for v in (x, y, other) for s in pitch(v)]
        + list(strides)
    )
    name, parameters, source = unit(out.dtype)
    name = w.template(name, parameters, source, "light")
    finite = w.fresh("finite")
    w.lines.append(f"bool {finite} = true;")
    is_wide = bias is not None and bias.buffer.dtype != out.dtype
    biases = (None, bias) if is_wide else (bias, None)
    tensors = [*(w.pointer_to(v) for v in (x, weight, *biases, other)), w.pointer(out)]
    how = [sizes, str(flipped).lower(), *LIMITS[act]]
    w.call(c, name, [*tensors, *how, *space(w, c), f"&{finite}"])
    w.lines.append(f"if (!{finite}) {{")
    return y


__all__ = [
    "WINDOW_UNIT",
    "convolution_bytes",
    "forward",
    "gain",
    "gradient_bytes",
    "input_gradient",
    "is_ahead",
    "pays",
    "pays_for",
    "unit",
    "weight_gradient",
    "window_of",
]
