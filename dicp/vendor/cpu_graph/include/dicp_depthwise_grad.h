// Gradients of depthwise convolutions: each result is a sum over the window of its own channel, so vectors go along
// the channels, which are dense in images (`channels-last`). Sums are of float32; no element outside a window is read.
#pragma once
#include "dicp_depthwise.h"

namespace dicp {

// -- of the input ------------------------------------------------------------------------------------------

// One element of the window, and the result that it has made of a pixel.
template <class T> struct Contribution {
  const T* grad;
  const float* weight;
};

// What the pixel in `row` and `column` of an image has contributed to; the most are a.taps().
template <class T>
inline int64_t contributions(const Depthwise& a, const T* grad, const float* taps, int64_t row, int64_t column,
                             Contribution<T>* found) {
  int64_t n = 0;
  for (int64_t r = 0; r < a.window[0]; ++r) {
    const int64_t down = row + a.pad[0] - r * a.dilation[0], i = down / a.stride[0];
    if (down < 0 || i * a.stride[0] != down || i >= a.rows) continue;
    for (int64_t s = 0; s < a.window[1]; ++s) {
      const int64_t across = column + a.pad[1] - s * a.dilation[1], j = across / a.stride[1];
      if (across < 0 || j * a.stride[1] != across || j >= a.columns) continue;
      found[n++] = {grad + i * a.g[1] + j * a.g[2], taps + (r * a.window[1] + s) * a.channels};
    }
  }
  return n;
}

// x = the gradient of the image from that of the result. Returns not 0 where memory is short.
template <class T>
inline int32_t depthwise_input(const T* grad, const T* w, T* x, const int64_t* sizes, Workspace space) {
  const Depthwise& a = *(const Depthwise*)sizes;
  const int64_t per_thread = a.taps() * (int64_t)(sizeof(Contribution<T>) / sizeof(float));
  auto* const lists = (Contribution<T>*)space.take(space.threads * per_thread);
  float* const taps = space.take(a.taps() * a.channels);  // [row][column][channel]
  if (!taps) return 1;
#pragma omp parallel num_threads(space.threads)
  {
    Contribution<T>* const list = lists + omp_get_thread_num() * a.taps();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.taps(); ++t)
      for (int64_t c = 0; c < a.channels; ++c)
        taps[t * a.channels + c] =
            load(w + c * a.w[0] + t / a.window[1] * a.w[1] + t % a.window[1] * a.w[2], One());
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t row = 0; row < a.height; ++row)
        for (int64_t column = 0; column < a.width; ++column) {
          const int64_t n = contributions(a, grad + b * a.g[0], taps, row, column, list);
          T* const to = x + b * a.x[0] + row * a.x[1] + column * a.x[2];
          each_part(a.channels, [&](int64_t c, auto lanes) INLINE {
            vf32 sum = splat<vf32>(0.0f);
            for (int64_t k = 0; k < n; ++k)
              sum = fma(cast<vf32>(load(list[k].grad + c, lanes)), load(list[k].weight + c, lanes), sum);
            store(to + c, sum, lanes);
          });
        }
  }
  return 0;
}

// -- of the window -----------------------------------------------------------------------------------------

// Channels of a task: cache lines that hold several vectors are read once.
constexpr int64_t DEPTHWISE_CHANNELS = 64;
// Results of a row whose pixels overlap at a time: with the window's sums they fit in registers.
constexpr int64_t DEPTHWISE_COLUMNS = 4;

// sums[s] += image * gradient of `count` results from column j on, for `taps` elements of a row of the window whose
// first reads the row of pixels at `x` in column `first` for column 0. One vector of channels. near: neighbours share
// pixels, of which each is read once.
template <int taps, int count, bool near, class T, class N>
DICP_INLINE void correlate(const Depthwise& a, const T* x, const T* g, int64_t first, int64_t j, N lanes,
                           vf32 (&sums)[taps]) {
  vf32 grad[count];
#pragma GCC unroll 8
  for (int k = 0; k < count; ++k) grad[k] = cast<vf32>(load(g + (j + k) * a.g[2], lanes));
  const int64_t from = first + j * a.stride[1], step = near ? 1 : a.dilation[1];
#pragma GCC unroll 16
  for (int p = 0; p < count + taps - 1; ++p) {
    const int64_t column = from + p * step;
    if (column < 0 || column >= a.width) continue;
    const vf32 pixel = cast<vf32>(load(x + column * a.x[2], lanes));
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k)
      if (p - k >= 0 && p - k < taps) sums[p - k] = fma(pixel, grad[k], sums[p - k]);
  }
}

