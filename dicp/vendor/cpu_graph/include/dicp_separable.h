// A convolution, a depthwise one and a pointwise one, y = project(second(slide(first(conv(x))))) + other: inverted
// residuals, whose first is pointwise too, and what networks of such begin with. The middle, which is wide, never
// leaves the caches: some channels of a band of rows are made, slid over, and multiplied by their part of the projection.
// Images are channels-last.
#pragma once
#include "dicp_brgemm.h"
#include "dicp_product.h"

namespace dicp {

// Sizes, and strides in elements per image, row and column. The middle is what is between the first two.
struct Separable {
  int64_t batch, channels, height, width;              // of x
  int64_t window[2], stride[2], pad[2];                // of the first
  int64_t hidden, middle_height, middle_width, border[2], step;  // step: from window to window
  int64_t results, rows, columns;                      // of y
  int64_t x[3], y[3], other[3];

  bool pointwise() const { return window[0] * window[1] * stride[0] * stride[1] == 1 && !pad[0] && !pad[1]; }
  int64_t depth() const { return window[0] * window[1] * channels; }  // of the first, as a product
};

// Elements of the middle in a band, which stay in the second-level cache; pixels that a product makes at a time.
constexpr int64_t BAND = 1 << 16, PIXELS = 96;
// Pixels of a row that a window slides over at a time: with a row of the window their sums fit in registers.
constexpr int NEIGHBOURS = 7;
// Channels of the middle at a time, and where else a band of all rows had too many elements.
constexpr int64_t CHUNK = 64, CHUNK_TALL = 32;

DICP_INLINE int64_t whole(int64_t a, int64_t b) { return (a + b - 1) / b; }
DICP_INLINE int64_t padded(int64_t n) { return whole(n, 16) * 16; }  // whole cache lines of float32
DICP_INLINE void clear(float* to, int64_t n) {
  for (int64_t k = 0; k < n; k += LANES) store(to + k, splat<vf32>(0.0f), Full());
}

// How the work is cut: `images` images of `rows` rows of y to a band. The middle has a border, which is zero.
template <int taps> struct Bands {
  int64_t stride, chunk, chunks, results, wide, images = 1, rows, parts;
  Bands(const Separable& g, int64_t threads) : stride(g.step) {
    const int64_t image = g.middle_width + g.border[1], windows = (g.columns - 1) * stride + taps;
    wide = image > windows ? image : windows;
    chunk = least(wide * tall(g.rows) * CHUNK > BAND ? CHUNK_TALL : CHUNK, padded(g.hidden));
    chunks = whole(g.hidden, chunk), results = padded(g.results);
    const int64_t fits = BAND / (chunk * wide);  // rows
    const int64_t most = fits < taps + stride ? 1 : (fits - taps) / stride + 1;
    parts = most < g.rows ? whole(g.rows, most) : 1;
    if (g.batch && g.batch * parts < threads) parts = least(g.rows, whole(threads, g.batch));
    rows = whole(g.rows, parts), parts = whole(g.rows, rows);
    if (parts > 1) return;
    images = least(fits / tall(g.rows), BAND / (g.rows * g.columns * results));
    images = least(images, whole(g.batch, threads));
    if (images < 1) images = 1;
  }
  int64_t tall(int64_t rows) const { return (rows - 1) * stride + taps; }
};

// Weights in the order in which they are read, a chunk of channels after the other: products' right operands, of 16-bit
// types by pairs, and float32 windows and biases.
template <class T, int taps> struct SeparableWeights {
  const Separable& g;
  const Bands<taps>& cut;
  int64_t depth;                       // of the first, even where pairs are
  T *first, *project;                  // [depth][chunk], [chunk][results]
  float *window, *of_first, *of_slid;  // [taps * taps][chunk], biases
  static constexpr int64_t word = sizeof(float) / sizeof(T), area = taps * taps;

  SeparableWeights(const Separable& of, const Bands<taps>& by) : g(of), cut(by) {
    depth = whole(g.depth(), word) * word;
  }
  int64_t floats() const { return cut.chunks * cut.chunk * ((depth + cut.results) / word + area + 2); }
  void use(float* memory) {
    const int64_t all = cut.chunks * cut.chunk;
    window = memory, of_first = window + all * area, of_slid = of_first + all;
    first = (T*)(of_slid + all), project = first + all * depth;
  }

  // Chunk c from the weights as they lie, w1 channels-last. Returns whether those are finite that meet zeros outside.
  bool bring_chunk(int64_t c, const T* w1, const float* b1, const T* w2, const float* b2, const T* w3) {
    const int64_t from = c * cut.chunk, n = least(cut.chunk, g.hidden - from);
    T* const to_first = first + from * depth;
    T* const to_project = project + from * cut.results;
    float* const to_window = window + from * area;
    if (n < cut.chunk) clear((float*)to_first, depth / word * cut.chunk), clear(to_window, area * cut.chunk);
    bring_first(w1 + from * g.depth(), n, to_first);
    bring((const float*)(w3 + from), 1, g.hidden / word, n / word, g.results, (float*)to_project, cut.results);
    bring(w2 + from * area, 1, area, area, n, to_window, cut.chunk);
    copy(b1, from, n, of_first), copy(b2, from, n, of_slid);
    return are_finite(to_window, area * cut.chunk) && (g.pointwise() || are_finite(to_first, depth * cut.chunk));
  }

 private:
  // n rows of depth() weights become columns; where pairs are of an odd number, with a zero
  void bring_first(const T* w, int64_t n, T* to) const {
    const int64_t given = g.depth();
    if (depth == given) return bring((const float*)w, 1, depth / word, depth / word, n, (float*)to, cut.chunk);
    for (int64_t k = 0; k < n; ++k)
      for (int64_t d = 0; d < depth; ++d)
        to[(d / word * cut.chunk + k) * word + d % word] = d < given ? w[k * given + d] : T();
  }
  void copy(const float* bias, int64_t from, int64_t n, float* to) const {
    for (int64_t k = 0; k < cut.chunk; ++k) to[from + k] = bias && k < n ? bias[from + k] : 0.0f;
  }
  template <class S> static bool are_finite(const S* x, int64_t n) {  // n: of whole vectors
    vf32 probe = splat<vf32>(0.0f);
    for (int64_t k = 0; k < n; k += LANES) probe = fma(cast<vf32>(load(x + k, Full())), 0.0f, probe);
    return hsum(probe) == 0.0f;
  }
};

// `count` neighbours of a row of results, of one vector of channels: y = act(window * x + bias). x: where the window of
// the first begins; row, next, step: elements from row to row of it, from window to window, and from pixel to pixel,
// of y as well.
template <int taps, int count, Activation act, class T>
DICP_INLINE void slide(const T* x, int64_t row, int64_t next, int64_t step, const float* w, const float* bias, Limits by,
                       T* y) {
  vf32 sum[count];
#pragma GCC unroll 8
  for (int k = 0; k < count; ++k) sum[k] = load(bias, Full());
#pragma GCC unroll 8
  for (int r = 0; r < taps; ++r) {
    vf32 weight[taps];
#pragma GCC unroll 8
    for (int s = 0; s < taps; ++s) weight[s] = load(w + (r * taps + s) * step, Full());
#pragma GCC unroll 8
    for (int k = 0; k < count; ++k)
#pragma GCC unroll 8
      for (int s = 0; s < taps; ++s)
        sum[k] = fma(cast<vf32>(load(x + r * row + k * next + s * step, Full())), weight[s], sum[k]);
  }
#pragma GCC unroll 8
  for (int k = 0; k < count; ++k) store(y + k * step, activate<act>(sum[k], by), Full());
}

// The workspace of one thread, and its work on one band.
template <class T, int taps, Activation first, Activation second> struct SeparableTile {
  const Separable& g;
  const Bands<taps>& cut;
  const SeparableWeights<T, taps>& weights;
  const T *x, *w1;
  Limits of_first, of_second;
  bool finite = true;            // all weights that meet zeros outside of images
  T *middle, *slid, *gathered;   // [images][tall(rows)][wide][chunk], [PIXELS][chunk], [PIXELS][depth]
  float *tile, *sums;            // [PIXELS][chunk], [images][rows][columns][results]
  int64_t top = 0;               // the row of the middle with which the band begins, which may be outside

  int64_t pixels() const { return cut.images * cut.tall(cut.rows) * cut.wide; }
  int64_t floats() const {
    const int64_t low = (pixels() + PIXELS) * cut.chunk + (g.pointwise() ? 0 : PIXELS * weights.depth);
    return low / weights.word + PIXELS * cut.chunk + cut.images * cut.rows * g.columns * cut.results;
  }
  void use(float* memory) {
    sums = memory, tile = sums + cut.images * cut.rows * g.columns * cut.results;
    middle = (T*)(tile + PIXELS * cut.chunk), slid = middle + pixels() * cut.chunk;
    gathered = slid + PIXELS * cut.chunk;
  }

  // `count` images from `image` on, rows [row, row + rows) of y
  void band(int64_t image, int64_t count, int64_t row, int64_t rows, const float* bias, const T* other, T* y) {
    top = row * g.step - g.border[0];
    const int64_t from = top < 0 ? 0 : top, to = least(top + cut.tall(rows), g.middle_height);
    for (int64_t i = 0; i < count; ++i) clear_border(i, from - top, to - top);
    const int64_t some = least(PIXELS, g.columns), lines = PIXELS / some;  // rows of y, or a part of one, to a product
    for (int64_t c = 0; c < cut.chunks; ++c)
      for (int64_t i = 0; i < count; ++i) {
        make(c, i, x + (image + i) * g.x[0], from, to);
        for (int64_t r = 0; r < rows; r += lines)
          for (int64_t column = 0; column < g.columns; column += some) {
            const int64_t m = least(lines, rows - r), n = least(some, g.columns - column);
            for (int64_t k = 0; k < m; ++k) slide_row(c, i, r + k, column, n, slid + k * n * cut.chunk);
            float* const sum = sums + ((i * cut.rows + r) * g.columns + column) * cut.results;
            project(c, m * n, sum);
            if (c + 1 < cut.chunks) continue;
            for (int64_t k = 0; k < m * n; ++k)
              finish(sum + k * cut.results, image + i, row + r + k / n, column + k % n, bias, other, y);
          }
      }
  }

 private:
  DICP_INLINE T* pixel(int64_t image, int64_t row, int64_t column) const {  // of the band's middle, border included
    return middle + ((image * cut.tall(cut.rows) + row) * cut.wide + column) * cut.chunk;
  }
  DICP_INLINE int64_t channels_of(int64_t c) const { return least(cut.chunk, g.hidden - c * cut.chunk); }

  // all but rows [from, to) of the band's in the columns of the image
  void clear_border(int64_t i, int64_t from, int64_t to) {
    for (int64_t r = 0; r < cut.tall(cut.rows); ++r)
      for (int64_t p = 0; p < cut.wide; ++p) {
        if (r >= from && r < to && p == g.border[1]) p += g.middle_width;
        if (p < cut.wide)
          for (int64_t v = 0; v < cut.chunk; v += LANES) store(pixel(i, r, p) + v, splat<vf32>(0.0f), Full());
      }
  }

  // chunk c of rows [from, to) of the middle of an image
  void make(int64_t c, int64_t i, const T* image, int64_t from, int64_t to) {
    const bool direct = g.pointwise(), dense = !direct || g.x[1] == g.width * g.x[2];  // rows one after the other
    const int64_t all = dense ? (to - from) * g.middle_width : g.middle_width;
    for (int64_t line = from; line < to; line += dense ? to - from : 1)
      for (int64_t q = 0; q < all; q += PIXELS) {
        const int64_t m = least(PIXELS, all - q);
        const int64_t row = line + q / g.middle_width, column = q % g.middle_width;
        if (direct) {
          multiply(c, m, image + line * g.x[1] + q * g.x[2], g.x[2]);
        } else {
          gather(image, row, column, m);
          multiply(c, m, gathered, weights.depth);
          if (!finite) make_inside(c, image, row, column, m);
        }
        keep(c, i, m, row - top, column);
      }
  }
  DICP_INLINE void multiply(int64_t c, int64_t m, const T* rows, int64_t step) {
    const T* const w = weights.first + c * cut.chunk * weights.depth;
    product(m, padded(channels_of(c)), weights.depth, rows, step, w, cut.chunk, tile, cut.chunk, false);
  }

  // f(pixel of the tile, row, column) of m pixels of the middle from one on
  template <class F> DICP_INLINE void each_pixel(int64_t row, int64_t column, int64_t m, F f) const {
    for (int64_t k = 0; k < m; ++k) {
      f(k, row, column);
      if (++column == g.middle_width) column = 0, ++row;
    }
  }
  // f(offset in the window, source) for what the window of a pixel of the middle covers; source: null outside
  template <class F> DICP_INLINE void each_tap(const T* image, int64_t row, int64_t column, F f) const {
    for (int64_t r = 0; r < g.window[0]; ++r)
      for (int64_t s = 0; s < g.window[1]; ++s) {
        const int64_t at = row * g.stride[0] + r - g.pad[0], across = column * g.stride[1] + s - g.pad[1];
        const bool inside = at >= 0 && at < g.height && across >= 0 && across < g.width;
        f((r * g.window[1] + s) * g.channels, inside ? image + at * g.x[1] + across * g.x[2] : nullptr);
      }
  }

  // what the windows of m pixels of the middle cover, a row for each
  void gather(const T* image, int64_t row, int64_t column, int64_t m) {
    each_pixel(row, column, m, [&](int64_t k, int64_t row, int64_t column) INLINE {
      T* const to = gathered + k * weights.depth;
      const int64_t at = row * g.stride[0] - g.pad[0], across = column * g.stride[1] - g.pad[1];
      const bool inside = at >= 0 && at + g.window[0] <= g.height && across >= 0 && across + g.window[1] <= g.width;
      if (inside && g.x[2] == g.channels) {
        const int64_t line = g.window[1] * g.channels;
        for (int64_t r = 0; r < g.window[0]; ++r)
          each_part(line, [&](int64_t d, auto lanes) INLINE {
            store(to + r * line + d, load(image + (at + r) * g.x[1] + across * g.x[2] + d, lanes), lanes);
          });
      } else {
        each_tap(image, row, column, [&](int64_t d, const T* from) INLINE {
          for (int64_t e = 0; e < g.channels; ++e) to[d + e] = from ? from[e] : T();
        });
      }
      for (int64_t d = g.depth(); d < weights.depth; ++d) to[d] = T();
    });
  }
  // sums of m pixels by weights that are not finite, which do not meet the zeros outside
  void make_inside(int64_t c, const T* image, int64_t row, int64_t column, int64_t m) {
    each_pixel(row, column, m, [&](int64_t k, int64_t row, int64_t column) {
      for (int64_t h = 0; h < channels_of(c); ++h) {
        float sum = 0.0f;
        each_tap(image, row, column, [&](int64_t d, const T* from) {
          for (int64_t e = 0; from && e < g.channels; ++e)
            sum += (float)decode_one(from[e]) * (float)decode_one(w1[(c * cut.chunk + h) * g.depth() + d + e]);
        });
        tile[k * cut.chunk + h] = sum;
      }
    });
  }
  // the tile's m pixels, to be slid over
  DICP_INLINE void keep(int64_t c, int64_t i, int64_t m, int64_t row, int64_t column) {
    const float* const bias = weights.of_first + c * cut.chunk;
    each_pixel(row, column, m, [&](int64_t k, int64_t row, int64_t column) INLINE {
      T* const at = pixel(i, row, column + g.border[1]);
      for (int64_t v = 0; v < channels_of(c); v += LANES)
        store(at + v, activate<first>(load(tile + k * cut.chunk + v, Full()) + load(bias + v, Full()), of_first), Full());
    });
  }

  // n pixels of one of the band's rows of y, from `column` on, of chunk c
  void slide_row(int64_t c, int64_t i, int64_t row, int64_t column, int64_t n, T* to) {
    const int64_t chunk = cut.chunk, next = g.step * chunk, line = cut.wide * chunk;
    for (int64_t v = 0; v < channels_of(c); v += LANES) {
      const T* const from = pixel(i, row * g.step, column * g.step) + v;
      const float* const w = weights.window + c * chunk * taps * taps + v;
      const float* const bias = weights.of_slid + c * chunk + v;
      T* const y = to + v;
      int64_t j = 0;
      for (; !finite && j < n; ++j) slide_inside(from + j * next, row, column + j, w, bias, y + j * chunk);
      for (; j < n && n < NEIGHBOURS; ++j)
        slide<taps, 1, second>(from + j * next, line, next, chunk, w, bias, of_second, y + j * chunk);
      for (; j < n; j += NEIGHBOURS) {
        j = least(j, n - NEIGHBOURS);  // at the end some of them again
        slide<taps, NEIGHBOURS, second>(from + j * next, line, next, chunk, w, bias, of_second, y + j * chunk);
      }
    }
  }
  // one pixel, by windows that are not finite, which do not meet the zeros outside
  void slide_inside(const T* from, int64_t row, int64_t column, const float* w, const float* bias, T* y) const {
    vf32 sum = load(bias, Full());
    for (int r = 0; r < taps; ++r)
      for (int s = 0; s < taps; ++s) {
        const int64_t at = top + row * g.step + r, across = column * g.step + s - g.border[1];
        if (at < 0 || at >= g.middle_height || across < 0 || across >= g.middle_width) continue;
        const vf32 pixel = cast<vf32>(load(from + (r * cut.wide + s) * cut.chunk, Full()));
        sum = fma(pixel, load(w + (r * taps + s) * cut.chunk, Full()), sum);
      }
    store(y, activate<second>(sum, of_second), Full());
  }

  // sums of m pixels (+)= what chunk c adds to them
  DICP_INLINE void project(int64_t c, int64_t m, float* to) {
    const T* const w = weights.project + c * cut.chunk * cut.results;
    product(m, g.results, channels_of(c), slid, cut.chunk, w, cut.results, to, cut.results, c > 0);
  }
  DICP_INLINE void finish(const float* sum, int64_t image, int64_t row, int64_t column, const float* bias,
                          const T* other, T* y) const {
    y += image * g.y[0] + row * g.y[1] + column * g.y[2];
    if (other) other += image * g.other[0] + row * g.other[1] + column * g.other[2];
    each_part(g.results, [&](int64_t k, auto lanes) INLINE {
      vf32 v = load(sum + k, lanes);
      if (bias) v = v + load(bias + k, lanes);
      if (other) v = v + cast<vf32>(load(other + k, lanes));
      store(y + k, v, lanes);
    });
  }
};

// Biases and other may be null. Returns not 0 where memory is short or the micro-kernels raised.
template <class T, int taps, Activation first, Activation second>
int32_t separable(const T* x, const T* w1, const float* b1, const T* w2, const float* b2, const T* w3, const float* b3,
                  const T* other, T* y, const int64_t* sizes, Limits of_first, Limits of_second, Workspace space) {
  const Separable& g = *(const Separable*)sizes;
  const Bands<taps> cut(g, space.threads);
  SeparableWeights<T, taps> weights(g, cut);
  const SeparableTile<T, taps, first, second> like{g, cut, weights, x, w1, of_first, of_second};
  float* const of_weights = space.take(weights.floats());
  float* const memory = space.take(space.threads * like.floats());
  if (!memory) return 1;
  weights.use(of_weights);
  const int64_t groups = whole(g.batch, cut.images);
  int32_t failed = 0, endless = 0;
#pragma omp parallel reduction(| : failed) num_threads(space.threads)
  {
#pragma omp for schedule(static) reduction(| : endless)
    for (int64_t c = 0; c < cut.chunks; ++c) endless |= !weights.bring_chunk(c, w1, b1, w2, b2, w3);
    auto own = like;
    own.finite = !endless, own.use(memory + omp_get_thread_num() * like.floats());
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t part = 0; part < cut.parts; ++part) {
        if (failed) continue;
        const int64_t image = group * cut.images, row = part * cut.rows;
        try {
          own.band(image, least(cut.images, g.batch - image), row, least(cut.rows, g.rows - row), b3, other, y);
        } catch (...) {
          failed = 1;
        }
      }
    if constexpr (!same<T, float>) at::native::cpublas::brgemm_release(true);
  }
  return failed;
}

}  // namespace dicp
