// ReLU around convolutions (claims/rectified.py): what decides whether it may be inside, and what does it outside.
#pragma once
#include "dicp_parts.h"

namespace dicp {

constexpr int64_t RECTIFIED_BLOCK = 1 << 13;  // elements of a thread's turn; fewer are not worth waking threads for

// |bits| of float32, or of both bf16 of a word; as integers NaN is beyond infinity, and that beyond all numbers
template <class T> DICP_INLINE vi32 magnitudes(vi32 words) {
  if constexpr (same<T, bf16>) {
    const vi32 high = words & 0x7fff0000, low = (words << 16) & 0x7fff0000;
    return isa::larger(high, low);
  } else {
    return words & 0x7fffffff;
  }
}

// The largest magnitude of n elements; NaN or infinity where there are such.
template <class T> int32_t largest(const T* x, int64_t n, float* found) {
  constexpr int64_t step = LANES * (int64_t)sizeof(int32_t) / (int64_t)sizeof(T);
  int32_t most = 0;
#pragma omp parallel for reduction(max : most) schedule(static) if (n > RECTIFIED_BLOCK)
  for (int64_t first = 0; first < n; first += RECTIFIED_BLOCK) {
    const int64_t last = first + RECTIFIED_BLOCK < n ? first + RECTIFIED_BLOCK : n;
    vi32 m = splat<vi32>(0);
    int64_t k = first;
    for (; k + step <= last; k += step)
      m = isa::larger(m, magnitudes<T>(isa::load_rows((const int32_t*)(x + k))));
    if (k < last) {
      T rest[step] = {};
      for (int64_t j = k; j < last; ++j) rest[j - k] = x[j];
      m = isa::larger(m, magnitudes<T>(isa::load_rows((const int32_t*)rest)));
    }
    const int32_t here = hmax(m);
    most = here > most ? here : most;
  }
  __builtin_memcpy(found, &most, sizeof most);
  return 0;
}

// y = min(max(y, 0), top), NaN as it is
template <class T> int32_t rectify(T* y, int64_t n, float top) {
#pragma omp parallel for schedule(static) if (n > RECTIFIED_BLOCK)
  for (int64_t first = 0; first < n; first += RECTIFIED_BLOCK)
    each_part(n - first < RECTIFIED_BLOCK ? n - first : RECTIFIED_BLOCK, [&](int64_t c, auto lanes) INLINE {
      const vf32 v = load(y + first + c, lanes);
      store(y + first + c, minimum(maximum(v, splat<vf32>(0.0f)), splat<vf32>(top)), lanes);
    });
  return 0;
}

}  // namespace dicp
