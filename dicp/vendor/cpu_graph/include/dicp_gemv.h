// Products of few rows: y = act(x W^T * scale + bias) + other. The weights are read once and the few rows of x
// meet each piece of them while it is in the first-level cache, so that the time is that of reading W.
#pragma once
#include "dicp_product.h"

namespace dicp {

// Rows of x worked on at a time, columns whose weights are read side by side, and elements of depth after which
// sums are put away: accumulators stay in registers, four streams keep the memory busier than one, and the rounding
// error grows with a part of the depth.
constexpr int64_t ROW_BLOCK = LANES < 16 ? 4 : 5, STREAMS = 4, DEPTH_BLOCK = 2048;

// Bytes ahead at which weights are asked for: loads on the way are too few for the memory where weights are converted,
// or meet several rows. Two Intel cores of the 5th generation, GB/s of 31 without and with it: bf16 28 and 32, int8 24
// and 29, int8 by groups 24 and 29, float by four rows 26 and 31, float by one row level (one-off script; vectors of 8:
// an AMD core).
constexpr int64_t AHEAD = LANES < 16 ? 384 : 1024;
template <class W> constexpr bool ASKS_AHEAD = LANES == 16 || sizeof(W) < sizeof(float);
DICP_INLINE void ask_ahead(const void* w) { __builtin_prefetch((const char*)w + AHEAD); }

template <class F, int... i> DICP_INLINE void unrolled(F f, isa::Seq<i...>) { (f(i), ...); }
template <int n, class F> DICP_INLINE void times(F f) { unrolled(f, isa::seq<n>()); }  // f(0), .., f(n - 1)

#if defined(__AVX512BF16__)
using Pairs = vi32;  // 16 pairs of bf16
// acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]. An instruction by name: compilers differ on the type of its builtin.
DICP_INLINE vf32 add_pairs(vf32 acc, Pairs a, Pairs b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#endif

// sums[j][r] += the lanes of acc[r][j]
template <int rows>
DICP_INLINE void add_sums(const vf32 (&acc)[rows][STREAMS], float* sums, int64_t sums_row, int64_t sums_stream) {
  static_assert(STREAMS == 4);
  for (int r = 0; r < rows; ++r) {
    const auto all = hsums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    for (int j = 0; j < STREAMS; ++j) sums[j * sums_stream + r * sums_row] += all[j];
  }
}

// sums[j][r] += x[r] . w[j] over n elements
template <int rows, class T, class W>
DICP_INLINE void dots(const T* x, int64_t x_row, const W* const* w, int64_t n, float* sums, int64_t sums_row,
                      int64_t sums_stream) {
  vf32 acc[rows][STREAMS] = {};
  const auto step = [&](int64_t k, auto lanes) INLINE {
    vf32 a[rows];
    times<rows>([&](int r) INLINE { a[r] = load(x + r * x_row + k, lanes); });
    times<STREAMS>([&](int j) INLINE {
      const vf32 b = cast<vf32>(load(w[j] + k, lanes));
      times<rows>([&](int r) INLINE { acc[r][j] = fma(a[r], b, acc[r][j]); });
    });
  };
  int64_t k = 0;
#if defined(__AVX512BF16__)
  if constexpr (same<T, bf16> && same<W, bf16>)
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
      Pairs a[rows];
      times<rows>([&](int r) INLINE { a[r] = isa::load_rows((const int32_t*)(x + r * x_row + k)); });
      times<STREAMS>([&](int j) INLINE {
        ask_ahead(w[j] + k);
        const Pairs b = isa::load_rows((const int32_t*)(w[j] + k));
        times<rows>([&](int r) INLINE { acc[r][j] = add_pairs(acc[r][j], a[r], b); });
      });
    }
#endif
  if constexpr (ASKS_AHEAD<W>) {
    constexpr int64_t LINE = 64 / sizeof(W);
    for (; k + LINE <= n; k += LINE) {
      times<STREAMS>([&](int j) INLINE { ask_ahead(w[j] + k); });
      for (int64_t i = 0; i < LINE; i += LANES) step(k + i, Full());
    }
  }
  for (; k + LANES <= n; k += LANES) step(k, Full());
  if (k < n) step(k, Lanes{(int)(n - k)});
  add_sums(acc, sums, sums_row, sums_stream);
}

// sums[r][c] += x[r][0 .. 4) . w[0 .. 4)[c] over n columns; `count` <= 4 of the ks are there, fewer one by one. The
// next four rows of narrow weights are asked for, whose pieces are too short for the hardware to foresee them: bf16
// 15 to 20 GB/s, int8 10 to 16 (as above).
template <int rows, int streams = STREAMS, class T, class W>
DICP_INLINE void axpys(const T* x, int64_t x_row, const W* w, int64_t step, int64_t count, int64_t n, float* sums,
                       int64_t sums_row) {
  if constexpr (streams > 1)
    if (count < streams) {
      for (int64_t j = 0; j < count; ++j) axpys<rows, 1>(x + j, x_row, w + j * step, step, 1, n, sums, sums_row);
      return;
    }
  float a[rows][streams];
  const W* from[streams];
  for (int j = 0; j < streams; ++j) {
    from[j] = w + j * step;
    for (int r = 0; r < rows; ++r) a[r][j] = (float)decode_one(x[r * x_row + j]);
  }
  each_part(n, [&](int64_t c, auto lanes) INLINE {
    vf32 b[streams];
    times<streams>([&](int j) INLINE {
      if constexpr (streams > 1 && sizeof(W) < sizeof(float)) __builtin_prefetch(from[j] + c + streams * step);
      b[j] = cast<vf32>(load(from[j] + c, lanes));
    });
    times<rows>([&](int r) INLINE {
      vf32 acc = load(sums + r * sums_row + c, lanes);
      times<streams>([&](int j) INLINE { acc = fma(splat<vf32>(a[r][j]), b[j], acc); });
      store(sums + r * sums_row + c, acc, lanes);
    });
  });
}

// f<n>(first) for blocks of at most ROW_BLOCK of `rows`; only those sizes are instantiated that a known number
// of rows needs
template <int known, class F> DICP_INLINE void row_blocks(int64_t rows, F f) {
  if constexpr (known > 0) {
    constexpr int blocks = (known + ROW_BLOCK - 1) / ROW_BLOCK, size = (known + blocks - 1) / blocks;
    for (int r = 0; r + size <= known; r += size) f(r, isa::Seq<size>());
    if constexpr (known % size) f(known / size * size, isa::Seq<known % size>());
  } else {
    for (int64_t r = 0, left = rows; left > 0; left = rows - r) {
      if (left == 4 || left == 8) f(r, isa::Seq<4>()), r += 4;
      else if (left >= ROW_BLOCK) f(r, isa::Seq<ROW_BLOCK>()), r += ROW_BLOCK;
      else if (left >= 2) f(r, isa::Seq<2>()), r += 2;
      else f(r, isa::Seq<1>()), r += 1;
    }
  }
}
template <int n> constexpr int first_of(isa::Seq<n>) { return n; }

// Into how many parts the columns are cut, so that each thread has one.
DICP_INLINE int64_t shares_of(const Product& g) {
  const int64_t threads = threads_for(g, omp_get_max_threads());
  return g.batch >= 4 * threads ? 1 : threads;
}

// W's rows are columns of y. A share of the columns is read as STREAMS streams far apart, each of them contiguous from
// its first row of W to its last. sum(b, r0, count, columns, sums, across) adds to sums[j * across + r * UNIT] the
// products of `count` rows from r0 of a batch with those columns, and to those SET<rows> further on for each further
// set; put(sums, n, b, row, column) makes n results of them.
constexpr int64_t UNIT = 16;
template <int rows> constexpr int64_t ROWS_AT_ONCE = rows ? rows : 64;
template <int rows> constexpr int64_t SET = STREAMS * ROWS_AT_ONCE<rows> * UNIT;
template <int rows, int sets = 1, class Sum, class Put>
DICP_INLINE void column_streams(const Product& g, Sum sum, Put put) {
  constexpr int64_t ROWS = ROWS_AT_ONCE<rows>;
  const int64_t shares = shares_of(g), share = (g.columns + shares - 1) / shares;
#pragma omp parallel for collapse(2) schedule(static) if (shares > 1 || worth_threads(g))
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t s = 0; s < shares; ++s) {
      const int64_t first = s * share, last = first + share < g.columns ? first + share : g.columns;
      const int64_t length = (last - first + STREAMS - 1) / STREAMS;
      for (int64_t r0 = 0; r0 < g.rows; r0 += ROWS) {
        const int64_t count = g.rows - r0 < ROWS ? g.rows - r0 : ROWS;
        for (int64_t c = 0; c < length; c += UNIT) {
          const int64_t n = length - c < UNIT ? length - c : UNIT;
          float sums[sets * SET<rows>];
          for (int64_t j = 0; j < sets * STREAMS; ++j)
            __builtin_memset(sums + j * ROWS * UNIT, 0, count * UNIT * sizeof(float));
          for (int64_t i = 0; i < n; ++i) {
            int64_t columns[STREAMS];  // past the last column the last one again
            for (int64_t j = 0; j < STREAMS; ++j) {
              const int64_t column = first + j * length + c + i;
              columns[j] = column < last ? column : last - 1;
            }
            sum(b, r0, count, columns, sums + i, ROWS * UNIT);
          }
          for (int64_t j = 0; j < STREAMS; ++j) {
            const int64_t column = first + j * length + c, some = last - column < n ? last - column : n;
            for (int64_t r = 0; r < count && some > 0; ++r)
              put(sums + (j * ROWS + r) * UNIT, some, b, r0 + r, column);
          }
        }
      }
    }
}

