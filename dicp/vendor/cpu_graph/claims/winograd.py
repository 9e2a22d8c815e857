"""3x3 convolutions of float32 by fewer multiplications (include/dicp_winograd.h, dicp_winograd_grad.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import SPACE, argument, aten, space
from dicp.vendor.cpu_graph.claims.images import pitch, prepare, strides, threads
from dicp.vendor.cpu_graph.microkernels import available

FORM = repr(("winograd",))
"""Of packed weights."""
BLOCK = 64
"""Results whose transformed weights lie together: RESULT_BLOCK of the header."""

FEW_CHANNELS, FEW_TILES = 16, 32
"""Under which oneDNN's convolution is as fast. scripts/winograd.py, two Zen 4 cores: 16 channels and results
are 1.4 to 1.6 times as fast by this algorithm, 512 in 32 tiles (two images of 7x7) 1.1 to 2 times."""

SPARED = 0.4
"""Part of oneDNN's time that it spares at the least where it pays."""
BYTE_OPERATIONS = 7.0
"""Operations of a convolution in the time that the layout pass counts for moving one byte."""

_PARAMETERS = (
    "const float* x, const float* w, const float* u, const float* bias, const float* other, float* y, "
    f"const int64_t* sizes, bool flipped, {SPACE}, bool* finite"
)
UNIT = f"""\
#include "dicp_winograd.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t winograd_conv({_PARAMETERS}) {{
  return winograd(x, w, u, bias, other, y, sizes, flipped, {{space, bytes, threads}}, finite);
}}
"""


_WINDOW_PARAMETERS = (
    f"const float* x, const float* grad, float* w, const int64_t* sizes, {SPACE}, bool* finite"
)
WINDOW_UNIT = f"""\
#include "dicp_winograd_grad.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t winograd_gradient({_WINDOW_PARAMETERS}) {{
  return winograd_window(x, grad, w, sizes, {{space, bytes, threads}}, finite);
}}
"""


@dataclass(frozen=True)
class Window:
    """A convolution, or the gradient of one's input, which is a convolution of the result's gradient with the
    window turned by 180 degrees."""

    image: fx.Node
    weight: torch.Tensor
    sizes: tuple[int, int, int, int]
    """batch, rows and columns of the result, as seen while tracing, and its channels"""

    @property
    def channels(self) -> int:
        return int(self.weight.numel()) // (9 * self.sizes[3])

    @property
    def tiles(self) -> int:
        batch, rows, columns, _ = self.sizes
        return batch * _tiles(rows, columns)


def window_of(node: fx.Node, activated: bool = False) -> Window | None:
    """What the template computes of this node: float32 images, a 3x3 window, stride 1, no activation.
    activated: or of one like it with an activation."""
    a: Any = node.args
    if node.target is torch.ops.dicp.conv.default:
        image, weight, result, how = a[0], a[1], node.meta["val"], (*a[4:7], a[7])
        plain = activated or argument(node, 8, "act", "none") == "none"
    elif node.target is aten.convolution_backward.default:
        image, weight, result, how = a[0], a[2], a[1].meta["val"], (*a[4:7], a[9])
        plain = not a[7]
    else:
        return None
    val = weight.meta["val"]
    fits = (
        plain
        and available(torch.float32)
        and all(v.dtype == torch.float32 for v in (image.meta["val"], val, result))
        and val.dim() == 4
        and tuple(val.shape[2:]) == (3, 3)
        and all(isinstance(n, int) for n in val.shape)
        and all(s == 1 for s in (*how[0], *how[2], how[3]))
        and all(0 <= p <= 2 for p in how[1])
    )
    if not fits:
        return None
    batch, channels, rows, columns = (size_hint(n) for n in result.shape)
    return Window(image, val, (batch, rows, columns, channels))


def pays(window: Window) -> bool:
    """Whether it is ahead of oneDNN's convolution, and of its gradients."""
    return min(window.channels, window.sizes[3]) >= FEW_CHANNELS and window.tiles >= FEW_TILES


def pays_for(conv: Any) -> bool:
    """The same of a dicp.passes.conv_matmul.Convolution."""
    fits = conv.window == (3, 3) and conv.stride == (1, 1) and all(0 <= p <= 2 for p in conv.padding)
    rows, columns = conv.size
    tiles = conv.positions // (rows * columns) * _tiles(rows, columns)
    return available(torch.float32) and fits and min(conv.channels) >= FEW_CHANNELS and tiles >= FEW_TILES


