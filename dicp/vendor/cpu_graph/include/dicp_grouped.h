// Products of groups, as experts have them: of rows, each group with a matrix of its own, or of what is summed over,
// each group with a result of its own.
#pragma once
#include "dicp_gemm.h"
#include "dicp_shim.h"

namespace dicp {

enum Shared { ROWS, DEPTH };  // the dim that the groups share out, of which group e has [offsets[e - 1], offsets[e])

// f(sizes, x, w, y) for each group that has any. `sizes`: struct Product, what is shared being that of all groups; w's
// (ROWS) or y's (DEPTH) step per batch is that from a group to the next. Rows behind the last group are 0, and so is the
// result of a group that has none of the depth.
template <Shared shared, class T, class W, class I, class F>
inline int32_t each_group(const T* x, const W* w, const I* offsets, T* y, const int64_t* sizes, int64_t groups, F f) {
  Product g = *(const Product*)sizes;
  int64_t& some = shared == ROWS ? g.rows : g.depth;
  const int64_t all = some;
  int64_t start = 0;
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t end = offsets[e] < start ? start : least(offsets[e], all);
    some = end - start;
    const T* const left = x + start * (shared == ROWS ? g.x[1] : g.x[2]);
    const W* const right = w + (shared == ROWS ? e * g.w[0] : start * g.w[1]);
    T* const result = y + (shared == ROWS ? start * g.y[1] : e * g.y[0]);
    if (!some && shared == DEPTH) zeros(result, g.rows * g.columns);
    if (some && f(g, left, right, result)) return 1;
    start = end;
  }
  if (shared == ROWS) zeros(y + start * g.y[1], (all - start) * g.y[1]);
  return 0;
}

// by our tiles
template <Shared shared, class T, class W, class I>
int32_t grouped_tiles(const T* x, const W* w, const I* offsets, T* y, const int64_t* sizes, int64_t groups,
                      Workspace space) {
  return each_group<shared>(x, w, offsets, y, sizes, groups, [&](const Product& g, const T* left, const W* right, T* to) {
    return gemm<LIMITED, T, W, float>(left, right, nullptr, nullptr, nullptr, to, (const int64_t*)&g, UNLIMITED, space);
  });
}

// by ATen's product of matrices of torch's dtype
template <class T>
inline int32_t product_by_aten(const Product& g, const T* x, const T* w, T* y, int32_t dtype) {
  const int64_t of_x[] = {g.rows, g.depth}, of_w[] = {g.depth, g.columns}, of_y[] = {g.rows, g.columns};
  const int64_t along_y[] = {g.y[1], 1};
  const Tensor a = view(x, 2, of_x, g.x + 1, dtype), b = view(w, 2, of_w, g.w + 1, dtype);
  const Tensor c = view(y, 2, of_y, along_y, dtype);
  return aoti_torch_cpu_mm_out(c.h, a.h, b.h);
}
template <Shared shared, class T, class I>
int32_t grouped_calls(const T* x, const T* w, const I* offsets, T* y, const int64_t* sizes, int64_t groups,
                      int32_t dtype) {
  return each_group<shared>(x, w, offsets, y, sizes, groups, [&](const Product& g, const T* left, const T* right, T* to) {
    return product_by_aten(g, left, right, to, dtype);
  });
}

// by tiles of pairs where a group has few rows, else by ATen's
template <Shared shared, class T, class I>
int32_t grouped_pairs(const T* x, const T* w, const I* offsets, T* y, const int64_t* sizes, int64_t groups,
                      int32_t dtype, Workspace space) {
  return each_group<shared>(x, w, offsets, y, sizes, groups, [&](const Product& g, const T* left, const T* right, T* to) {
    const Transposed<LIMITED, T, T, float, T> few(g, left, right, {}, to);
    const int64_t threads = threads_for(g, space.threads);
    return few.serves(space, threads) ? few.run(space, threads) : product_by_aten(g, left, right, to, dtype);
  });
}

}  // namespace dicp
