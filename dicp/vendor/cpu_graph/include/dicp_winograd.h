// Convolutions with a 3x3 window and stride 1 by fewer multiplications: F(NxN, 3x3) of Winograd (Lavin and Gray 2016).
//
//   Y = A^T [ sum over channels of (G g G^T) * (B^T d B) ] A       d: PxP of the input, P = N + 2, g: the window, Y: NxN
//
// 16 products a tile of 2x2 where the sum itself has 36, and 36 a tile of 4x4 where it has 144. Each place of the PxP is
// a matrix product [tiles, channels] x [channels, results] of float32, by oneDNN's micro-kernels. Tiles of 4x4 err some
// four times as much as those of 2x2: of nothing that results in bf16 would show, but of more than eager does in float32.
// A result depends on no element outside its own tile's pixels; but inf - inf is NaN, and a sum may overflow, so the
// caller is told when something was not finite.
#pragma once
#include "dicp_brgemm.h"
#include "dicp_product.h"

namespace dicp {

// Sizes, and strides in elements; channels and results are dense in images (`channels-last`).
struct Winograd {
  int64_t batch, channels, height, width, results, rows, columns, pad_rows, pad_columns;
  int64_t x[3], y[3], other[3];  // per batch, row, column
  int64_t w[4];                  // per result, channel, row, column of the window
};

// What is added to sums, and limits of them then. Norms that are folded have a float32 bias, also of images in bf16.
template <class T> struct Added {  // each may be null, and of the biases one is
  const T* bias;
  const float* wide;
  const T* other;
  Limits limits;
  template <class L> DICP_INLINE vf32 shift(int64_t k, L lanes) const {
    return bias ? load(bias + k, lanes) : wide ? load(wide + k, lanes) : splat<vf32>(0.0f);
  }
};

// Tiles and results of a block: a thread's products [64, channels] x [channels, 64] at a time read 256 bytes of
// transformed weights for 64 tiles each. Transformed weights lie as [block][PxP][channels][results of the block], with a
// GAP between places, without which powers of two would share few sets of the cache.
constexpr int64_t TILE_BLOCK = 64, RESULT_BLOCK = 64, GAP = 16;
// Channels that are summed before the sum is rounded into memory: it errs as a sum of 128 does, not one of all; of
// twice as many where results are rounded to bf16, which is a tenth faster and in float32 would err more than eager may.
template <int N> constexpr int64_t DEPTH = N == 2 ? 128 : 256;
// Transformed weights at a time: what caches hold, but 128 results at the least.
constexpr int64_t SLICE_BYTES = 4 << 20, SLICE_RESULTS = 128;

// -- one dimension -----------------------------------------------------------------------------------------

// The points: 0, 1, -1 and infinity (N = 2), or 0, the roots of 1/2 and of 2, and infinity (4), which err a quarter as
// much as 0, 1, -1, 2, -2 and infinity do.
constexpr float NEAR = 0.70710678f, FAR = 1.41421356f;

// B^T v
template <int N> DICP_INLINE void differences(vf32 (&v)[N + 2]) {
  if constexpr (N == 2) {
    const vf32 first = v[0] - v[2], sum = v[1] + v[2], back = v[2] - v[1], last = v[1] - v[3];
    v[0] = first, v[1] = sum, v[2] = back, v[3] = last;
  } else {
    const vf32 first = v[0] - 2.5f * v[2] + v[4], last = v[1] - 2.5f * v[3] + v[5];
    const vf32 near = v[4] - 2.0f * v[2], near_odd = (v[3] - 2.0f * v[1]) * NEAR;
    const vf32 far = v[4] - 0.5f * v[2], far_odd = (v[3] - 0.5f * v[1]) * FAR;
    v[0] = first, v[1] = near + near_odd, v[2] = near - near_odd, v[3] = far + far_odd, v[4] = far - far_odd;
    v[5] = last;
  }
}

// G v
template <int N> DICP_INLINE void widen(const vf32 (&v)[3], vf32 (&to)[N + 2]) {
  if constexpr (N == 2) {
    const vf32 even = (v[0] + v[2]) * 0.5f, odd = v[1] * 0.5f;
    to[0] = v[0], to[1] = even + odd, to[2] = even - odd, to[3] = v[2];
  } else {
    const vf32 near = (v[0] + 0.5f * v[2]) * (-2.0f / 3), near_odd = v[1] * (-2.0f / 3 * NEAR);
    const vf32 far = (v[0] + 2.0f * v[2]) * (1.0f / 6), far_odd = v[1] * (1.0f / 6 * FAR);
    to[0] = v[0], to[1] = near + near_odd, to[2] = near - near_odd, to[3] = far + far_odd, to[4] = far - far_odd;
    to[5] = v[2];
  }
}

// A^T v
template <int N> DICP_INLINE void sums(const vf32 (&v)[N + 2], vf32 (&to)[N]) {
  if constexpr (N == 2) {
    to[0] = v[0] + v[1] + v[2], to[1] = v[1] - v[2] - v[3];
  } else {
    const vf32 near = v[1] + v[2], near_odd = (v[1] - v[2]) * NEAR, far = v[3] + v[4], far_odd = (v[3] - v[4]) * FAR;
    to[0] = v[0] + near + far, to[1] = near_odd + far_odd, to[2] = 0.5f * near + 2.0f * far;
    to[3] = 0.5f * near_odd + 2.0f * far_odd + v[5];
  }
}

// -- weights -----------------------------------------------------------------------------------------------

// The windows of up to LANES results and LANES channels as window[channel][9][result], absent results 0.
template <class T>
inline void read_windows(const Winograd& a, const T* w, int64_t results, int64_t channels, float (*window)[9 * LANES]) {
  const bool dense = a.w[1] == 9 && a.w[2] == 3 && a.w[3] == 1;
  if (!dense && a.w[1] != 1) {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < LANES; ++k)
        for (int r = 0; r < 9; ++r)
          window[c][r * LANES + k] =
              k < results ? decode_one(w[k * a.w[0] + c * a.w[1] + r / 3 * a.w[2] + r % 3 * a.w[3]]) : 0.0f;
    return;
  }
  const int64_t length = dense ? 9 * channels : channels;  // of a result, from memory that is contiguous
  for (int part = 0; part < 9; ++part) {
    const int64_t first = dense ? part * LANES : 0;
    const int64_t at = dense ? first : part / 3 * a.w[2] + part % 3 * a.w[3];
    if (first >= length) break;
    vf32 r[LANES];
    for (int64_t k = 0; k < LANES; ++k) {
      // far ahead: these are many streams from memory, each of few lines at a time
      __builtin_prefetch(w + k * a.w[0] + at + 3 * (dense ? 9 * LANES : LANES));
      r[k] = k < results ? load(w + k * a.w[0] + at, lanes_left(length - first)) : splat<vf32>(0.0f);
    }
    transpose(r);
    for (int64_t i = 0; i < LANES && first + i < length; ++i)
      store(dense ? window[0] + (first + i) * LANES : window[i] + part * LANES, r[i], Full());
  }
}

