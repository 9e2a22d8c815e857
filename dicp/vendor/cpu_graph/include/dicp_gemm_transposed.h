// y^T = w^T x^T, for few rows and a w that lies along the depth. The micro-kernel reads the columns of w as they are
// stored, in runs that the hardware foresees, while it computes; transposed are x, once for all threads, and the result. A
// block of w that is transposed beforehand, as in dicp_gemm.h, is waited for, which is half of the time of 32 rows.
#pragma once
#include "dicp_strips.h"
#include "dicp_product.h"

namespace dicp {

// Rows of x at the most (of more, dicp_strips.h is ahead where there are strips), and columns of w at a time, whose sums
// are in the second-level cache.
constexpr int64_t FEW_ROWS = BY_STRIPS ? 128 : 512, FEW_ROWS_OF_PAIRS = 128, PANEL = 128, BAND = 16;
// Of more rows, it takes longer to turn x and y than w. A float of w is waited for; one of x or y takes twice as long,
// as new memory is written.
DICP_INLINE int64_t few_rows(int64_t columns, int64_t depth) {
  return least(FEW_ROWS, columns * depth / (2 * (columns + depth) + 1));
}

// Word: what is multiplied; bf16, by pairs, where the processor does that.
template <Activation act, class T, class W, class S, class Word = float> struct Transposed {
  static constexpr bool as_stored = same<W, Word>, pairs = !same<Word, float>;
  static constexpr int64_t in_word = sizeof(float) / sizeof(Word);
  static constexpr int64_t deep = pairs ? 1024 : DEPTH_TILE;  // products in a sum, which errs less than bf16 rounds
  const Product& g;
  const T* x;
  const W* w;
  const Epilogue<T, S> e;
  T* y;
  int64_t width;  // of x^T: whole cache lines, and two vectors, as one takes a micro-kernel as long

  Transposed(const Product& of, const T* left, const W* right, const Epilogue<T, S>& after, T* result)
      : g(of), x(left), w(right), e(after), y(result) {
    width = g.rows <= 2 * BAND ? 2 * BAND : (g.rows + BAND - 1) / BAND * BAND;
  }
  // depths that vary have memory for the other way only
  bool serves(const Workspace& space, int64_t threads) const {
    const bool fits = floats_of_x() + threads * floats() <= space.floats;
    const bool in_reach = g.w[2] < 1 << 22;  // oneDNN steps over 128 columns by 32 bits of bytes
    const bool whole = !pairs || (g.x[2] == 1 && g.x[1] % 2 == 0 && g.depth % 2 == 0);
    const int64_t few = least(few_rows(g.columns, g.depth), pairs ? FEW_ROWS_OF_PAIRS : FEW_ROWS);
    return g.batch == 1 && g.w[1] == 1 && in_reach && whole && g.rows && g.rows <= few && fits;
  }
  int64_t floats_of_x() const { return g.depth / in_word * width; }
  int64_t floats() const {  // of a thread: sums [PANEL][width], rows of results, a block of w
    return PANEL * width + BAND * PANEL + (as_stored ? 0 : PANEL * deep);
  }

  // from depth k on; columns without a row of x are 0, as their sums are multiplied all the same: on Intel a product of
  // what memory held before, floats below the normal ones, took 30 times as long
  void transpose_x(int64_t k, float* transposed) const {
    const int64_t some = least(g.depth - k, DEPTH_TILE);
    float* const to = transposed + k / in_word * width;
    for (int64_t i = 0; i < some / in_word && g.rows < width; ++i)
      for (int64_t c = g.rows / LANES * LANES; c < width; c += LANES) store(to + i * width + c, splat<vf32>(0), Full());
    if constexpr (pairs) bring((const float*)(x + k), 1, g.x[1] / in_word, some / in_word, g.rows, to, width);
    else bring(x + k * g.x[2], g.x[2], g.x[1], some, g.rows, to, width);
  }

  // n columns of y from `column` on
  void panel(int64_t column, int64_t n, const float* transposed, float* sums) const {
    float *const band = sums + PANEL * width, *const block = band + BAND * PANEL;
    for (int64_t k = 0; k < g.depth; k += deep) {
      const int64_t some = least(g.depth - k, deep);
      const W* const from = w + k + column * g.w[2];
      const Word* const right = (const Word*)(transposed + k / in_word * width);
      if constexpr (as_stored) {
        products(n, width, some, from, g.w[2], right, width, sums, width, k > 0);
      } else {
        bring(from, g.w[2], 1, n, some, block, deep);
        products(n, width, some, block, deep, right, width, sums, width, k > 0);
      }
    }
    for (int64_t row = 0; row < g.rows; row += BAND) {
      const int64_t m = least(g.rows - row, BAND);
      if constexpr (same<T, float>)
        if (e.template leaves_sums<act>()) {
          bring(sums + row, 1, width, m, n, y + row * g.y[1] + column, g.y[1]);
          continue;
        }
      bring(sums + row, 1, width, m, n, band, PANEL);
      for (int64_t i = 0; i < m; ++i) finish<act>(band + i * PANEL, n, g, e, 0, row + i, column, y);
    }
  }

  // not 0 where memory is short or the micro-kernels raised
  int32_t run(Workspace space, int64_t threads) const {
    float *const transposed = space.take(floats_of_x()), *const memory = space.take(threads * floats());
    if (!memory) return 1;
    const int64_t units = (g.columns + FEW - 1) / FEW;
    int64_t panels = (g.columns + PANEL - 1) / PANEL;
    while (panels < units && panels % threads) ++panels;  // as many for each thread
    int32_t failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(threads)
    {
#pragma omp for
      for (int64_t k = 0; k < g.depth; k += DEPTH_TILE) transpose_x(k, transposed);
#pragma omp for schedule(dynamic)
      for (int64_t p = 0; p < panels; ++p) {
        if (failed) continue;
        const int64_t first = p * units / panels * FEW, last = (p + 1) * units / panels * FEW;
        try {
          panel(first, least(last, g.columns) - first, transposed, memory + omp_get_thread_num() * floats());
        } catch (...) {
          failed = 1;
        }
      }
      if (pairs) at::native::cpublas::brgemm_release(true);
    }
    return failed;
  }
};

// By pairs of bf16. Returns not 0 where memory is short, the operands lie otherwise, or the micro-kernels raised.
template <Activation act, class T, class S>
int32_t gemm_pairs(const T* x, const T* w, const S* scale, const T* bias, const T* other, T* y, const int64_t* sizes,
                   Limits limits, Workspace space) {
  const Product& g = *(const Product*)sizes;
  const Transposed<act, T, T, S, T> few(g, x, w, {scale, bias, other, limits}, y);
  const int64_t threads = threads_for(g, space.threads);
  if (!g.rows) return 0;
  return few.serves(space, threads) ? few.run(space, threads) : 1;
}

}  // namespace dicp
