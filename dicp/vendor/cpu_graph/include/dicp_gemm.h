// Products of many rows by tiles: y = act(x w * scale + bias) + other, in float32 around micro-kernels: oneDNN's, or
// dicp_strips.h. What an operand's dtype or order needs is done to a block of it at a time, in the
// caches; so is what follows the product.
#pragma once
#include "dicp_gemm_transposed.h"
#include "dicp_strips.h"

namespace dicp {

// Blocks of a thread: of w [DEPTH_BLOCK, columns], which meets up to `rows` rows of x, ROW_TILE at a time. oneDNN's block
// and those rows stay in its second-level cache; of strips, a block is read once for each tile of rows, which stays there.
constexpr int64_t ROW_TILE = BY_STRIPS ? 144 : 128, DEPTH_BLOCK = BY_STRIPS ? 256 : DEPTH_TILE;
constexpr int64_t EPILOGUE_COLUMNS = 256;  // of a tile of rows, whose sums are in the second-level cache
struct TileShape { int64_t rows, columns; };
// WIDE: rows of x that have to be transposed meet more columns. STRIPS: sums lie in the result, as many rows as there
// are. Each as measured with such vectors (docs/cpu_graph.md).
constexpr TileShape LONG{512, 128}, WIDE{128, 512}, STRIPS{INT64_MAX, 1024}, STRIPS_OF_SUMS{576, 256};

// The workspace of one thread, and its work on the rows of one panel, shape.columns columns of y. Sums add up where
// float32 results lie; around oneDNN's micro-kernels, if rows are whole cache lines. Those of batches do not: their rows
// may be of any length, and oneDNN keeps a kernel for each distance between rows that it has seen.
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

  GemmTile(const Product& of, const T* left, const W* right, const Epilogue<T, S>& after, T* result, int64_t threads)
      : g(of), x(left), w(right), e(after), y(result) {
    if constexpr (BY_STRIPS) {
      in_place = same<T, float>;
      shape = in_place ? STRIPS : STRIPS_OF_SUMS;
      shape.columns = share(g.columns, shape.columns, threads);
    } else {
      in_place = same<T, float> && g.batch == 1 && g.y[1] % 16 == 0;
      shape = g.x[2] == 1 ? LONG : WIDE;
    }
    width = (least(g.columns, shape.columns) + 15) / 16 * 16, depth = (least(g.depth, DEPTH_BLOCK) + 15) / 16 * 16;
  }
  // columns of a panel: about as many panels as threads share out evenly, where there are enough columns
  static int64_t share(int64_t columns, int64_t most, int64_t threads) {
    int64_t panels = (columns + most - 1) / most;
    while (panels % threads && columns / panels >= 2 * EPILOGUE_COLUMNS) ++panels;
    return panels ? whole_strips((columns + panels - 1) / panels, STRIP_COLUMNS) : most;
  }
  int64_t floats_of_rows() const {
    const int64_t tile = least(g.rows, ROW_TILE);
    return BY_STRIPS ? whole_strips(tile, STRIP_ROWS) * depth + SPILL : tile * depth;
  }
  int64_t floats() const {
    const int64_t of_sums = in_place ? 0 : least(g.rows, shape.rows) * width;
    return depth * width + floats_of_rows() + of_sums;
  }
  void use(float* memory) {
    block = memory, rows = block + depth * width, sums = rows + floats_of_rows();
  }

  // rows [first, last) of the panel of n columns from `column` on
  void panel(int64_t batch, int64_t first, int64_t last, int64_t column, int64_t n) {
    if (g.depth == 0) {
      const float nothing[STRIPS.columns] = {};
      for (int64_t row = first; row < last; ++row) finish<act>(nothing, n, g, e, batch, row, column, y);
      return;
    }
    const int64_t rows_of_group = least(shape.rows, last - first);
    for (int64_t group = first; group < last; group += rows_of_group) {
      const int64_t of_group = least(last - group, rows_of_group);
      for (int64_t k = 0; k < g.depth; k += DEPTH_BLOCK) {
        const int64_t some = least(g.depth - k, DEPTH_BLOCK);
        if (group == first || g.depth > DEPTH_BLOCK)
          bring_block(w + batch * g.w[0] + k * g.w[1] + column * g.w[2], some, n);
        for (int64_t r = 0; r < of_group; r += ROW_TILE)
          tile(batch, group + r, least(of_group - r, ROW_TILE), sums + r * width, column, n, k, some);
      }
    }
  }

  DICP_INLINE void bring_block(const W* from, int64_t some, int64_t n) {
    if constexpr (BY_STRIPS) pack_columns(from, g.w[1], g.w[2], some, n, block);
    else bring(from, g.w[1], g.w[2], some, n, block, width);
  }

  // m rows from `row` on times the block of depths [k, k + some); `to`: their sums, if those do not lie in y
  void tile(int64_t batch, int64_t row, int64_t m, float* to, int64_t column, int64_t n, int64_t k, int64_t some) {
    const T* const left = x + batch * g.x[0] + row * g.x[1] + k * g.x[2];
    int64_t step = width;
    if constexpr (same<T, float>)
      if (in_place) to = y + batch * g.y[0] + row * g.y[1] + column, step = g.y[1];
    const bool add = k > 0, ends = k + some == g.depth && !(in_place && e.template leaves_sums<act>());
    const auto end = [&](int64_t from, int64_t columns) {
      for (int64_t i = 0; i < m; ++i) finish<act>(to + i * step + from, columns, g, e, batch, row + i, column + from, y);
    };
    if constexpr (BY_STRIPS) {
      pack_rows(left, g.x[1], g.x[2], m, some, rows);
      const int64_t part = ends ? EPILOGUE_COLUMNS : n;
      for (int64_t c = 0; c < n; c += part) {
        const int64_t columns = least(n - c, part);
        strip_products(m, columns, some, PackedRows{rows, some}, block + c * some, to + c, step, add);
        if (ends) end(c, columns);
      }
    } else {
      multiply(left, m, n, some, to, step, add);
      if (ends) end(0, n);
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
  const int64_t threads = threads_for(g, space.threads);
  const GemmTile<act, T, W, S> like(g, x, w, e, y, threads);
  const Transposed<act, T, W, S> few(g, x, w, e, y);
  if (g.depth && few.serves(space, threads)) return few.run(space, threads);
  float* const memory = space.take(threads * like.floats());
  if (!memory) return 1;
  const int64_t panels = (g.columns + like.shape.columns - 1) / like.shape.columns, all = g.batch * panels;
  // parts of the rows, each with a block of its own, where panels alone are too few: of whole tiles, or of fewer rows
  // where a thread would have none. Two for a thread, where the rows of each repay packing the block
  const bool small = all * ((g.rows + ROW_TILE - 1) / ROW_TILE) < threads;
  const int64_t unit = BY_STRIPS ? 3 * STRIP_ROWS : small ? FEW : ROW_TILE, units = (g.rows + unit - 1) / unit;
  const bool once = small || (BY_STRIPS && g.rows <= 4 * ROW_TILE);
  int64_t parts = ((once ? 1 : 2) * threads + all - 1) / all;
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
