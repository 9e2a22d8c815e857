// Convolutions with a 3x3 window and stride 1 by fewer multiplications: F(2x2, 3x3) of Winograd (Lavin and Gray 2016).
//
//   Y = A^T [ sum over channels of (G g G^T) * (B^T d B) ] A       d: 4x4 of the input, g: the window, Y: 2x2 results
//
// 16 products a tile where the sum itself has 36. Each place of the 4x4 is a matrix product [tiles, channels] x
// [channels, results], by oneDNN's micro-kernels. A result depends on no element outside its own window; but inf - inf
// is NaN, and a sum may overflow, so the caller is told when something was not finite.
#pragma once
#include "dicp_brgemm.h"

namespace dicp {

// Sizes, and strides in elements; channels and results are dense in images (`channels-last`).
struct Winograd {
  int64_t batch, channels, height, width, results, rows, columns, pad_rows, pad_columns;
  int64_t x[3], y[3], other[3];  // per batch, row, column
  int64_t w[4];                  // per result, channel, row, column of the window
};

// Tiles and results of a block: a thread's 16 products [64, channels] x [channels, 64] at a time read 256 bytes of
// transformed weights for 64 tiles each. Transformed weights lie as [block][16][channels][results of the block].
constexpr int64_t TILE_BLOCK = 64, RESULT_BLOCK = 64;
// Channels that are summed before the sum is rounded into memory: it errs as a sum of 128 does, not one of all.
constexpr int64_t DEPTH = 128;
// Transformed weights at a time, where they are not given: what caches hold, but 128 results at the least.
constexpr int64_t SLICE_BYTES = 4 << 20, SLICE_RESULTS = 128;

// -- weights -----------------------------------------------------------------------------------------------

// The windows of up to LANES results and LANES channels as window[channel][9][result], absent results 0.
inline void read_windows(const Winograd& a, const float* w, int64_t results, int64_t channels,
                         float (*window)[9 * LANES]) {
  const bool dense = a.w[1] == 9 && a.w[2] == 3 && a.w[3] == 1;
  if (!dense && a.w[1] != 1) {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < LANES; ++k)
        for (int r = 0; r < 9; ++r)
          window[c][r * LANES + k] =
              k < results ? w[k * a.w[0] + c * a.w[1] + r / 3 * a.w[2] + r % 3 * a.w[3]] : 0.0f;
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

// G v: of three values the four of the transformed window
DICP_INLINE void widen(const vf32 (&v)[3], vf32 (&to)[4]) {
  const vf32 even = (v[0] + v[2]) * 0.5f, odd = v[1] * 0.5f;
  to[0] = v[0], to[1] = even + odd, to[2] = even - odd, to[3] = v[2];
}

// Transformed weights of the `block` results from `first` on, channels [from, to); flipped: of windows turned by 180
// degrees, as the gradient of the input has them.
inline void transform_weights(const Winograd& a, const float* w, int64_t first, int64_t block, int64_t from, int64_t to,
                              bool flipped, float* u) {
  float window[LANES][9 * LANES];
  for (int64_t k = 0; k < block; k += LANES)
    for (int64_t c0 = from; c0 < to; c0 += LANES) {
      const int64_t results = block - k < LANES ? block - k : LANES;
      const int64_t channels = to - c0 < LANES ? to - c0 : LANES;
      read_windows(a, w + (first + k) * a.w[0] + c0 * a.w[1], results, channels, window);
      for (int64_t c = 0; c < channels; ++c) {
        vf32 rows[3][4], both[4][4];
        for (int i = 0; i < 3; ++i) {
          const float* g = window[c] + 3 * i * LANES;
          widen({load(g, Full()), load(g + LANES, Full()), load(g + 2 * LANES, Full())}, rows[i]);
        }
        for (int j = 0; j < 4; ++j) widen({rows[0][j], rows[1][j], rows[2][j]}, both[j]);
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j) {
            const int row = flipped && i % 3 == 0 ? 3 - i : i, column = flipped && j % 3 == 0 ? 3 - j : j;
            store(u + ((4 * row + column) * a.channels + c0 + c) * block + k, both[j][i], lanes_left(results));
          }
      }
    }
}

// -- images ------------------------------------------------------------------------------------------------

// The workspace of one thread, and the work on one block of tiles.
struct WinogradTiles {
  const Winograd& a;
  int64_t down, across, tiles, block;         // tiles of an image, of all, of a block
  int64_t lead, plane, lead_m, plane_m;       // elements of a row and of a place in v and m
  float *v = nullptr, *m, *zeros;             // [16][block][channels], [16][block][results of a block], [channels]
  vf32 poison = splat<vf32>(0.0f);            // 0 as long as all was finite