// Transformed weights of the `block` results from `first` on, channels [from, to), places `apart`; flipped: of windows
// turned by 180 degrees, as the gradient of the input has them.
template <int N, class T>
inline void transform_weights(const Winograd& a, const T* w, int64_t first, int64_t block, int64_t from, int64_t to,
                              bool flipped, float* u, int64_t apart) {
  constexpr int P = N + 2;
  float window[LANES][9 * LANES];
  for (int64_t k = 0; k < block; k += LANES)
    for (int64_t c0 = from; c0 < to; c0 += LANES) {
      const int64_t results = least(block - k, LANES), channels = least(to - c0, LANES);
      read_windows(a, w + (first + k) * a.w[0] + c0 * a.w[1], results, channels, window);
      for (int64_t c = 0; c < channels; ++c) {
        vf32 rows[3][P], both[P];
        for (int i = 0; i < 3; ++i) {
          const auto g = [&](int j) { return load(window[c] + (flipped ? 8 - 3 * i - j : 3 * i + j) * LANES, Full()); };
          widen<N>({g(0), g(1), g(2)}, rows[i]);
        }
        float* const at = u + (c0 - from + c) * block + k;
        for (int j = 0; j < P; ++j) {
          widen<N>({rows[0][j], rows[1][j], rows[2][j]}, both);
          for (int i = 0; i < P; ++i) store(at + (P * i + j) * apart, both[i], lanes_left(results));
        }
      }
    }
}

// -- images ------------------------------------------------------------------------------------------------