// Elements [s, s + taps) of a row of the window, over one row of results: added to total[s][DEPTHWISE_CHANNELS].
template <int taps, class T, class N>
DICP_INLINE void correlate_row(const Depthwise& a, const T* x, const T* g, int64_t s, N lanes, float* total) {
  vf32 sums[taps];
#pragma GCC unroll 8
  for (int k = 0; k < taps; ++k) sums[k] = splat<vf32>(0.0f);
  const int64_t first = s * a.dilation[1] - a.pad[1];
  int64_t j = 0;
  if (a.stride[1] == 1 && a.dilation[1] == 1)
    for (; j + DEPTHWISE_COLUMNS <= a.columns; j += DEPTHWISE_COLUMNS)
      correlate<taps, DEPTHWISE_COLUMNS, true>(a, x, g, first, j, lanes, sums);
  for (; j < a.columns; ++j) correlate<taps, 1, false>(a, x, g, first, j, lanes, sums);
#pragma GCC unroll 8
  for (int k = 0; k < taps; ++k) {
    float* const to = total + (s + k) * DEPTHWISE_CHANNELS;
    store(to, load(to, Full()) + sums[k], Full());
  }
}

// The sums of `channels` channels over rows [from, to) of all images' results: total[taps][DEPTHWISE_CHANNELS].
template <class T>
inline void correlate_rows(const Depthwise& a, const T* x, const T* g, int64_t from, int64_t to, int64_t channels,
                           float* total) {
  for (int64_t k = 0; k < a.taps() * DEPTHWISE_CHANNELS; ++k) total[k] = 0.0f;
  for (int64_t at = from; at < to; ++at) {
    const int64_t image = at / a.rows, i = at % a.rows;
    for (int64_t r = 0; r < a.window[0]; ++r) {
      const int64_t row = i * a.stride[0] + r * a.dilation[0] - a.pad[0];
      if (row < 0 || row >= a.height) continue;
      const T* const pixels = x + image * a.x[0] + row * a.x[1];
      const T* const grads = g + image * a.g[0] + i * a.g[1];
      each_part(channels, [&](int64_t c, auto lanes) INLINE {
        float* const sums = total + r * a.window[1] * DEPTHWISE_CHANNELS + c;
        int64_t s = 0;
        constexpr bool whole = same<decltype(lanes), Full>;
        if constexpr (whole) {
          for (; s + 7 <= a.window[1]; s += 7) correlate_row<7>(a, pixels + c, grads + c, s, lanes, sums);
          for (; s + 5 <= a.window[1]; s += 5) correlate_row<5>(a, pixels + c, grads + c, s, lanes, sums);
          for (; s + 3 <= a.window[1]; s += 3) correlate_row<3>(a, pixels + c, grads + c, s, lanes, sums);
        }
        for (; s < a.window[1]; ++s) correlate_row<1>(a, pixels + c, grads + c, s, lanes, sums);
      });
    }
  }
}

// w = the gradient of the window from that of the result. Returns not 0 where memory is short.
template <class T>
inline int32_t depthwise_window(const T* x, const T* grad, T* w, const int64_t* sizes, Workspace space) {
  const Depthwise& a = *(const Depthwise*)sizes;
  const int64_t groups = (a.channels + DEPTHWISE_CHANNELS - 1) / DEPTHWISE_CHANNELS, rows = a.batch * a.rows;
  // parts of the rows, each with sums of its own, which are added in one order
  int64_t parts = 2 * space.threads;
  if (parts > rows) parts = rows > 0 ? rows : 1;
  const int64_t size = a.taps() * DEPTHWISE_CHANNELS;
  float* const sums = space.take(parts * groups * size);
  if (!sums) return 1;
#pragma omp parallel num_threads(space.threads)
  {
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t c = group * DEPTHWISE_CHANNELS, rest = a.channels - c;
        correlate_rows(a, x + c, grad + c, rows * part / parts, rows * (part + 1) / parts,
                       rest < DEPTHWISE_CHANNELS ? rest : DEPTHWISE_CHANNELS, sums + (part * groups + group) * size);
      }
#pragma omp for schedule(static)
    for (int64_t c = 0; c < a.channels; ++c)
      for (int64_t t = 0; t < a.taps(); ++t) {
        const float* const from =
            sums + c / DEPTHWISE_CHANNELS * size + t * DEPTHWISE_CHANNELS + c % DEPTHWISE_CHANNELS;
        float sum = from[0];
        for (int64_t part = 1; part < parts; ++part) sum += from[part * groups * size];
        store(w + c * a.w[0] + t / a.window[1] * a.w[1] + t % a.window[1] * a.w[2], sum, One());
      }
  }
  return 0;
}

}  // namespace dicp