  // groups: blocks of results that are there at a time
  WinogradTiles(const Winograd& of, int64_t groups, int64_t threads) : a(of) {
    down = (a.rows + 1) / 2, across = (a.columns + 1) / 2, tiles = a.batch * down * across;
    block = tiles < TILE_BLOCK ? tiles : TILE_BLOCK;
    while (block > 16 && (tiles + block - 1) / block * groups < 2 * threads) block = (block + 1) / 2;
    // planes are an odd number of cache lines apart: powers of two would share few sets of the cache
    lead = (a.channels + 15) / 16 * 16 + 16, plane = (block * lead / 16 | 1) * 16;
    lead_m = RESULT_BLOCK, plane_m = block * lead_m + 16;
  }
  int64_t floats() const { return (16 * (plane + plane_m) + lead + 15) / 16 * 16; }
  void use(float* memory) {
    v = memory, m = v + 16 * plane, zeros = m + 16 * plane_m;
    for (int64_t c = 0; c < lead; ++c) zeros[c] = 0.0f;
  }
  bool finite() const { return hsum(poison) == 0.0f; }

  struct Place { int64_t image, row, column; };  // of a tile's first result
  DICP_INLINE Place place(int64_t tile) const {
    const int64_t image = tile / (down * across), rest = tile - image * down * across;
    return {image, rest / across * 2, rest % across * 2};
  }

  // the 16 pixels under a tile; zeros beyond the edges
  DICP_INLINE void pixels(const float* x, int64_t tile, const float* (&from)[16]) const {
    const Place p = place(tile);
    const float* const image = x + p.image * a.x[0];
    for (int i = 0; i < 4; ++i) {
      const int64_t row = p.row + i - a.pad_rows;
      for (int j = 0; j < 4; ++j) {
        const int64_t column = p.column + j - a.pad_columns;
        const bool inside = row >= 0 && row < a.height && column >= 0 && column < a.width;
        from[4 * i + j] = inside ? image + row * a.x[1] + column * a.x[2] : zeros;
      }
    }
  }

  // B^T of a column
  static DICP_INLINE void differences(vf32& a, vf32& b, vf32& c, vf32& d) {
    const vf32 first = a - c, sum = b + c, back = c - b, last = b - d;
    a = first, b = sum, c = back, d = last;
  }

  // `channels` of tiles [first, first + count) -> v, [16][count][channels]
  void spread(const float* x, int64_t first, int64_t count, int64_t channels, float* v, int64_t lead, int64_t plane) const {
    for (int64_t t = 0; t < count; ++t) {
      const float* from[16];
      pixels(x, first + t, from);
      each_part(channels, [&](int64_t c, auto lanes) {
        vf32 d[4][4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) d[i / 4][i % 4] = load(from[i] + c, lanes);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) differences(d[0][j], d[1][j], d[2][j], d[3][j]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) differences(d[i][0], d[i][1], d[i][2], d[i][3]);
        float* const to = v + t * lead + c;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store(to + i * plane, d[i / 4][i % 4], lanes);
      });
    }
  }

  // A^T of a column
  static DICP_INLINE void sums(vf32 a, vf32 b, vf32 c, vf32 d, vf32& first, vf32& second) {
    first = a + b + c, second = b - c - d;
  }