// The workspace of one thread, and the work on one block of tiles.
template <int N, class T> struct WinogradTiles {
  static constexpr int P = N + 2, PLACES = P * P;
  const Winograd& a;
  int64_t down, across, tiles, block;         // tiles of an image, of all, of a block
  int64_t lead, plane, lead_m, plane_m;       // elements of a row and of a place in v and m
  float *v = nullptr, *m;                     // [PLACES][block][channels], [PLACES][block][results of a block]
  T* zeros;                                   // [channels]
  vf32 poison = splat<vf32>(0.0f);            // 0 as long as all was finite

  // all tiles at a time, and so many results
  explicit WinogradTiles(const Winograd& of, int64_t results = RESULT_BLOCK) : a(of) {
    down = (a.rows + N - 1) / N, across = (a.columns + N - 1) / N, tiles = a.batch * down * across;
    lay_out(tiles, results);
  }
  // groups: blocks of results that are there at a time
  WinogradTiles(const Winograd& of, int64_t groups, int64_t threads) : WinogradTiles(of) {
    int64_t some = least(tiles, TILE_BLOCK);
    while (some > 16 && (tiles + some - 1) / some * groups < 2 * threads) some = (some + 1) / 2;
    lay_out(some, RESULT_BLOCK);
  }
  void lay_out(int64_t of_block, int64_t results) {
    block = of_block;
    // planes are an odd number of cache lines apart: powers of two would share few sets of the cache
    lead = (a.channels + 15) / 16 * 16 + 16, plane = (block * lead / 16 | 1) * 16;
    lead_m = results, plane_m = ((block * lead_m + 15) / 16 | 1) * 16;  // results: of a vector of 8, too
  }
  int64_t floats_v() const { return PLACES * plane; }
  int64_t floats_m() const { return PLACES * plane_m + lead; }  // and the zeros
  void use(float* of_v, float* of_m) {
    v = of_v, m = of_m, zeros = (T*)(m + PLACES * plane_m);
    for (int64_t c = 0; c < lead; ++c) zeros[c] = T{};
  }
  bool finite() const { return hsum(poison) == 0.0f; }

  struct Place { int64_t image, row, column; };  // of a tile's first result
  DICP_INLINE Place place(int64_t tile) const {
    const int64_t image = tile / (down * across), rest = tile - image * down * across;
    return {image, rest / across * N, rest % across * N};
  }

  // the pixels under a tile; zeros beyond the edges
  DICP_INLINE void pixels(const T* x, int64_t tile, const T* (&from)[PLACES]) const {
    const Place p = place(tile);
    const T* const image = x + p.image * a.x[0];
    for (int i = 0; i < P; ++i) {
      const int64_t row = p.row + i - a.pad_rows;
      for (int j = 0; j < P; ++j) {
        const int64_t column = p.column + j - a.pad_columns;
        const bool inside = row >= 0 && row < a.height && column >= 0 && column < a.width;
        from[P * i + j] = inside ? image + row * a.x[1] + column * a.x[2] : zeros;
      }
    }
  }

  // `channels` of tiles [first, first + count) -> v, [PLACES][count][channels]
  void spread(const T* x, int64_t first, int64_t count, int64_t channels, float* v, int64_t lead, int64_t plane) const {
    for (int64_t t = 0; t < count; ++t) {
      const T* from[PLACES];
      pixels(x, first + t, from);
      each_part(channels, [&](int64_t c, auto lanes) INLINE {
        vf32 d[P][P];  // transposed, so that either direction is a row once
#pragma GCC unroll 6
        for (int j = 0; j < P; ++j) {
#pragma GCC unroll 6
          for (int i = 0; i < P; ++i) d[j][i] = load(from[P * i + j] + c, lanes);
          differences<N>(d[j]);
        }
        float* const to = v + t * lead + c;
#pragma GCC unroll 6
        for (int i = 0; i < P; ++i) {
          vf32 row[P];
#pragma GCC unroll 6
          for (int j = 0; j < P; ++j) row[j] = d[j][i];
          differences<N>(row);
#pragma GCC unroll 6
          for (int j = 0; j < P; ++j) store(to + (P * i + j) * plane, row[j], lanes);
        }
      });
    }
  }

  // m -> results [k, k + n) of tiles [first, first + count)
  void collect(int64_t first, int64_t count, int64_t k, int64_t n, const Added<T>& e, T* y) {
    for (int64_t t = 0; t < count; ++t) {
      const Place p = place(first + t);
      T* const to = y + p.image * a.y[0] + p.row * a.y[1] + p.column * a.y[2] + k;
      const T* const more = e.other ? e.other + p.image * a.other[0] + p.row * a.other[1] + p.column * a.other[2] + k : nullptr;
      const int64_t height = least(a.rows - p.row, N), width = least(a.columns - p.column, N);
      each_part(n, [&](int64_t c, auto lanes) INLINE {
        const float* const from = m + t * lead_m + c;
        vf32 s[P][N];
#pragma GCC unroll 6
        for (int j = 0; j < P; ++j) {
          vf32 column[P];
#pragma GCC unroll 6
          for (int i = 0; i < P; ++i) column[i] = load(from + (P * i + j) * plane_m, lanes);
          sums<N>(column, s[j]);
        }
        const vf32 shift = e.shift(k + c, lanes);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
          vf32 row[P], r[N];
#pragma GCC unroll 6
          for (int j = 0; j < P; ++j) row[j] = s[j][i];
          sums<N>(row, r);
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) {
            poison = poison + r[j] * 0.0f;
            if (i >= height || j >= width) continue;
            vf32 value = r[j] + shift;
            if (more) value = value + load(more + i * a.other[1] + j * a.other[2] + c, lanes);
            store(to + i * a.y[1] + j * a.y[2] + c, limited(value, e.limits), lanes);
          }
        }
      });
    }
  }

  // results [k, k + n), whose transformed weights are u, of the tiles in v
  DICP_INLINE void multiply(int64_t count, int64_t n, const float* u) const {
    for (int i = 0; i < PLACES; ++i)
      for (int64_t c = 0; c < a.channels; c += DEPTH<N>)
        product(count, n, least(a.channels - c, DEPTH<N>), v + i * plane + c, lead, u + i * (a.channels * n + GAP) + c * n, n,
                m + i * plane_m, lead_m, c > 0);
  }
};

