"""Who computes a convolution: cuDNN, or a template (templates/convolution.py).

Without measuring, cuDNN has what stands alone, and what it does in one call: a bias, a residual and ReLU, at
the cost of the convolution. The template comes first where a sum has few terms and a residual is added, which
both do at the speed of memory, and for other activations; images of three channels are filled up to four
for it. Windows that lie side by side are a product (matmul_pays). On an H100 in bfloat16, 32 images, in us:
cuDNN's call of 64 channels, 3x3, 56x56, with ReLU 25.6 (a kernel for bias and ReLU behind it: 47.9); weights
in the images' layout spare another 4 to 13. The chooser measures what is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.ir.meta_keys import LAYOUT_KEY
from dicp.ops.conv_call import pair, the_conv_call
from dicp.ops.library import ACTIVATIONS
from dicp.passes.freeze import is_constant
from dicp.schedule.defs import Call, View
from dicp.schedule.strides import dense_strides
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph import products
from dicp.vendor.cuda_graph.templates import Launched, claim
from dicp.vendor.cuda_graph.templates.convolution import convolution, kernels
from dicp.vendor.cuda_graph.templates.product import Tiling

aten = torch.ops.aten
FUSED_TERMS = {torch.float32: 64, torch.bfloat16: 256, torch.float16: 256}
"""Terms of a sum up to which saving passes over the result is more than what cuDNN is faster by."""
FOLDED_BYTES = 4 << 20  # read and written in the time of two small kernels
VECTOR = 16  # bytes of channels that cuDNN's fused kernels load at a time
SMALL_VECTOR = 4  # channels of half precision that the template loads at a time


def _served(node: fx.Node) -> bool:
    """Whether the template has the form of a call."""
    call, val = the_conv_call(node), node.meta["val"]
    if call.transposed or call.groups != 1 or val.dim() != 4 or val.dtype not in products.FLOATS:
        return False
    tensors = [t for a in node.all_input_nodes if isinstance(t := a.meta["val"], torch.Tensor)]
    empty = any(size_hint(n) == 0 for t in (*tensors, val) for n in t.shape)
    return not empty and all(t.dtype == val.dtype for t in tensors)


def _terms(node: fx.Node) -> int:
    return int(torch.Size([size_hint(n) for n in _weight(node).shape[1:]]).numel())


def _weight(node: fx.Node) -> torch.Tensor:
    return the_conv_call(node).weight.meta["val"]  # type: ignore[no-any-return]


def precision() -> str:
    """What torch.backends.cudnn allows for float32, when it is compiled: no guard of Dynamo's knows it."""
    return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


def matmul_pays(part: str, conv: Any) -> bool:
    """Windows that lie side by side, as patches do: a copy in order and cuBLAS, where cuDNN turns the image
    and its result about: on an H100, for 32 images of 196 patches of 16x16 in bfloat16, 35 us for 325. Not in
    TF32 where that is allowed to products alone. The input's gradient, whose windows would be folded, was not
    measured, and is cuDNN's."""
    more_rounded = products.precision() == "tf32" != precision()
    exact = conv.dtype == torch.float32 and more_rounded
    return bool(part != "input" and conv.patches and conv.window != (1, 1) and not exact)


def padded_channels(node: fx.Node) -> int | None:
    """Of images with fewer than four channels in half precision, under the template: loads of 8 bytes, which
    are made ahead, rather than of one channel. The padding reads and writes the image once."""
    channels = _weight(node).shape[1]
    half = node.meta["val"].dtype in (torch.bfloat16, torch.float16)
    if not half or not isinstance(channels, int) or not 1 < channels < SMALL_VECTOR:
        return None
    large = size_hint(node.meta["val"].numel()) >= FOLDED_BYTES
    few = _terms(node) // channels * SMALL_VECTOR <= FUSED_TERMS[node.meta["val"].dtype]
    return SMALL_VECTOR if large and few and _template_first(node) and _windows(node) else None


def _windows(node: fx.Node) -> bool:
    """Whether a pixel is read for several results."""
    return any(n != 1 for n in _weight(node).shape[2:])


def supports(node: fx.Node) -> bool:
    """Whether dicp::conv is formed: where one kernel would compute it, and what that asks for costs less."""
    return (_fuses(node) or _template_first(node)) and _folding_pays(node)


def _folding_pays(node: fx.Node) -> bool:
    """Whether the result is large enough for a pass over it to take longer than the two kernels that scale
    weight and bias, at each call unless they are constant."""
    w, val = the_conv_call(node).weight, node.meta["val"]
    if w.op != "call_function" or is_constant(w):
        return True
    elements = torch.Size([size_hint(n) for n in val.shape]).numel()
    return bool(elements * val.element_size() >= FOLDED_BYTES)


def _fuses(node: fx.Node) -> bool:
    """Whether cuDNN does it in one call."""
    if the_conv_call(node).act != "relu" or not _served(node):
        return False
    size = node.meta["val"].element_size()
    return all(isinstance(n, int) and n * size % VECTOR == 0 for n in _weight(node).shape[:2])


