// Depthwise convolutions without a stride: each result is a sum over the window of its own channel, so vectors go along
// the channels, which are dense in images (`channels-last`). Sums are of float32; no element outside a window is read.
#pragma once
#include "dicp_product.h"

namespace dicp {

// Sizes, and strides in elements. The image is the convolution's input, of [batch, channels, height, width]. Without a
// stride, as here, `stride` and `dilation` are 1; pad may be negative, as for gradients of what was padded widely.
struct Depthwise {
  int64_t batch, channels, height, width, rows, columns;
  int64_t window[2], stride[2], pad[2], dilation[2];  // of rows, of columns
  int64_t x[3], g[3];                                 // of the image and the result: per image, row, column
  int64_t w[3];                                       // of the window: per channel, row, column
  int64_t other[3];                                   // of what is added: per image, row, column

  int64_t taps() const { return window[0] * window[1]; }
};

// What follows the sums: act(sum + bias + other). wide: a float32 bias of images in a low precision.
template <class T> struct Addends {
  const T* bias;
  const float* wide;
  const T* other;
  Limits limits;
};

// Results of a row at a time: with a row of the window and a pixel they fit in registers.
constexpr int WIDE = LANES == 16 ? 14 : 6;
template <int n> struct Columns { static constexpr int count = n; };
// Elements of the window before the next ones are loaded.
constexpr int MOST_TAPS = 7;
// Bytes of weights that stay in the first-level cache beside the pixels, and the channels that share cache lines.
constexpr int64_t TAP_BYTES = 28 << 10, TOGETHER = 32;

// The channels in groups whose weights, as float32 [tap][channel] and the bias behind them, fit in TAP_BYTES.
struct ChannelGroups {
  int64_t channels, units, count, pitch;
  explicit ChannelGroups(const Depthwise& a) : channels(a.channels) {
    units = channels < TOGETHER ? 1 : channels / TOGETHER;
    count = least((4 * channels * a.taps() + TAP_BYTES - 1) / TAP_BYTES, units);
    pitch = ((units + count - 1) / count + 1) * TOGETHER;
  }
  int64_t begin(int64_t group) const { return group == count ? channels : units * group / count * TOGETHER; }
};

// Weights of the channels [from, from + n) to taps[tap][pitch], and the bias.
template <class T>
inline void bring_taps(const Depthwise& a, const T* w, const Addends<T>& e, int64_t from, int64_t n, float* taps,
                       int64_t pitch) {
  const int64_t count = a.taps(), step = a.w[2];
  const T* const corner = w + from * a.w[0];
  if ((step == 1 || step == -1) && a.w[1] == step * a.window[1]) {  // the window as it lies, or turned by 180 degrees
    const int64_t last = step < 0 ? count - 1 : 0;
    bring(corner - last, 1, a.w[0], count, n, taps + last * pitch, step * pitch);
  } else {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < n; ++c)
        taps[t * pitch + c] = load(corner + c * a.w[0] + t / a.window[1] * a.w[1] + t % a.window[1] * step, One());
  }
  float* const bias = taps + count * pitch;
  for (int64_t c = 0; c < n; ++c)
    bias[c] = e.bias ? load(e.bias + from + c, One()) : e.wide ? e.wide[from + c] : 0.0f;
}

// sums[k] += the products of `taps` elements of a row of the window with pixels from column `from` + k on. Neighbours
// share pixels, of which each is read once.
template <int taps, int count, class T>
DICP_INLINE void slide(const Depthwise& a, const T* x, const float* w, int64_t pitch, int64_t from,
                       vf32 (&sums)[count]) {
  vf32 weight[taps];
#pragma GCC unroll 8
  for (int s = 0; s < taps; ++s) weight[s] = load(w + s * pitch, Full());
#pragma GCC unroll 32
  for (int p = 0; p < count + taps - 1; ++p) {
    const int64_t column = from + p;
    if (column < 0 || column >= a.width) continue;
    const vf32 pixel = cast<vf32>(load(x + column * a.x[2], Full()));
#pragma GCC unroll 32
    for (int k = 0; k < count; ++k)
      if (p - k >= 0 && p - k < taps) sums[k] = fma(pixel, weight[p - k], sums[k]);
  }
}