// sums[j * across + r * UNIT] += x[r] . w[j] of `count` rows
template <int rows, class T, class W>
DICP_INLINE void add_dots(const T* x, int64_t x_row, int64_t count, int64_t depth, const W* const* w, float* sums,
                          int64_t across) {
  for (int64_t k = 0; k < depth; k += DEPTH_BLOCK) {
    const W* from[STREAMS];
    for (int64_t j = 0; j < STREAMS; ++j) from[j] = w[j] + k;
    const int64_t some = depth - k < DEPTH_BLOCK ? depth - k : DEPTH_BLOCK;
    row_blocks<rows>(count, [&](int64_t r, auto size) {
      dots<first_of(decltype(size)())>(x + r * x_row + k, x_row, from, some, sums + r * UNIT, UNIT, across);
    });
  }
}

template <int rows, Activation act, class T, class W, class S>
DICP_INLINE void gemv_rows(const Product& g, const T* x, const W* w, Epilogue<T, S> e, T* y) {
  const auto sum = [&](int64_t b, int64_t r0, int64_t count, const int64_t* columns, float* sums,
                       int64_t across) INLINE {
    const W* from[STREAMS];
    for (int64_t j = 0; j < STREAMS; ++j) from[j] = w + b * g.w[0] + columns[j] * g.w[2];
    add_dots<rows>(x + b * g.x[0] + r0 * g.x[1], g.x[1], count, g.depth, from, sums, across);
  };
  column_streams<rows>(g, sum, [&](const float* sums, int64_t n, int64_t b, int64_t row, int64_t column) INLINE {
    finish<act>(sums, n, g, e, b, row, column, y);
  });
}