  // m -> results [k, k + n) of tiles [first, first + count)
  void collect(int64_t first, int64_t count, int64_t k, int64_t n, const float* bias, const float* other, float* y) {
    for (int64_t t = 0; t < count; ++t) {
      const Place p = place(first + t);
      float* const to = y + p.image * a.y[0] + p.row * a.y[1] + p.column * a.y[2] + k;
      const float* const more = other ? other + p.image * a.other[0] + p.row * a.other[1] + p.column * a.other[2] + k
                                      : nullptr;
      const int height = p.row + 1 < a.rows ? 2 : 1, width = p.column + 1 < a.columns ? 2 : 1;
      each_part(n, [&](int64_t c, auto lanes) {
        const float* const from = m + t * lead_m + c;
        vf32 s[2][4], r[2][2];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          sums(load(from + j * plane_m, lanes), load(from + (4 + j) * plane_m, lanes),
               load(from + (8 + j) * plane_m, lanes), load(from + (12 + j) * plane_m, lanes), s[0][j], s[1][j]);
        sums(s[0][0], s[0][1], s[0][2], s[0][3], r[0][0], r[0][1]);
        sums(s[1][0], s[1][1], s[1][2], s[1][3], r[1][0], r[1][1]);
        poison = poison + ((r[0][0] + r[0][1]) + (r[1][0] + r[1][1])) * 0.0f;
        const vf32 shift = bias ? load(bias + k + c, lanes) : splat<vf32>(0.0f);
        for (int i = 0; i < height; ++i)
          for (int j = 0; j < width; ++j) {
            vf32 value = r[i][j] + shift;
            if (more) value = value + load(more + i * a.other[1] + j * a.other[2] + c, lanes);
            store(to + i * a.y[1] + j * a.y[2] + c, value, lanes);
          }
      });
    }
  }

  // results [k, k + n), whose transformed weights are u, of the tiles in v
  DICP_INLINE void multiply(int64_t count, int64_t n, const float* u) const {
    for (int i = 0; i < 16; ++i)
      for (int64_t c = 0; c < a.channels; c += DEPTH)
        product(count, n, a.channels - c < DEPTH ? a.channels - c : DEPTH, v + i * plane + c, lead,
                u + (i * a.channels + c) * n, n, m + i * plane_m, lead_m, c > 0);
  }
};

// y = conv(x, w) + bias + other; u: transformed weights, or null; bias and other may be null. *finite: whether all
// was; else y is not to be used. Returns not 0 where memory is short or the micro-kernels raised.
inline int32_t winograd(const float* x, const float* w, const float* u, const float* bias, const float* other, float* y,
                        const int64_t* sizes, bool flipped, Workspace space, bool* finite) {
  const Winograd& a = *(const Winograd*)sizes;
  const int64_t per_result = 16 * a.channels;
  int64_t slice = a.results;  // results whose weights are there at a time
  float* made = nullptr;
  if (!u) {
    int64_t most = SLICE_BYTES / (per_result * (int64_t)sizeof(float)) / RESULT_BLOCK * RESULT_BLOCK;
    if (most < SLICE_RESULTS) most = SLICE_RESULTS;
    if (slice > most) slice = most;
    made = space.take(slice * per_result);
  }
  const int64_t groups = (slice + RESULT_BLOCK - 1) / RESULT_BLOCK;
  const WinogradTiles like(a, groups, space.threads);
  float* const tiles_memory = space.take(space.threads * like.floats());
  if (!tiles_memory || (!u && !made)) return 1;
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
    WinogradTiles tile = like;
    tile.use(tiles_memory + omp_get_thread_num() * like.floats());
    for (int64_t k0 = 0; k0 < a.results; k0 += slice) {
      const int64_t end = k0 + slice < a.results ? k0 + slice : a.results;
      const float* const weights = u ? u : made - k0 * per_result;
      if (!u) {
#pragma omp for collapse(2) schedule(static)
        for (int64_t k = k0; k < end; k += RESULT_BLOCK)
          for (int64_t c = 0; c < a.channels; c += share)
            transform_weights(a, w, k, end - k < RESULT_BLOCK ? end - k : RESULT_BLOCK, c,
                              a.channels - c < share ? a.channels : c + share, flipped, made + (k - k0) * per_result);
      }
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t part = 0; part < parts; ++part) {
          if (failed) continue;
          const int64_t first = b * like.block, rest = like.tiles - first, count = rest < like.block ? rest : like.block;
          const int64_t of = (end - k0 + RESULT_BLOCK - 1) / RESULT_BLOCK;
          const int64_t from = k0 + part * of / parts * RESULT_BLOCK, to = k0 + (part + 1) * of / parts * RESULT_BLOCK;
          try {
            tile.spread(x, first, count, a.channels, tile.v, tile.lead, tile.plane);
            for (int64_t k = from; k < to && k < end; k += RESULT_BLOCK) {
              const int64_t n = end - k < RESULT_BLOCK ? end - k : RESULT_BLOCK;
              tile.multiply(count, n, weights + k * per_result);
              tile.collect(first, count, k, n, bias, other, y);
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