def _tiles(rows: int, columns: int) -> int:
    return ((rows + 1) // 2) * ((columns + 1) // 2)


def gain(node: fx.Node) -> float:
    """What channels-last spares a convolution by way of this algorithm, in the layout pass's bytes."""
    window = window_of(node)
    if window is None or not pays(window):
        return 0.0
    return SPARED * 18.0 * window.channels * math.prod(window.sizes) / BYTE_OPERATIONS


def forward() -> Claim:
    """y = conv(x, w) + bias + other"""

    def workspace(lowering: Any, node: fx.Node, args: Sequence[Any]) -> int:
        results, channels = args[1].shape[:2]
        made = args[1].buffer.kind == "packed"
        return convolution_bytes(channels, results, _tile_block(node), threads(lowering), made)

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
        return convolution_bytes(results, channels, _tile_block(node), threads(lowering), False)

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


def _tile_block(node: fx.Node) -> int:
    """The tiles of a block at the most."""
    val = node.meta["val"]
    batch, _, rows, columns = (val[0] if isinstance(val, (tuple, list)) else val).shape
    known = all(isinstance(n, int) for n in (batch, rows, columns))
    return min(BLOCK, batch * _tiles(rows, columns)) if known else BLOCK


def convolution_bytes(channels: int, results: int, tiles: int, threads: int, made: bool) -> int:
    """Of the header's workspace at the most: tiles and their products for each thread, a slice of weights."""
    row = -(-channels // 16) * 16 + 16
    tile = 16 * (tiles * row + 16 + tiles * BLOCK + 16) + row + 16
    per_result = 16 * channels
    most = max((4 << 20) // (4 * per_result) // BLOCK * BLOCK, 2 * BLOCK)
    return 4 * (threads * tile + (0 if made else min(results, most) * per_result + 16)) + 64


def gradient_bytes(channels: int, results: int, threads: int) -> int:
    """The same of the window's gradient: both images and sums for each thread, sums of parts of the tiles."""
    sums = 16 * (64 * 128 + 16)
    own = 16 * (48 * 128 + 16) + 16 * (64 * 64 + 16) + sums + 16 * 256 + channels + results + 16
    pairs = -(-channels // 128) * -(-results // 64)
    parts = -(-2 * threads // pairs)
    return 4 * (threads * own + (parts * pairs * sums if parts > 1 else 0)) + 64


def _emit_forward(w: Any, c: Call) -> None:
    """The call; where something was not finite, the library's convolution, which keeps it in its window."""
    x, weight, bias, other, _, padding = c.args[:6]
    made = weight.buffer.kind == "packed"
    y = _emit(w, c, (x, weight, bias, other), padding, weight.strides, flipped=False)
    handle = f"(Handle){w.packed(weight)}[1]" if made else w.tensor(weight)
    added = "nullptr" if other is None else w.tensor(other)
    pads, _ = w.ints([padding[0], padding[-1]])
    w.call(c, "convolve_into", [w.tensor(y), w.tensor(x), handle, w.optional(bias), added, pads])
    w.lines.append("}")


def _emit_input(w: Any, c: Call) -> None:
    grad, x, weight, _, _, padding = c.args[:6]
    turned = (weight.strides[1], weight.strides[0], *weight.strides[2:])
    y = _emit(w, c, (grad, weight, None, None), [2 - p for p in padding], turned, flipped=True)
    pads, _ = w.ints([padding[0], padding[-1]])
    w.call(c, "gradient_into", [*(w.tensor(v) for v in (y, grad, x, weight)), pads, "0"])
    w.lines.append("}")


def _emit_weight(w: Any, c: Call) -> None:
    grad, x, weight, _, _, padding = c.args[:6]
    out = c.outputs[1]
    assert out is not None
    sizes, _ = w.ints(
        [*x.shape, *grad.shape[1:], padding[0], padding[-1], *pitch(x), *pitch(grad), 0, 0, 0, *out.strides]
    )
    name = w.template("winograd_gradient", _WINDOW_PARAMETERS, WINDOW_UNIT)
    finite = w.fresh("finite")
    w.lines.append(f"bool {finite} = true;")
    pointers = [w.pointer_to(x), w.pointer_to(grad), w.pointer(out)]
    w.call(c, name, [*pointers, sizes, *space(w, c), f"&{finite}"])
    w.lines.append(f"if (!{finite}) {{")
    pads, _ = w.ints([padding[0], padding[-1]])
    y = View(out, out.shape, out.strides)
    w.call(c, "gradient_into", [*(w.tensor(v) for v in (y, grad, x, weight)), pads, "1"])
    w.lines.append("}")


def _emit(w: Any, c: Call, given: Any, padding: Any, strides: Any, flipped: bool) -> View:
    """The template's call, and the beginning of what is done where something was not finite; the result."""
    x, weight, bias, other = given
    out = c.outputs[0]
    assert out is not None
    y = View(out, out.shape, out.strides)
    sizes, _ = w.ints(
        [*x.shape, *y.shape[1:], padding[0], padding[-1]]
        + [s for v in (x, y, other) for s in pitch(v)]
        + list(strides)
    )
    name = w.template("winograd_conv", _PARAMETERS, UNIT)
    finite = w.fresh("finite")
    w.lines.append(f"bool {finite} = true;")
    made = weight.buffer.kind == "packed"
    plain = "nullptr" if made else w.pointer_to(weight)
    transformed = f"(const float*){w.packed(weight)}[0]" if made else "nullptr"
    pointers = [w.pointer_to(x), plain, transformed, *(w.pointer_to(v) for v in (bias, other))]
    w.call(c, name, [*pointers, w.pointer(out), sizes, str(flipped).lower(), *space(w, c), f"&{finite}"])
    w.lines.append(f"if (!{finite}) {{")
    return y


def transformed(weight: torch.Tensor) -> torch.Tensor:
    """G g G^T of each window of a weight [results, channels, 3, 3], as the template reads them: blocks of
    results, and in each [4 * 4, channels, results of the block]."""
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
    blocks = []
    for part in weight.double().split(BLOCK):
        windows = torch.einsum("ia,kcab,jb->ijck", g, part, g)
        blocks.append(windows.to(weight.dtype).flatten())
    return torch.cat(blocks)


__all__ = [
    "FORM",
    "UNIT",
    "WINDOW_UNIT",
    "convolution_bytes",
    "forward",
    "gain",
    "gradient_bytes",
    "input_gradient",
    "pays",
    "pays_for",
    "transformed",
    "weight_gradient",
    "window_of",
]
