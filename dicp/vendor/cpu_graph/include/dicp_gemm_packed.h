// y = act(x w + bias) + other in bf16, of a w that never changes and lies as the micro-kernels read it: PANEL columns at
// a time, by pairs of their depth. Unlike oneDNN's, the call writes where the result is kept, and takes an activation
// and a sum; its products are as fast from some depth on (scripts/products.py).
#pragma once
#include "dicp_brgemm.h"
#include "dicp_product.h"

namespace dicp {

// Rows of x that meet a panel at a time, whose sums are in the second-level cache with it; products in a sum, which
// errs less than bf16 rounds.
constexpr int64_t PACKED_ROWS = 256, PACKED_PANEL = 64, PACKED_DEPTH = 512;

template <Activation act, class T, class S> struct PackedProduct {
  const Product& g;
  const T *x, *w;  // w: [panels][depth / 2][PACKED_PANEL][2], zeros where columns are none
  const Epilogue<T, S> e;
  T* y;
  int64_t panels() const { return (g.columns + PACKED_PANEL - 1) / PACKED_PANEL; }
  int64_t blocks() const { return (g.rows + PACKED_ROWS - 1) / PACKED_ROWS; }
  const T* panel(int64_t p, int64_t k) const { return w + (p * g.depth + k) * PACKED_PANEL; }

  // rows of a block: as many in each
  void tile(int64_t p, int64_t block, float* sums) const {
    const int64_t units = (g.rows + FEW - 1) / FEW, column = p * PACKED_PANEL;
    const int64_t row = block * units / blocks() * FEW, last = least((block + 1) * units / blocks() * FEW, g.rows);
    for (int64_t k = 0; k < g.depth; k += PACKED_DEPTH) {
      const int64_t some = least(g.depth - k, PACKED_DEPTH);
      if (p + 1 < panels()) ask_for(panel(p + 1, k), some * PACKED_PANEL, block);
      products(last - row, PACKED_PANEL, some, x + row * g.x[1] + k, g.x[1], panel(p, k), PACKED_PANEL, sums,
               PACKED_PANEL, k > 0);
    }
    const int64_t n = least(g.columns - column, PACKED_PANEL);
    for (int64_t i = row; i < last; ++i) finish<act>(sums + (i - row) * PACKED_PANEL, n, g, e, 0, i, column, y);
  }
  // a block's share of the next panel, which comes from memory while this one is multiplied
  void ask_for(const T* next, int64_t n, int64_t block) const {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t i = block * n / blocks() / LINE * LINE; i < (block + 1) * n / blocks(); i += LINE)
      __builtin_prefetch(next + i, 0, 2);
  }

  // not 0 where memory is short or the micro-kernels raised
  int32_t run(Workspace space, int64_t threads) const {
    constexpr int64_t floats = PACKED_ROWS * PACKED_PANEL;
    float* const memory = space.take(threads * floats);
    if (!memory) return 1;
    const int64_t units = panels() * blocks();
    int32_t failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(threads)
    {
      const int64_t thread = omp_get_thread_num(), of = omp_get_num_threads();
      try {  // neighbouring panels: each is read by one thread
        for (int64_t u = thread * units / of; u < (thread + 1) * units / of; ++u)
          tile(u / blocks(), u % blocks(), memory + thread * floats);
      } catch (...) {
        failed = 1;
      }
      at::native::cpublas::brgemm_release(true);
    }
    return failed;
  }
};

// Returns not 0 where memory is short, or the micro-kernels raised.
template <Activation act, class T, class S>
int32_t gemm_packed(const T* x, const T* w, const S* scale, const T* bias, const T* other, T* y, const int64_t* sizes,
                    Limits limits, Workspace space) {
  const Product& g = *(const Product*)sizes;
  if (!g.rows || !g.columns) return 0;
  return PackedProduct<act, T, S>{g, x, w, {scale, bias, other, limits}, y}.run(space, threads_for(g, space.threads));
}

}  // namespace dicp
