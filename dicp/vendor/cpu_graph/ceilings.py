"""What the processor can do at the most: arithmetic and reads per second."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from dicp.config import Config
from dicp.vendor.base import Load
from dicp.vendor.cpu_graph.build import Library, Unit, build

# Multiply-adds on registers alone, twelve sums at a time so that none waits for itself; bf16 by the
# processor's instruction for pairs of them where it has one. And the fastest way to read known: each thread
# four streams, far apart and contiguous.
SOURCE = """\
#include "dicp_kernel.h"
using namespace dicp;
extern "C" int omp_get_max_threads();
#define VISIBLE extern "C" __attribute__((visibility("default")))
static const int SUMS = 12;

struct Fp32 {
  static const int PRODUCTS = 1;
  static vf32 step(vf32 sum, vf32 a, vf32 b) { return sum * a + b; }
};
#ifdef __AVX512BF16__
struct Bf16 {
  static const int PRODUCTS = 2;
  static vf32 step(vf32 sum, vf32 a, vf32 b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};
#else
using Bf16 = Fp32;
#endif

template <class T> static float repeat(int64_t steps, float x, float y) {
  float total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const vf32 a = splat<vf32>(x), b = splat<vf32>(y);
    vf32 sums[SUMS];
    for (int k = 0; k < SUMS; ++k) sums[k] = splat<vf32>(k);  // each its own, or one would do for all
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
      for (int k = 0; k < SUMS; ++k) sums[k] = T::step(sums[k], a, b);
    for (int k = 0; k < SUMS; ++k) total += hsum(sums[k]);
  }
  return total;
}
template <class T> static int64_t flops() { return 2L * T::PRODUCTS * LANES * SUMS * omp_get_max_threads(); }
VISIBLE float peak_fp32(int64_t steps, float x, float y) { return repeat<Fp32>(steps, x, y); }
VISIBLE float peak_bf16(int64_t steps, float x, float y) { return repeat<Bf16>(steps, x, y); }
VISIBLE int64_t flops_fp32() { return flops<Fp32>(); }
VISIBLE int64_t flops_bf16() { return flops<Bf16>(); }

VISIBLE float read_all(const float* p, int64_t n) {
  float total = 0;
  const int64_t threads = omp_get_max_threads(), share = n / threads, stream = share / 4 / LANES * LANES;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t t = 0; t < threads; ++t) {
    const float* q = p + t * share;
    vf32 a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i < stream; i += LANES) {
      a += load(q + i, Full());
      b += load(q + stream + i, Full());
      c += load(q + 2 * stream + i, Full());
      d += load(q + 3 * stream + i, Full());
    }
    total += hsum(a + b + c + d);
  }
  return total;
}
"""
FLOATS = 48 << 20
STEPS = 1 << 20
SIDE = 1536  # of a square product


@functools.lru_cache(maxsize=1)
def _library() -> Library:
    return build([Unit("ceilings", SOURCE)], Config.make())


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return ctypes.CFUNCTYPE(result, *arguments)(_library().address(name))


NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def arithmetic(dtype: torch.dtype) -> list[Load]:
    """Calls of which the fastest shows how many operations of a float dtype a second can do: of registers
    alone, and a library's product, which knows instructions that the first does not. Of others than float32
    and bf16 only that."""
    a, b = torch.ones(2, SIDE, SIDE, dtype=dtype)
    product = Load(functools.partial(torch.mm, a, b), 2 * SIDE**3)
    if dtype not in NAMES:
        return [product]
    name = NAMES[dtype]
    peak = _function(f"peak_{name}", ctypes.c_float, ctypes.c_int64, ctypes.c_float, ctypes.c_float)
    flops = _function(f"flops_{name}", ctypes.c_int64)() * STEPS
    return [Load(functools.partial(peak, STEPS, 1.0, 0.0), flops), product]


def reading() -> Load:
    """A read of 200 MB."""
    read = _function("read_all", ctypes.c_float, ctypes.c_void_p, ctypes.c_int64)
    data = torch.ones(FLOATS)

    def call() -> object:
        return read(data.data_ptr(), FLOATS)

    return Load(call, data.nbytes)
