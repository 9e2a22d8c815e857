"""Weights in the forms that calls compute with, made once: oneDNN's own, opaque tensors which its calls take
by handle, MKL's, and tiles'.

A form is the text of a tuple, as `packs` gives it and programs keep it.
"""

from __future__ import annotations

import ast
import weakref

import torch
import torch.fx as fx

from dicp.compat import size_hint, tensor_handle, tensors_from_handles
from dicp.ops.conv_call import pair, the_conv_call
from dicp.vendor.cpu_graph.claims import depthwise, matmul, winograd
from dicp.vendor.cpu_graph.claims.common import onednn_has
from dicp.vendor.cpu_graph.claims.conv_products import is_frozen_product
from dicp.vendor.cpu_graph.claims.gemm import panels
from dicp.vendor.cpu_graph.claims.packed_mkl import PackedWeight


class Packed:
    """What a program is given in a weight's stead."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._handle = tensor_handle(tensor)
        # not at exit, when what it takes may be gone already
        weakref.finalize(self, tensors_from_handles, [self._handle]).atexit = False

    def data_ptr(self) -> int:
        """The handle: the program passes on what it gets as an address."""
        return self._handle


class Window(Packed):
    """A convolution's weight in oneDNN's form, and the magnitudes of a result's weights, added up, at the
    most: two words, a handle and a double."""

    def __init__(self, tensor: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__(tensor)
        sums = weight.abs().flatten(1).sum(1, dtype=torch.float64)
        self.words = torch.stack([torch.tensor(self._handle), sums.max().view(torch.int64)])

    def data_ptr(self) -> int:
        """The address of the words."""
        return self.words.data_ptr()


def packs(node: fx.Node) -> str | None:
    """The form for the constant weight of a dicp::linear or dicp::conv; None where it would not pay."""
    x, w = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    if not onednn_has(w.dtype):
        return None
    if node.target is torch.ops.dicp.linear.default:
        return matmul.packs(node)
    if w.dim() != 4:
        return None
    if winograd.is_ahead(node) or depthwise.is_ahead(node) or is_frozen_product(node):
        return None
    call = the_conv_call(node)
    sizes = [size_hint(n) for n in x.shape]
    how = [list(pair(values)) for values in (call.padding, call.stride, call.dilation)]
    return repr(("conv", *how, call.groups, sizes))


def pack(weight: torch.Tensor, form: str) -> Packed | PackedWeight | torch.Tensor:
    """The weight in that form: what has the `data_ptr` that programs are given."""
    kind, *how = ast.literal_eval(form)
    if kind == "panels":
        return panels(weight.detach())
    if kind == "linear":  # of rows: oneDNN takes no others
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), *how))
    if kind == matmul.MKL:
        return PackedWeight(weight.detach(), *how)
    return Window(torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *how), weight.detach())


__all__ = ["Packed", "pack", "packs"]