// sums[j][r] += x[r] . (w[j] - zero[j]) * scale[j], each zero and scale for `size` elements, whole vectors; zero may
// be null
template <int rows, class T, class W, class S, class Z>
DICP_INLINE void group_dots(const T* x, int64_t x_row, const W* const* w, const S* const* scale, const Z* const* zero,
                            int64_t groups, int64_t size, float* sums, int64_t sums_row, int64_t sums_stream) {
  vf32 total[rows][STREAMS] = {};
  for (int64_t g = 0; g < groups; ++g) {
    vf32 acc[rows][STREAMS] = {}, low[STREAMS];
    times<STREAMS>([&](int j) INLINE {
      low[j] = splat<vf32>(zero ? (float)decode_one(zero[j][g]) : 0.0f);
      for (int64_t k = 0; k < size; k += 64 / (int64_t)sizeof(W)) ask_ahead(w[j] + g * size + k);
    });
    for (int64_t k = g * size; k < (g + 1) * size; k += LANES) {
      vf32 a[rows];
      times<rows>([&](int r) INLINE { a[r] = load(x + r * x_row + k, Full()); });
      times<STREAMS>([&](int j) INLINE {
        const vf32 b = cast<vf32>(load(w[j] + k, Full())) - low[j];
        times<rows>([&](int r) INLINE { acc[r][j] = fma(a[r], b, acc[r][j]); });
      });
    }
    times<STREAMS>([&](int j) INLINE {
      const vf32 by = splat<vf32>((float)decode_one(scale[j][g]));
      times<rows>([&](int r) INLINE { total[r][j] = fma(by, acc[r][j], total[r][j]); });
    });
  }
  add_sums(total, sums, sums_row, sums_stream);
}