// `count` results of row i from column j on, of one vector of channels, at which the pointers begin. window: its
// columns, or 0 where they are more than MOST_TAPS.
template <Activation act, int window, int count, class T>
DICP_INLINE void results(const Depthwise& a, const T* x, const float* taps, int64_t pitch, const T* other,
                         Limits limits, T* y, int64_t i, int64_t j) {
  vf32 sums[count];
#pragma GCC unroll 32
  for (int k = 0; k < count; ++k) sums[k] = load(taps + a.taps() * pitch, Full());
  for (int64_t r = 0; r < a.window[0]; ++r) {
    const int64_t row = i + r - a.pad[0];
    if (row < 0 || row >= a.height) continue;
    const T* const pixels = x + row * a.x[1];
    const float* const w = taps + r * a.window[1] * pitch;
    const int64_t from = j - a.pad[1];
    if constexpr (window > 0) {
      slide<window, count>(a, pixels, w, pitch, from, sums);
    } else {
      int64_t s = 0;
      for (; s + MOST_TAPS <= a.window[1]; s += MOST_TAPS)
        slide<MOST_TAPS, count>(a, pixels, w + s * pitch, pitch, from + s, sums);
      for (; s < a.window[1]; ++s) slide<1, count>(a, pixels, w + s * pitch, pitch, from + s, sums);
    }
  }
#pragma GCC unroll 32
  for (int k = 0; k < count; ++k) {
    if (other) sums[k] = sums[k] + cast<vf32>(load(other + (j + k) * a.other[2], Full()));
    store(y + (j + k) * a.g[2], activate<act>(sums[k], limits), Full());
  }
}

// The same of all n channels. A last vector begins earlier where it would reach beyond them, and so do the columns:
// some results are then computed twice.
template <Activation act, int window, int count, class T>
DICP_INLINE int64_t columns_from(const Depthwise& a, const T* x, const float* taps, int64_t pitch, const T* other,
                                 Limits limits, T* y, int64_t i, int64_t j, int64_t n) {
  if (j + count > a.columns) j = a.columns - count;
  for (int64_t k = 0; k < n; k += LANES) {
    const int64_t c = least(k, n - LANES);
    results<act, window, count>(a, x + c, taps + c, pitch, other ? other + c : other, limits, y + c, i, j);
  }
  return j + count;
}

// y = act(conv(x, w) + bias + other), of LANES channels at the least, stride and dilation 1; y is not `other`. Returns
// not 0 where memory is short.
template <Activation act, int window, class T>
inline int32_t depthwise(const T* x, const T* w, const Addends<T>& e, T* y, const int64_t* sizes, Workspace space) {
  const Depthwise& a = *(const Depthwise*)sizes;
  const ChannelGroups groups(a);
  const int64_t size = (a.taps() + 1) * groups.pitch;
  const bool few = a.batch * a.rows * a.columns * a.channels * a.taps() <= SMALL_PRODUCT;
  const int64_t threads = few ? 1 : space.threads;
  float* const memory = space.take(threads * size);
  if (!memory) return 1;
  const int64_t rows = a.batch * a.rows, all = groups.count * rows;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t part = 0; part < threads; ++part) {
    float* const taps = memory + part * size;
    int64_t brought = -1;
    for (int64_t at = all * part / threads; at < all * (part + 1) / threads; ++at) {
      const int64_t group = at / rows, image = at % rows / a.rows, i = at % a.rows;
      const int64_t from = groups.begin(group), n = groups.begin(group + 1) - from;
      if (group != brought) bring_taps(a, w, e, from, n, taps, groups.pitch);
      brought = group;
      const T* const pixels = x + image * a.x[0] + from;
      const T* const other = e.other ? e.other + image * a.other[0] + i * a.other[1] + from : nullptr;
      T* const to = y + image * a.g[0] + i * a.g[1] + from;
      auto next = [&](int64_t j, auto of) INLINE {
        constexpr int count = decltype(of)::count;
        return columns_from<act, window, count>(a, pixels, taps, groups.pitch, other, e.limits, to, i, j, n);
      };
      for (int64_t j = 0; j < a.columns;) {
        if (a.columns >= WIDE && a.columns - j > WIDE / 2) j = next(j, Columns<WIDE>());
        else if (a.columns >= WIDE / 2) j = next(j, Columns<WIDE / 2>());
        else j = next(j, Columns<1>());
      }
    }
  }
  return 0;
}

}  // namespace dicp