def _template_first(node: fx.Node) -> bool:
    if not _served(node) or _terms(node) > FUSED_TERMS[node.meta["val"].dtype]:
        return False
    call = the_conv_call(node)
    return call.other is not None or (call.act != "none" and not _fuses(node))


def candidates(node: fx.Node, config: Config, library: Claim) -> list[Claim]:
    """The claims of a convolution, the one to take without measuring first."""
    if config.numerics == "eager" or not _served(node):
        return [library]
    made = [_template(node, config, tiling) for tiling in _tilings(node)]
    return [made[0], library, *made[1:]] if _template_first(node) else [library, *made]


def _tilings(node: fx.Node) -> list[Tiling]:
    batch, channels, height, width = (size_hint(n) for n in node.meta["val"].shape)
    pixels = max(64, batch * height * width)  # as for rows that vary: tiles, not rows one by one
    dtype = node.meta["val"].dtype
    cuts = products.tilings(pixels, channels, _terms(node), 1, dtype, few=False, along_k=True, widest=128)
    return list(dict.fromkeys(replace(p, split=1) for p in cuts))


def _template(node: fx.Node, config: Config, tiling: Tiling) -> Claim:
    def made(c: Call) -> Sequence[Launched]:
        call, y = the_conv_call(c.node, c.args), c.outputs[0]
        problem = convolution(
            call.x,
            call.weight,
            call.bias,
            call.other,
            View(y, y.shape, y.strides),
            pair(call.stride),
            pair(call.padding),
            pair(call.dilation),
            call.act,
            precision(),
        )
        return kernels(problem, tiling, (c.note,) if c.note else (), config.interpret)

    return claim(f"convolution: Triton {tiling}", made, strides=_strides, prepare=_in_layout(node))


# -- the library ---------------------------------------------------------------------------------------------


def library(node: fx.Node) -> Claim:
    """A convolution, or its backward, by cuDNN."""

    def emit(w: Any, c: Call) -> None:
        if c.node.target is not aten.convolution.default:
            w.extern(c)
            return
        args = [w.value(a) for a in c.args]  # by torch's own namespace, which Python calls fastest
        w.line(f"result = {w.name('convolution', torch.convolution)}({', '.join(args)})", c.note)
        w.keep(c, "result")

    return Claim("convolution: cuDNN", emit, strides=_strides, prepare=_in_layout(node))


def library_of_all(node: fx.Node) -> Claim:
    """dicp::conv by cuDNN: with ReLU in one call, else with what follows by aten."""
    fuses = _fuses(node)

    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in c.args[: 8 if fuses else None]]
        function = convolve_relu if fuses else convolve
        w.line(f"result = {w.name(function.__name__, function)}({', '.join(args)})", c.note)
        w.keep(c, "result")

    name = "convolution: cuDNN" if fuses else "convolution: cuDNN, then aten"
    return Claim(name, emit, strides=_strides, prepare=_in_layout(node))


def convolve_relu(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """dicp::conv with ReLU."""
    if not x.is_cuda:  # interpreted
        return convolve(x, w, b, residual, stride, padding, dilation, groups, "relu")
    if residual is None:
        return torch.cudnn_convolution_relu(x, w, b, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(x, w, residual, 1.0, b, stride, padding, dilation, groups)


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
    y = torch.convolution(x, w, b, stride, padding, dilation, False, [0] * len(stride), groups)
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


def _gradients_in_layout(lowering: Any, args: Sequence[Any], wanted: list[Any]) -> list[Any]:
    """The result's gradient and the image, both channels-last where the image is."""
    if len(args[1].shape) == 4:
        wanted[1] = lowering.operand(wanted[1])
        if _channels_last(wanted[1]):
            wanted[0] = lowering.in_order(args[0], (0, 2, 3, 1))
    return wanted


def _in_layout(node: fx.Node) -> Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]]:
    """The first operands stored in the layout that the layout pass chose for them; weight and residual as the
    image, and the gradient as the image that was convolved, which cuDNN would copy them to."""
    fused = node.target is torch.ops.dicp.conv.default
    backward = node.target is aten.convolution_backward.default
    count = 3 if backward else 1

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        wanted = list(args)
        for k in range(min(count, len(args))):
            source = node.args[k]
            if isinstance(source, fx.Node) and LAYOUT_KEY in source.meta:
                wanted[k] = lowering.in_order(args[k], source.meta[LAYOUT_KEY])
        if backward:
            return _gradients_in_layout(lowering, args, wanted)
        if len(node.meta["val"].shape) == 4 and the_conv_call(node).groups == 1:
            wanted[0] = lowering.operand(wanted[0])
            if _channels_last(wanted[0]):
                wanted[1] = lowering.in_order(wanted[1], (0, 2, 3, 1))
                if fused and wanted[3] is not None:
                    wanted[3] = lowering.in_order(wanted[3], (0, 2, 3, 1))
        return wanted

    return prepare


__all__ = ["candidates", "library", "library_of_all", "matmul_pays", "padded_channels", "supports"]
