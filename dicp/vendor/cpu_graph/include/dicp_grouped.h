// A product of groups of rows, each with a matrix of its own, as experts have them.
#pragma once
#include <string.h>

#include "dicp_gemm.h"

namespace dicp {

// Rows [offsets[e - 1], offsets[e]) of y are those of x times w[e]; rows behind the last group are 0. `sizes`: struct
// Product, its rows those of all groups, w's step per batch that from a group to the next.
template <class T, class W, class I>
int32_t grouped(const T* x, const W* w, const I* offsets, T* y, const int64_t* sizes, int64_t groups, Workspace space) {
  Product g = *(const Product*)sizes;
  const int64_t rows = g.rows;
  int64_t start = 0;
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t end = offsets[e] < start ? start : least(offsets[e], rows);
    g.rows = end - start;
    if (g.rows && gemm<NONE, T, W, float>(x + start * g.x[1], w + e * g.w[0], nullptr, nullptr, nullptr,
                                          y + start * g.y[1], (const int64_t*)&g, space))
      return 1;
    start = end;
  }
  memset(y + start * g.y[1], 0, (rows - start) * g.y[1] * sizeof(T));
  return 0;
}

}  // namespace dicp
