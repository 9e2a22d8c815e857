// Products with vectors of 8 lanes, for which oneDNN's micro-kernels read the right operand as it lies, from the
// second-level cache: by strips of 16 columns of it, and of 6 rows of the left one where that is packed, each contiguous
// along the depth, so that 12 vectors of sums stay in registers and a strip of columns in the first-level cache.
#pragma once
#include "dicp_brgemm.h"

namespace dicp {

constexpr bool BY_STRIPS = LANES == 8;
constexpr int64_t STRIP_ROWS = 6, STRIP_COLUMNS = 16;
constexpr int64_t SPILL = LANES;  // floats behind packed rows that are written, and never read

DICP_INLINE int64_t whole_strips(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// to[strip][k][STRIP_COLUMNS] = from[k * down + column * across] as float32, zeros behind the last column
template <class T>
inline void pack_columns(const T* from, int64_t down, int64_t across, int64_t depth, int64_t n, float* to) {
  const int64_t whole = n / STRIP_COLUMNS * STRIP_COLUMNS;
  if (across == 1) {  // a row after the other, as they lie in memory
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t c = 0; c < whole; c += LANES) {
        float* const strip = to + c / STRIP_COLUMNS * STRIP_COLUMNS * depth;
        store(strip + k * STRIP_COLUMNS + c % STRIP_COLUMNS, cast<vf32>(load(from + k * down + c, Full())), Full());
      }
  } else {
    for (int64_t c = 0; c < whole; c += STRIP_COLUMNS)
      bring(from + c * across, down, across, depth, STRIP_COLUMNS, to + c * depth, STRIP_COLUMNS);
  }
  if (whole == n) return;
  float* const last = to + whole * depth;
  __builtin_memset(last, 0, depth * STRIP_COLUMNS * sizeof(float));
  bring(from + whole * across, down, across, depth, n - whole, last, STRIP_COLUMNS);
}

// to[strip][k][STRIP_ROWS] = from[row * down + k * across] as float32; rows behind the last one repeat it. Whole vectors
// are stored, of which the next one overwrites what is too much.
template <class T>
inline void pack_rows(const T* from, int64_t down, int64_t across, int64_t m, int64_t depth, float* to) {
  for (int64_t i = 0; i < m; i += STRIP_ROWS, from += STRIP_ROWS * down, to += STRIP_ROWS * depth) {
    const int64_t last = least(m - i, STRIP_ROWS) - 1;
    if (across == 1) {
      each_part(depth, [&](int64_t k, auto lanes) INLINE {
        vf32 r[LANES];
#pragma GCC unroll 8
        for (int64_t q = 0; q < LANES; ++q)
          r[q] = q < STRIP_ROWS ? cast<vf32>(load(from + least(q, last) * down + k, lanes)) : splat<vf32>(0);
        transpose(r);
#pragma GCC unroll 8
        for (int q = 0; q < count(lanes); ++q) store(to + (k + q) * STRIP_ROWS, r[q], Full());
      });
    } else {
      for (int64_t k = 0; k < depth; ++k)
        store(to + k * STRIP_ROWS, cast<vf32>(load(from + k * across, Lanes{(int)last + 1})), Full());
    }
  }
}

// The left operand: strips of rows, packed, or rows as they lie.
struct PackedRows {
  const float* at;
  int64_t depth;
  DICP_INLINE PackedRows from(int64_t row, int64_t k) const { return {at + row * depth + k * STRIP_ROWS, depth}; }
  DICP_INLINE const float* row(int i) const { return at + i; }
  static constexpr int64_t along = STRIP_ROWS;
};
struct RowsAsTheyLie {
  const float* at;
  int64_t apart, last;  // between rows; the last one there is
  DICP_INLINE RowsAsTheyLie from(int64_t row, int64_t k) const { return {at + row * apart + k, apart, last - row}; }
  DICP_INLINE const float* row(int i) const { return at + least(i, last) * apart; }
  static constexpr int64_t along = 1;
};

DICP_INLINE RowsAsTheyLie rows_of(const float* at, int64_t apart, int64_t count) { return {at, apart, count - 1}; }

// c[rows][STRIP_COLUMNS], `step` from row to row, (+)= one strip times another, which are `depth` long
template <int rows, class Left>
inline void strip_product(Left left, const float* right, int64_t depth, float* c, int64_t step, bool add) {
  constexpr int VECTORS = STRIP_COLUMNS / LANES;
  const float* row[rows];
  vf32 sums[rows * VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
    row[i] = left.row(i);
    __builtin_prefetch(c + i * step, 1);
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows * VECTORS; ++i) sums[i] = splat<vf32>(0);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    vf32 w[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) w[j] = load(right + k * STRIP_COLUMNS + j * LANES, Full());
#pragma GCC unroll 12
    for (int i = 0; i < rows * VECTORS; ++i)
      sums[i] = fma(splat<vf32>(row[i / VECTORS][k * Left::along]), w[i % VECTORS], sums[i]);
  }
  if (add) {
#pragma GCC unroll 12
    for (int i = 0; i < rows * VECTORS; ++i) {
      float* const at = c + i / VECTORS * step + i % VECTORS * LANES;
      store(at, load(at, Full()) + sums[i], Full());
    }
  } else {
#pragma GCC unroll 12
    for (int i = 0; i < rows * VECTORS; ++i) store(c + i / VECTORS * step + i % VECTORS * LANES, sums[i], Full());
  }
}
// All of the depth: every DEPTH_TILE products a sum is rounded into memory.
template <int rows, class Left>
inline void rounded_product(Left left, const float* right, int64_t depth, float* c, int64_t step, bool add) {
  for (int64_t k = 0; k < depth; k += DEPTH_TILE)
    strip_product<rows>(left.from(0, k), right + k * STRIP_COLUMNS, least(depth - k, DEPTH_TILE), c, step, add || k);
}

// c[m][n] (+)= m rows times strips of n columns; what is behind the last column is left as it is
template <class Left>
inline void strip_products(int64_t m, int64_t n, int64_t depth, Left left, const float* right, float* c, int64_t step,
                           bool add) {
  for (int64_t j = 0; j < n; j += STRIP_COLUMNS)
    for (int64_t i = 0; i < m; i += STRIP_ROWS) {
      const int64_t rows = least(m - i, STRIP_ROWS), columns = least(n - j, STRIP_COLUMNS);
      const float* const w = right + j * depth;
      const Left x = left.from(i, 0);
      float* const at = c + i * step + j;
      if (rows == STRIP_ROWS && columns == STRIP_COLUMNS) {
        rounded_product<STRIP_ROWS>(x, w, depth, at, step, add);
        continue;
      }
      float edge[STRIP_ROWS * STRIP_COLUMNS] = {};
      if (rows <= 2) rounded_product<2>(x, w, depth, edge, STRIP_COLUMNS, false);
      else if (rows <= 4) rounded_product<4>(x, w, depth, edge, STRIP_COLUMNS, false);
      else rounded_product<STRIP_ROWS>(x, w, depth, edge, STRIP_COLUMNS, false);
      for (int64_t r = 0; r < rows; ++r)
        each_part(columns, [&](int64_t k, auto lanes) INLINE {
          const vf32 sum = load(edge + r * STRIP_COLUMNS + k, lanes);
          store(at + r * step + k, add ? load(at + r * step + k, lanes) + sum : sum, lanes);
        });
    }
}

}  // namespace dicp