// y = x ((w - zero) * scale)^T of dense rows; scale and zero: [columns, groups]
template <int rows, class T, class W, class S, class Z>
int32_t group_gemv(const T* x, const W* w, const S* scale, const Z* zero, T* y, int64_t groups, const int64_t* sizes) {
  const Product& g = *(const Product*)sizes;
  const auto sum = [&](int64_t, int64_t r0, int64_t count, const int64_t* columns, float* sums, int64_t across) INLINE {
    const W* from[STREAMS];
    const S* by[STREAMS];
    const Z* low[STREAMS];
    for (int64_t j = 0; j < STREAMS; ++j) {
      from[j] = w + columns[j] * g.w[2];
      by[j] = scale + columns[j] * groups;
      low[j] = zero + columns[j] * groups;
    }
    row_blocks<rows>(count, [&](int64_t r, auto size) {
      group_dots<first_of(decltype(size)())>(x + (r0 + r) * g.x[1], g.x[1], from, by, zero ? low : nullptr, groups,
                                             g.depth / groups, sums + r * UNIT, UNIT, across);
    });
  };
  const Epilogue<T, float> e;
  column_streams<rows>(g, sum, [&](const float* sums, int64_t n, int64_t b, int64_t row, int64_t column) INLINE {
    finish<LIMITED>(sums, n, g, e, b, row, column, y);
  });
  return 0;
}

// W's columns are columns of y: their sums stay in the first-level cache, a piece of a share at a time
template <int rows, Activation act, class T, class W, class S>
DICP_INLINE void gemv_columns(const Product& g, const T* x, const W* w, Epilogue<T, S> e, T* y) {
  constexpr int64_t ROWS = rows ? rows : 16, WIDE = 4096 / ROWS / 64 * 64;
  const int64_t shares = shares_of(g), share = ((g.columns + shares - 1) / shares + LANES - 1) / LANES * LANES;
#pragma omp parallel for collapse(2) schedule(static) if (shares > 1 || worth_threads(g))
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t s = 0; s < shares; ++s) {
      const int64_t last = (s + 1) * share < g.columns ? (s + 1) * share : g.columns;
      for (int64_t r0 = 0; r0 < g.rows; r0 += ROWS)
        for (int64_t first = s * share; first < last; first += WIDE) {
          const int64_t n = last - first < WIDE ? last - first : WIDE;
          const int64_t count = g.rows - r0 < ROWS ? g.rows - r0 : ROWS;
          const T* const xb = x + b * g.x[0] + r0 * g.x[1];
          float sums[ROWS * WIDE];
          for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < n; ++c) sums[r * WIDE + c] = 0.0f;
          for (int64_t k = 0; k < g.depth; k += STREAMS) {
            const int64_t some = g.depth - k < STREAMS ? g.depth - k : STREAMS;
            row_blocks<rows>(count, [&](int64_t r, auto size) {
              axpys<first_of(decltype(size)())>(xb + r * g.x[1] + k, g.x[1], w + b * g.w[0] + k * g.w[1] + first, g.w[1],
                                                some, n, sums + r * WIDE, WIDE);
            });
          }
          for (int64_t r = 0; r < count; ++r) finish<act>(sums + r * WIDE, n, g, e, b, r0 + r, first, y);
        }
    }
}

// Of more rows than MOST_ROWS_OF_COLUMNS with a weight whose columns are dense: vectors of columns at a time, depth that
// stays in the first-level cache meanwhile, and rows of W ahead that are asked for.
constexpr int64_t MOST_ROWS_OF_COLUMNS = 8, STRIP_DEPTH = 128, ROWS_AHEAD = 16;
constexpr int VECTORS = 4, STRIP = VECTORS * LANES;