// The same where tiles are few: they are spread once, for all threads, and a thread transforms the weights of CHUNK
// channels and FEW_RESULTS results for itself, to meet them all. Those, half a megabyte, stay in its second-level cache;
// all of them, PxP/9 times as large as they are stored, would go through memory.
constexpr int64_t CHUNK = 128;
static_assert(CHUNK <= DEPTH<2> && CHUNK <= DEPTH<4>, "sums are of CHUNK channels at a time");
template <int N> constexpr int64_t TILES_AT_ONCE = N == 2 ? 288 : 128;
template <int N> constexpr int64_t FEW_RESULTS = N == 2 ? 64 : 32;

template <int N, class T>
inline int32_t winograd_few(const T* x, const T* w, const Added<T>& e, T* y, const Winograd& a, bool flipped,
                            Workspace space) {
  using Tiles = WinogradTiles<N, T>;
  const int64_t each = (a.results + space.threads - 1) / space.threads;  // results a thread
  const int64_t block = least((each + LANES - 1) / LANES * LANES, FEW_RESULTS<N>), apart = CHUNK * block + GAP;
  const Tiles like(a, block);
  float* const v = space.take(like.floats_v());
  const int64_t own = (Tiles::PLACES * apart + 15) / 16 * 16 + like.floats_m();
  float* const memory = space.take(space.threads * own);
  if (!memory) return 1;
  int32_t failed = 0, broken = 0;
#pragma omp parallel reduction(| : failed, broken) num_threads(space.threads)
  {
    Tiles tile = like;
    float* const u = memory + omp_get_thread_num() * own;
    tile.use(v, u + own - like.floats_m());
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tile.tiles; ++t)
      tile.spread(x, t, 1, a.channels, tile.v + t * tile.lead, tile.lead, tile.plane);
#pragma omp for schedule(dynamic)
    for (int64_t k = 0; k < a.results; k += block) {
      if (failed) continue;
      const int64_t n = least(a.results - k, block);
      try {
        for (int64_t c = 0; c < a.channels; c += CHUNK) {
          const int64_t some = least(a.channels - c, CHUNK);
          transform_weights<N>(a, w, k, n, c, c + some, flipped, u, apart);
          for (int i = 0; i < Tiles::PLACES; ++i)
            product(tile.tiles, n, some, tile.v + i * tile.plane + c, tile.lead, u + i * apart, n,
                    tile.m + i * tile.plane_m, tile.lead_m, c > 0);
        }
        tile.collect(0, tile.tiles, k, n, e, y);
      } catch (...) {
        failed = 1;
      }
    }
    broken |= !tile.finite();
  }
  return failed | broken << 1;
}

