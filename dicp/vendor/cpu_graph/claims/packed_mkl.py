"""Products in float32 by weights that never change, in the form that MKL computes with: its calls for such
products, which libtorch exports, write where the result is planned. ATen's call of them allocates it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import torch_library
from dicp.ir import index as ix
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims.operands import given, operands_of

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED, _RIGHT_OPERAND = 101, 111, 112, 162
"""MKL's words (Intel's reference of cblas_?gemm_pack)."""
_SYMBOLS = ("cblas_sgemm_pack_get_size", "cblas_sgemm_pack", "cblas_sgemm_compute", "sgemm_")


@functools.cache
def available() -> bool:
    """Whether this libtorch has MKL's packed products."""
    exported = torch_library()
    return torch.backends.mkl.is_available() and all(hasattr(exported, symbol) for symbol in _SYMBOLS)


class PackedWeight:
    """[N, K] of float32 as MKL multiplies `rows` rows of x by it, and as it was, for other numbers of rows:
    struct PackedByMkl of include/dicp_shim.h, in words.

    `weight` is kept; it is copied where it is neither rows nor columns, one behind the other.
    """

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        assert weight.numel(), "a product of no depth, or of no columns, is not packed"
        nests = [d for d in (1, 0) if weight.stride(d) == 1 and weight.stride(1 - d) >= weight.shape[d]]
        if not nests:
            weight = weight.clone(memory_format=torch.contiguous_format)
        along = nests[0] if nests else 1
        (columns, depth), apart = weight.shape, weight.stride(1 - along)
        self.weight, self.form = weight, _pack(weight, rows, along, apart)
        addresses = self.form.data_ptr(), weight.data_ptr()
        self.words = torch.tensor([*addresses, rows, columns, depth, apart, along])

    def data_ptr(self) -> int:
        """The address of the words."""
        return self.words.data_ptr()


def _pack(weight: torch.Tensor, rows: int, along: int, apart: int) -> torch.Tensor:
    library, (columns, depth) = torch_library(), weight.shape
    assert library is not None
    # 64-bit words are right for both of MKL's interfaces: the one of 32 bits reads half of each
    sizes = [ctypes.c_int64(n) for n in (rows, columns, depth)]
    library.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
    size = library.cblas_sgemm_pack_get_size(_RIGHT_OPERAND, *sizes)
    form = torch.empty(size, dtype=torch.uint8)
    library.cblas_sgemm_pack.restype = None
    library.cblas_sgemm_pack(
        _ROW_MAJOR, _RIGHT_OPERAND, _TRANSPOSED if along == 1 else _AS_IT_IS, *sizes, ctypes.c_float(1),
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(apart), ctypes.c_void_p(form.data_ptr()),
    )  # fmt: skip
    return form


def _is_rows(x: View) -> bool:
    """Whether it is rows, one behind the other: MKL refuses those that overlap, as expanded ones do."""
    return len(x.shape) == 2 and x.strides[1] == 1 and ix.nonnegative(x.strides[0] - x.shape[1])


def packed_mkl(node: fx.Node) -> Claim:
    """y = x w^T + bias of a weight in a `PackedWeight`."""
    at = operands_of(node)
    assert at is not None and at.bias is not None
    dense_bias = dense(at.bias)

    def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        args = list(dense_bias(lowering, n, args))
        x = lowering.operand(args[at.x])
        args[at.x] = x if _is_rows(x) else lowering.operand(args[at.x], dense=True)
        return args

    def emit(w: Any, c: Call) -> None:
        g = given(c, at)
        apart = g.x.strides[0] if len(g.x.shape) == 2 else g.x.shape[-1]
        x, bias = w.pointer_to(g.x), w.pointer_to(g.bias)
        sizes = (w.text(n) for n in (g.rows, apart))
        w.call(c, "linear_by_mkl", [x, *sizes, w.packed(g.w), bias, w.pointer(g.y)])

    return Claim("linear: MKL", emit, out=True, prepare=prepare)


__all__ = ["PackedWeight", "available", "packed_mkl"]