// sums[r][c] += x[r][0 .. depth) . w[0 .. depth)[c] over `vectors` vectors of columns. brings: w is read from memory, and
// kept as float32 in rows of a strip.
template <int rows, int vectors, bool brings, class T, class W, class L>
DICP_INLINE void outer_products(const T* x, int64_t x_row, const W* w, int64_t step, int64_t depth, float* kept,
                                float* sums, int64_t sums_row, L lanes) {
  vf32 acc[rows][vectors] = {};
  for (int64_t k = 0; k < depth; ++k, kept += STRIP) {
    vf32 b[vectors];
    times<vectors>([&](int v) INLINE {
      if constexpr (brings) {
        __builtin_prefetch(w + (k + ROWS_AHEAD) * step + v * LANES);
        b[v] = cast<vf32>(load(w + k * step + v * LANES, lanes));
        store(kept + v * LANES, b[v], Full());
      } else {
        b[v] = load(kept + v * LANES, Full());
      }
    });
    times<rows>([&](int r) INLINE {
      const vf32 a = splat<vf32>((float)decode_one(x[r * x_row + k]));
      times<vectors>([&](int v) INLINE { acc[r][v] = fma(a, b[v], acc[r][v]); });
    });
  }
  times<rows>([&](int r) INLINE {
    times<vectors>([&](int v) INLINE {
      float* const to = sums + r * sums_row + v * LANES;
      store(to, load(to, lanes) + acc[r][v], lanes);
    });
  });
}

// The same as gemv_columns with so many rows that sums had better stay in registers: a strip of columns of a part of the
// depth is read from memory for the first rows, and from the caches for the others.
template <int rows, Activation act, class T, class W, class S>
DICP_INLINE void gemv_strips(const Product& g, const T* x, const W* w, Epilogue<T, S> e, T* y) {
  int64_t width = STRIP;  // less where there would not be a strip for each thread
  while (width > LANES && g.batch * ((g.columns + width - 1) / width) < omp_get_max_threads()) width /= 2;
  const int64_t strips = (g.columns + width - 1) / width;
#pragma omp parallel for collapse(2) schedule(static) if (worth_threads(g))
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t first = s * width, n = g.columns - first < width ? g.columns - first : width;
      float sums[rows * STRIP] = {}, kept[STRIP_DEPTH * STRIP];
      for (int64_t k = 0; k < g.depth; k += STRIP_DEPTH) {
        const int64_t depth = g.depth - k < STRIP_DEPTH ? g.depth - k : STRIP_DEPTH;
        const T* const left = x + b * g.x[0] + k;
        const W* const right = w + b * g.w[0] + k * g.w[1] + first;
        row_blocks<rows>(g.rows, [&](int64_t r, auto size) {
          constexpr int some = first_of(decltype(size)());
          const T* const of = left + r * g.x[1];
          float* const to = sums + r * STRIP;
          const auto multiply = [&](auto brings) {
            constexpr bool first = decltype(brings)::value;
            if (n == STRIP)
              return outer_products<some, VECTORS, first>(of, g.x[1], right, g.w[1], depth, kept, to, STRIP, Full());
            each_part(n, [&](int64_t c, auto lanes) INLINE {
              outer_products<some, 1, first>(of, g.x[1], right + c, g.w[1], depth, kept + c, to + c, STRIP, lanes);
            });
          };
          if (r == 0) multiply(isa::Bool<true>());
          else multiply(isa::Bool<false>());
        });
      }
      for (int64_t r = 0; r < g.rows; ++r) finish<act>(sums + r * STRIP, n, g, e, b, r, first, y);
    }
}

// rows: their number where it is known, else 0; across: W's columns are y's. scale, bias and other may be null.
template <int rows, bool across, Activation act, class T, class W, class S>
int32_t gemv(const T* x, const W* w, const S* scale, const T* bias, const T* other, T* y, const int64_t* sizes,
             Limits limits) {
  const Product& g = *(const Product*)sizes;
  const Epilogue<T, S> e{scale, bias, other, limits};
  if constexpr (across && rows > MOST_ROWS_OF_COLUMNS) gemv_strips<rows, act>(g, x, w, e, y);
  else if constexpr (across) gemv_columns<rows, act>(g, x, w, e, y);
  else gemv_rows<rows, act>(g, x, w, e, y);
  return 0;
}

}  // namespace dicp
