// The gradient of a 3x3 window by the adjoint of Winograd's F(2x2, 3x3) (dicp_winograd.h):
//
//   dW = G^T [ sum over tiles of (A dY A^T) * (B^T X B) ] G
//
// Each place of the 4x4 is a matrix product [results, tiles] x [tiles, channels].
#pragma once
#include "dicp_winograd.h"

namespace dicp {

// The image is the first convolution's, `rows` and `columns` those of its result; y: strides of the result's gradient,
// w: of the window's.
// A thread's sums of a block (512 KB), and 48 tiles of both images for it. Measured on Zen 4, GF/s of 128 channels and
// results, 28x28: 64 x 64 x 64 263, 64 x 128 x 64 318, 64 x 128 x 48 373, 128 x 128 x 64 226.
constexpr int64_t GRAD_RESULTS = 64, GRAD_CHANNELS = 128, GRAD_TILES = 48;

// The workspace of one thread, and the work on one block of results and channels.
struct WindowGradient {
  const Winograd& a;
  WinogradTiles<2, float> tile;
  static constexpr int64_t plane_x = GRAD_TILES * GRAD_CHANNELS + 16, plane_y = GRAD_RESULTS * (GRAD_TILES + 16) + 16,
                           lead_y = GRAD_TILES + 16, plane_sum = GRAD_RESULTS * GRAD_CHANNELS + 16;
  float *x = nullptr, *y, *sums, *corner, *zeros;  // [16][tiles][channels], [16][results][tiles], [16][results][channels]
  vf32 poison = splat<vf32>(0.0f);

  explicit WindowGradient(const Winograd& of) : a(of), tile(of, 1, 1) {}
  int64_t floats() const {
    return (16 * (plane_x + plane_y + plane_sum) + 16 * LANES * LANES + a.channels + a.results + 15) / 16 * 16;
  }
  void use(float* memory) {
    x = memory, y = x + 16 * plane_x, sums = y + 16 * plane_y, corner = sums + 16 * plane_sum;
    zeros = corner + 16 * LANES * LANES;
    for (int64_t c = 0; c < a.channels + a.results; ++c) zeros[c] = 0.0f;
    tile.zeros = zeros;
  }
  bool finite() const { return hsum(poison) == 0.0f; }

  // A of two values
  static DICP_INLINE void widen(vf32 first, vf32 second, vf32 (&to)[4]) {
    to[0] = first, to[1] = first + second, to[2] = first - second, to[3] = splat<vf32>(0.0f) - second;
  }

  // tiles [first, first + count) of the result's gradient, results [k, k + n) -> y, turned so that tiles are dense
  void turn(const float* grad, int64_t first, int64_t count, int64_t k, int64_t n) {
    for (int64_t t0 = 0; t0 < count; t0 += LANES)
      for (int64_t r = 0; r < n; r += LANES) {
        const Lanes lanes = lanes_left(n - r);
        for (int64_t t = 0; t < LANES; ++t) {
          vf32 g[2][2] = {}, rows[2][4], both[4];
          if (t0 + t < count) {
            const auto p = tile.place(first + t0 + t);
            const float* const from = grad + p.image * a.y[0] + p.row * a.y[1] + p.column * a.y[2] + k + r;
            for (int i = 0; i < 2; ++i)
              for (int j = 0; j < 2; ++j)
                if (p.row + i < a.rows && p.column + j < a.columns) g[i][j] = load(from + i * a.y[1] + j * a.y[2], lanes);
          }
          widen(g[0][0], g[0][1], rows[0]), widen(g[1][0], g[1][1], rows[1]);
          for (int j = 0; j < 4; ++j) {
            widen(rows[0][j], rows[1][j], both);
            for (int i = 0; i < 4; ++i) store(corner + ((4 * i + j) * LANES + t) * LANES, both[i], Full());
          }
        }
        for (int i = 0; i < 16; ++i) {
          vf32 square[LANES];
          for (int t = 0; t < LANES; ++t) square[t] = load(corner + (i * LANES + t) * LANES, Full());
          transpose(square);
          for (int64_t q = 0; q < LANES && r + q < n; ++q)
            store(y + i * plane_y + (r + q) * lead_y + t0, square[q], Full());
        }
      }
  }

  // results [k, k + n) and channels [c, c + m) of tiles [first, end) -> sum, [16][results][channels]
  void accumulate(const float* image, const float* grad, int64_t first, int64_t end, int64_t k, int64_t n, int64_t c,
                  int64_t m, float* sum) {
    if (first == end) __builtin_memset(sum, 0, sizeof(float) * 16 * plane_sum);  // of an empty batch
    for (int64_t t = first; t < end; t += GRAD_TILES) {
      const int64_t count = end - t < GRAD_TILES ? end - t : GRAD_TILES;
      tile.spread(image + c, t, count, m, x, GRAD_CHANNELS, plane_x);
      turn(grad, t, count, k, n);
      for (int i = 0; i < 16; ++i)
        product(n, m, count, y + i * plane_y, lead_y, x + i * plane_x, GRAD_CHANNELS, sum + i * plane_sum, GRAD_CHANNELS,
                t > first);
    }
  }

