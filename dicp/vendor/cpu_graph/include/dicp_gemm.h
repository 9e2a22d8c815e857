// Products of many rows by tiles: y = act(x w * scale + bias) + other, in float32 around oneDNN's micro-kernels. What
// an operand's dtype or order needs is done to a block of it at a time, in the caches; so is what follows the product.
#pragma once
#include "dicp_gemm_transposed.h"

namespace dicp {

// Blocks of a thread: of w [DEPTH_TILE, columns], which meets up to `rows` rows of x, ROW_TILE at a time. The block and
// those rows stay in its second-level cache.
constexpr int64_t ROW_TILE = 128;
struct TileShape { int64_t rows, columns; };
// WIDE: rows of x that have to be transposed meet more columns. Each as measured with such vectors (docs/cpu_graph.md).
constexpr bool SHORT_VECTORS = LANES < 16;
constexpr TileShape LONG{512, SHORT_VECTORS ? 256 : 128}, WIDE{SHORT_VECTORS ? 256 : 128, 512};
constexpr int64_t SHALLOW = SHORT_VECTORS ? 2 * DEPTH_TILE : INT64_MAX;  // depths whose sums may lie in the result

// The workspace of one thread, and its work on the rows of one panel, shape.columns columns of y. Sums add up where
// float32 results lie, if rows are whole cache lines, and the depth is SHALLOW. Those of batches do not: their rows may
// be of any length, and oneDNN keeps a kernel for each distance between rows that it has seen.
template <Activation act, class T, class W, class S> struct GemmTile {
  const Product& g;
  const T* x;
  const W* w;
  const Epilogue<T, S> e;
  T* y;
  TileShape shape;
  bool in_place;                                             // the sums
  int64_t width, depth;                                      // of a block of w, its rows whole cache lines
  float *block = nullptr, *rows = nullptr, *sums = nullptr;  // [depth][width], [ROW_TILE][depth], [shape.rows][width]

  GemmTile(const Product& of, const T* left, const W* right, const Epilogue<T, S>& after, T* result)
      : g(of), x(left), w(right), e(after), y(result) {
    shape = g.x[2] == 1 ? LONG : WIDE;
    in_place = same<T, float> && g.batch == 1 && g.y[1] % 16 == 0 && g.depth <= SHALLOW;
    width = (least(g.columns, shape.columns) + 15) / 16 * 16, depth = (least(g.depth, DEPTH_TILE) + 15) / 16 * 16;
  }
  int64_t floats() const {
    const int64_t of_sums = in_place ? 0 : least(g.rows, shape.rows) * width;
    return depth * width + least(g.rows, ROW_TILE) * depth + of_sums;
  }
  void use(float* memory) {
    block = memory, rows = block + depth * width, sums = rows + least(g.rows, ROW_TILE) * depth;
  }

  // rows [first, last) of the panel of n columns from `column` on
  void panel(int64_t batch, int64_t first, int64_t last, int64_t column, int64_t n) {
    if (g.depth == 0) {
      const float nothing[WIDE.columns] = {};
      for (int64_t row = first; row < last; ++row) finish<act>(nothing, n, g, e, batch, row, column, y);
      return;
    }
    for (int64_t group = first; group < last; group += shape.rows) {
      const int64_t of_group = least(last - group, shape.rows);
      for (int64_t k = 0; k < g.depth; k += DEPTH_TILE) {
        const int64_t some = least(g.depth - k, DEPTH_TILE);
        if (group == first || g.depth > DEPTH_TILE)
          bring(w + batch * g.w[0] + k * g.w[1] + column * g.w[2], g.w[1], g.w[2], some, n, block, width);
        for (int64_t r = 0; r < of_group; r += ROW_TILE) {
          const int64_t m = least(of_group - r, ROW_TILE), row = group + r;
          float* to = sums + r * width;
          int64_t step = width;
          if constexpr (same<T, float>)
            if (in_place) to = y + row * g.y[1] + column, step = g.y[1];
          multiply(x + batch * g.x[0] + row * g.x[1] + k * g.x[2], m, n, some, to, step, k > 0);
          if (k + some == g.depth && !(in_place && e.template leaves_sums<act>()))
            for (int64_t i = 0; i < m; ++i) finish<act>(to + i * step, n, g, e, batch, row + i, column, y);
        }
      }
    }
  }

  // sums [m, n], `step` from row to row, (+)= some of the depth of m rows of x, from `left` on, times the block
  DICP_INLINE void multiply(const T* left, int64_t m, int64_t n, int64_t some, float* to, int64_t step, bool add) {
    if constexpr (same<T, float>)
      if (g.x[2] == 1) return products(m, n, some, left, g.x[1], block, width, to, step, add);
    bring(left, g.x[1], g.x[2], m, some, rows, depth);
    products(m, n, some, rows, depth, block, width, to, step, add);
  }
};

// scale, bias and other may be null. Returns not 0 where memory is short or the micro-kernels raised.
template <Activation act, class T, class W, class S>
int32_t gemm(const T* x, const W* w, const S* scale, const T* bias, const T* other, T* y, const int64_t* sizes,
             Limits limits, Workspace space) {
  const Product& g = *(const Product*)sizes;
  if (!g.batch || !g.rows || !g.columns) return 0;
  const Epilogue<T, S> e{scale, bias, other, limits};
  const GemmTile<act, T, W, S> like(g, x, w, e, y);
  const int64_t threads = threads_for(g, space.threads);
  const Transposed<act, T, W, S> few(g, x, w, e, y);
  if (g.depth && few.serves(space, threads)) return few.run(space, threads);
  float* const memory = space.take(threads * like.floats());
  if (!memory) return 1;
  const int64_t panels = (g.columns + like.shape.columns - 1) / like.shape.columns, all = g.batch * panels;
  // parts of the rows, each with a block of its own, where panels alone are too few: of whole tiles, or of fewer rows
  // where a thread would have none
  const bool small = all * ((g.rows + ROW_TILE - 1) / ROW_TILE) < threads;
  const int64_t unit = small ? FEW : ROW_TILE, units = (g.rows + unit - 1) / unit;
  int64_t parts = ((small ? 1 : 2) * threads + all - 1) / all;
  while (parts < units && all * parts % threads) ++parts;  // as many for each thread
  parts = least(parts, units);
  int32_t failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(threads)
  {
    GemmTile<act, T, W, S> tile = like;
    tile.use(memory + omp_get_thread_num() * like.floats());
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t batch = 0; batch < g.batch; ++batch)
      for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t part = 0; part < parts; ++part) {
          if (failed) continue;
          const int64_t first = part * units / parts * unit, last = (part + 1) * units / parts * unit;
          const int64_t column = panel * like.shape.columns;
          try {
            tile.panel(batch, first, least(last, g.rows), column, least(g.columns - column, like.shape.columns));
          } catch (...) {
            failed = 1;
          }
        }
  }
  return failed;
}

}  // namespace dicp