// y = conv(x, w) + bias + other, within limits. *finite: whether all was; else y is not to be used. Returns not 0 where
// memory is short or the micro-kernels raised.
template <int N, class T>
inline int32_t winograd(const T* x, const T* w, const Added<T>& e, T* y, const int64_t* sizes, bool flipped,
                        Workspace space, bool* finite) {
  using Tiles = WinogradTiles<N, T>;
  const Winograd& a = *(const Winograd*)sizes;
  const int64_t tiles = Tiles(a).tiles;
  if (!tiles) return 0;
  // blocks of tiles for more threads than have results of their own
  if (tiles <= TILES_AT_ONCE<N> && a.results >= space.threads * LANES) {
    const int32_t code = winograd_few<N>(x, w, e, y, a, flipped, space);
    *finite = !(code & 2);
    return code & 1;
  }
  const int64_t per_block = Tiles::PLACES * (a.channels * RESULT_BLOCK + GAP);
  const int64_t most = SLICE_BYTES / (per_block * (int64_t)sizeof(float)) * RESULT_BLOCK;
  const int64_t slice = least(a.results, most < SLICE_RESULTS ? SLICE_RESULTS : most);  // results, weights there at a time
  const int64_t groups = (slice + RESULT_BLOCK - 1) / RESULT_BLOCK;
  const Tiles like(a, groups, space.threads);
  float* const made = space.take(groups * per_block);
  float* const tiles_memory = space.take(space.threads * (like.floats_v() + like.floats_m()));
  if (!tiles_memory) return 1;
  const int64_t blocks = (like.tiles + like.block - 1) / like.block;
  // parts of the results, each with a transform of the input of its own, where blocks alone are too few
  int64_t parts = (4 * space.threads + blocks - 1) / blocks;
  if (parts > groups) parts = groups;
  // channels whose weights a thread transforms: all of them, where there are blocks for every thread
  const int64_t shares = (space.threads + groups - 1) / groups;
  const int64_t share = ((a.channels + shares - 1) / shares + LANES - 1) / LANES * LANES;
  int32_t failed = 0, broken = 0;
#pragma omp parallel reduction(| : failed, broken) num_threads(space.threads)
  {
    Tiles tile = like;
    float* const own = tiles_memory + omp_get_thread_num() * (like.floats_v() + like.floats_m());
    tile.use(own, own + like.floats_v());
    for (int64_t k0 = 0; k0 < a.results; k0 += slice) {
      const int64_t end = k0 + slice < a.results ? k0 + slice : a.results;
      const float* const weights = made - k0 / RESULT_BLOCK * per_block;
#pragma omp for collapse(2) schedule(static)
      for (int64_t k = k0; k < end; k += RESULT_BLOCK)
        for (int64_t c = 0; c < a.channels; c += share) {
          const int64_t n = least(end - k, RESULT_BLOCK), apart = a.channels * n + GAP;
          transform_weights<N>(a, w, k, n, c, least(a.channels, c + share), flipped,
                               made + (k - k0) / RESULT_BLOCK * per_block + c * n, apart);
        }
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t part = 0; part < parts; ++part) {
          if (failed) continue;
          const int64_t first = b * like.block, count = least(like.tiles - first, like.block);
          const int64_t of = (end - k0 + RESULT_BLOCK - 1) / RESULT_BLOCK;
          const int64_t from = k0 + part * of / parts * RESULT_BLOCK, to = k0 + (part + 1) * of / parts * RESULT_BLOCK;
          try {
            tile.spread(x, first, count, a.channels, tile.v, tile.lead, tile.plane);
            for (int64_t k = from; k < to && k < end; k += RESULT_BLOCK) {
              const int64_t n = least(end - k, RESULT_BLOCK);
              tile.multiply(count, n, weights + k / RESULT_BLOCK * per_block);
              tile.collect(first, count, k, n, e, y);
            }
          } catch (...) {
            failed = 1;
          }
        }
    }
    broken |= !tile.finite();
  }
  *finite = !broken;
  return failed;
}

}  // namespace dicp
