"""Which convolutions are matrix products (dicp.passes.conv_matmul), by what was measured."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from dicp.ops.conv_call import the_conv_call
from dicp.passes.conv_matmul import can_be_product, convolution_of
from dicp.vendor.cpu_graph.claims import matmul, winograd
from dicp.vendor.cpu_graph.claims.common import LOW, onednn_has
from dicp.vendor.cpu_graph.claims.matmul import halved_by_mkl

FEW_POSITIONS = 256
"""Positions under which oneDNN's gradients of a weight lose to gathering the windows: 98 positions of 512
channels, 3x3, take it 16 ms; a product of those sizes takes 2.5 ms, its gathering 1.3 ms (2 Zen 4 cores)."""

SPARED = 256 << 10
"""Bytes of gathered windows that take as long as what a call of oneDNN's convolution costs besides
multiplying, and bringing the weight into its order, which is about as slow by the byte. One image of 32
channels and 20x20, and a window of 4x4 by steps of 2 to 64 channels take it 145 us, gathering and a product
83; of 6 channels and 14x14, and 5x5 to 16, 93 and 39; of 32 channels and 26x26, and 3x3 to 64, it is ahead (a
compiled call on two Intel cores of the 5th generation, one-off script)."""


COLOURS = 4
"""Channels up to which patches are better gathered for a product. Of 196 patches of 16x16 and three channels,
twice, oneDNN's convolution makes 768 results in 0.89 ms in bf16 and 1.57 in float32, gathering and a product
in 0.53 and 1.03; of 96 channels and more they are level (2 Zen 5 cores)."""


def cuts_patches(conv: Any) -> bool:
    """Whether a dicp.passes.conv_matmul.Convolution cuts images into patches that are better gathered."""
    return conv.patches and conv.channels[0] <= COLOURS and onednn_has(conv.dtype)  # type: ignore[no-any-return]


def gathering_pays(conv: Any, frozen: bool = False) -> bool:
    """Whether windows are few enough for gathering them and a product to be ahead of oneDNN's convolution,
    which is slower with images of a few colours. Those that reach over a border are gathered half as fast,
    and by steps a quarter. frozen: oneDNN has the weight in its order."""
    depth, each = conv.channels[0] * math.prod(conv.window), conv.dtype.itemsize
    slower = 1 if not any(conv.padding) else 2 if conv.stride == (1, 1) else 4
    gathered = conv.positions * depth * each * slower
    spared = 2 * SPARED if conv.channels[0] <= COLOURS else SPARED
    return bool(gathered <= spared + (0 if frozen else conv.channels[1] * depth * each))


FOLDED, FOLDED_COLOURS, FOLDED_DEPTH = 2 << 20, 32 << 20, 256
"""Bytes of windows up to which a product, and folding it, are ahead of oneDNN's gradient of the input of a
strided convolution, or its transposed convolution: while they stay in the cache, if the product is that
deep, and in proportion if it is shallower; and of images of a few colours. One image of 256 channels and
4x4 to 128 of 8x8: 0.38 ms, and 0.12; of 64 channels, 64x64, and 2x2 to 32 of 128x128 (2 MB): 0.32 and
0.40; 64 images of 64 channels and 16x16 to 3 of 32x32: 2.5 and 0.85 (calls on two Intel cores of the 5th
generation, one-off script)."""


def folding_pays(conv: Any) -> bool:
    """Whether what windows add up to is better a product and its fold (dicp.passes.conv_fold)."""
    windows = conv.positions * conv.channels[0] * math.prod(conv.window) * conv.dtype.itemsize
    if conv.channels[0] <= COLOURS:
        most = float(FOLDED_COLOURS)
    else:
        most = FOLDED * min(1.0, conv.channels[1] / FOLDED_DEPTH)
    alone = conv.size == (1, 1)  # nothing is added up: the windows are the images
    return alone or bool(conv.stride != (1, 1) and windows <= most)


def matmul_pays(part: str, conv: Any) -> bool:
    """Products with a 1x1 window run at the library's peak either way; as GEMM they write where the program
    wants them, where a convolution allocates its results and reorders its weights at each call. So do those
    of patches of a low precision, of which a product makes no float32 copies (docs/cpu_graph.md), and of
    those of COLOURS. In bf16 the weight's gradient of all patches is as well (0.53 ms for 1.15 of those
    above), and that of a strided 1x1 window: a quarter of the image is copied for it."""
    if part == "result" and cuts_patches(conv):
        return True
    if conv.dtype == torch.bfloat16:
        gathers = part == "weight" and (conv.window == (1, 1) or conv.patches)
        return onednn_has(conv.dtype) and (conv.pointwise or gathers)
    if conv.dtype != torch.float32 or winograd.pays_for(conv):
        return False
    if part == "input" and not conv.pointwise:
        return folding_pays(conv)
    few = gathering_pays(conv) if part == "result" else conv.positions < FEW_POSITIONS
    gathers = few or (conv.stored in LOW and conv.patches)
    return conv.pointwise or (part != "input" and gathers)


def is_frozen_product(node: fx.Node, activated: bool = False) -> bool:
    """Whether a product is ahead of a dicp::conv by a weight that is constant, which oneDNN would have in its
    own order: of patches of an image; of few windows; and of 1x1 windows whose result is large, or has a sum,
    where oneDNN takes 1.06 to 1.5 times as long as tiles for UNet's skips (384 channels to 128 at 64x64, 1024
    to 512 at 16x16; two Zen 5 cores). activated: whether it would be, if the activation that it has was left
    out of it."""
    conv = convolution_of(node, activated)
    if conv is None:
        return False
    if cuts_patches(conv):
        return can_be_product(node, conv)
    if conv.dtype != torch.float32:
        return False
    if conv.pointwise:
        added = the_conv_call(node).other is not None and halved_by_mkl()
        return added or matmul.result_is_large(node)
    return matmul_pays("result", conv) and can_be_product(node, conv) and gathering_pays(conv, frozen=True)