  // G^T of four values
  static DICP_INLINE void narrow(const vf32 (&v)[4], vf32 (&to)[3]) {
    const vf32 sum = (v[1] + v[2]) * 0.5f;
    to[0] = v[0] + sum, to[1] = (v[1] - v[2]) * 0.5f, to[2] = sum + v[3];
  }

  // the sums of `parts`, `apart` from each other -> gradient of results [k, k + n), channels [c, c + m)
  void finish(const float* sum, int64_t parts, int64_t apart, int64_t k, int64_t n, int64_t c, int64_t m, float* window) {
    for (int64_t r = 0; r < n; ++r)
      each_part(m, [&](int64_t q, auto lanes) {
        vf32 s[4][4], rows[4][3], both[3];
        for (int i = 0; i < 16; ++i) {
          const float* const from = sum + i * plane_sum + r * GRAD_CHANNELS + q;
          s[i / 4][i % 4] = load(from, lanes);
          for (int64_t p = 1; p < parts; ++p) s[i / 4][i % 4] = s[i / 4][i % 4] + load(from + p * apart, lanes);
        }
        for (int i = 0; i < 4; ++i) narrow(s[i], rows[i]);
        float* const to = window + (k + r) * a.w[0] + (c + q) * a.w[1];
        for (int j = 0; j < 3; ++j) {
          narrow({rows[0][j], rows[1][j], rows[2][j], rows[3][j]}, both);
          poison = poison + (both[0] + both[1] + both[2]) * 0.0f;
          for (int i = 0; i < 3; ++i) {
            float* const at = to + i * a.w[2] + j * a.w[3];
            if (a.w[1] == 1) store(at, both[i], lanes);
            else store_strided(at, a.w[1], both[i], lanes);
          }
        }
      });
  }
};

// window = the gradient of conv(image, window) from that of its result; *finite as for the convolution.
inline int32_t winograd_window(const float* image, const float* grad, float* window, const int64_t* sizes,
                               Workspace space, bool* finite) {
  const Winograd& a = *(const Winograd*)sizes;
  const WindowGradient like(a);
  const int64_t tiles = like.tile.tiles, pair = 16 * WindowGradient::plane_sum;
  const int64_t across = (a.channels + GRAD_CHANNELS - 1) / GRAD_CHANNELS;
  const int64_t pairs = (a.results + GRAD_RESULTS - 1) / GRAD_RESULTS * across;
  // parts of the tiles where blocks are too few for all threads: each has sums of its own, added in one order
  int64_t parts = (2 * space.threads + pairs - 1) / pairs;
  if (parts > tiles / GRAD_TILES) parts = tiles < GRAD_TILES ? 1 : tiles / GRAD_TILES;
  float* const own = space.take(space.threads * like.floats());
  float* const shared = parts > 1 ? space.take(parts * pairs * pair) : nullptr;
  if (!own || (parts > 1 && !shared)) return 1;
  int32_t failed = 0, broken = 0;
#pragma omp parallel reduction(| : failed, broken) num_threads(space.threads)
  {
    WindowGradient work(a);
    work.use(own + omp_get_thread_num() * like.floats());
    const auto block = [&](int64_t which, auto f) {
      const int64_t k = which / across * GRAD_RESULTS, c = which % across * GRAD_CHANNELS;
      f(k, a.results - k < GRAD_RESULTS ? a.results - k : GRAD_RESULTS, c,
        a.channels - c < GRAD_CHANNELS ? a.channels - c : GRAD_CHANNELS);
    };
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t which = 0; which < pairs; ++which)
      for (int64_t part = 0; part < parts; ++part) {
        if (failed) continue;
        float* const sum = shared ? shared + (part * pairs + which) * pair : work.sums;
        block(which, [&](int64_t k, int64_t n, int64_t c, int64_t m) {
          try {
            work.accumulate(image, grad, tiles * part / parts, tiles * (part + 1) / parts, k, n, c, m, sum);
          } catch (...) {
            failed = 1;
            return;
          }
          if (!shared) work.finish(sum, 1, 0, k, n, c, m, window);
        });
      }
    if (shared) {
#pragma omp for schedule(static)
      for (int64_t which = 0; which < pairs; ++which)
        block(which, [&](int64_t k, int64_t n, int64_t c, int64_t m) {
          if (!failed) work.finish(shared + which * pair, parts, pairs * pair, k, n, c, m, window);
        });
    }
    broken |= !work.finite();
  }
  *finite = !broken;
  return failed;
}

}  // namespace dicp
