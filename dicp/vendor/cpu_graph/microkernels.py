"""oneDNN's micro-kernels for matrix products, which libtorch exports as `at::native::cpublas::brgemm`: what
generated tiles (include/dicp_attention.h, dicp_gemm.h, dicp_winograd.h) are built around."""

from __future__ import annotations

import functools

import torch

from dicp.compat import torch_library
from dicp.runtime.cpu import pairs_are_slow
from dicp.vendor.cpu_graph import toolchain

_SYMBOLS = {
    torch.float32: "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    torch.bfloat16: "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
}
_CPU_FLAGS = {
    torch.float32: {"avx2", "fma"},
    torch.bfloat16: {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"},
}


def available(dtype: torch.dtype | None) -> bool:
    """Whether this CPU and this libtorch have them, and they are not slower than float32's, whatever code is
    generated for."""
    return dtype in _available()


@functools.cache
def _available() -> frozenset[torch.dtype]:
    exported = torch_library()
    flags = toolchain.cpu_flags()
    return frozenset(
        dtype
        for dtype, symbol in _SYMBOLS.items()
        if flags >= _CPU_FLAGS[dtype] and hasattr(exported, symbol)
        and not (dtype == torch.bfloat16 and pairs_are_slow())
    )


__all__ = ["available"]
