// Linear layers of the same few rows: y[i] = act(x w[i]^T * scale[i] + bias[i]), or, gated, one y of two weights:
// act(..) * (..). One parallel loop over all their columns, which are shared out as if they were one weight's.
#pragma once
#include "dicp_gemv.h"

namespace dicp {

template <class T, class W, class S> struct Layer {
  const Product& g;
  const W* w;
  Epilogue<T, S> e;
  T* y;
};

// The layer that has a column of all, which becomes its own column.
template <class L> DICP_INLINE const L& layer_of(const L* layers, int64_t& column) {
  for (; column >= layers->g.columns; ++layers) column -= layers->g.columns;
  return *layers;
}

template <int rows, Activation act, class T, class W, class S>
DICP_INLINE int32_t linears(const T* x, const Layer<T, W, S>* layers, int64_t count) {
  Product all = layers->g;
  for (int64_t i = 1; i < count; ++i) all.columns += layers[i].g.columns;
  const auto sum = [&](int64_t, int64_t r0, int64_t some, const int64_t* columns, float* sums, int64_t across) INLINE {
    const W* from[STREAMS];
    for (int64_t j = 0; j < STREAMS; ++j) {
      int64_t column = columns[j];
      const auto& layer = layer_of(layers, column);
      from[j] = layer.w + column * layer.g.w[2];
    }
    add_dots<rows>(x + r0 * all.x[1], all.x[1], some, all.depth, from, sums, across);
  };
  column_streams<rows>(all, sum, [&](const float* sums, int64_t n, int64_t, int64_t row, int64_t column) INLINE {
    while (n > 0) {  // a unit may reach into the next layer
      int64_t own = column;
      const auto& layer = layer_of(layers, own);
      const int64_t some = layer.g.columns - own < n ? layer.g.columns - own : n;
      if (layer.y) finish<act>(sums, some, layer.g, layer.e, 0, row, own, layer.y);  // else nobody reads it
      sums += some, column += some, n -= some;
    }
  });
  return 0;
}

template <int rows, Activation act, class T, class W, class S>
DICP_INLINE int32_t gated(const T* x, const Layer<T, W, S>* layers) {
  const Product& g = layers->g;
  const auto sum = [&](int64_t, int64_t r0, int64_t some, const int64_t* columns, float* sums, int64_t across) INLINE {
    for (int64_t i = 0; i < 2; ++i) {
      const W* from[STREAMS];
      for (int64_t j = 0; j < STREAMS; ++j) from[j] = layers[i].w + columns[j] * layers[i].g.w[2];
      add_dots<rows>(x + r0 * g.x[1], g.x[1], some, g.depth, from, sums + i * SET<rows>, across);
    }
  };
  column_streams<rows, 2>(g, sum, [&](const float* sums, int64_t n, int64_t, int64_t row, int64_t column) INLINE {
    T* const y = layers->y + row * g.y[1] + column;
    const RowEpilogue<act, T, S> gate(g, layers[0].e, 0, row, column);
    const RowEpilogue<LIMITED, T, S> value(layers[1].g, layers[1].e, 0, row, column);
    each_part(n, [&](int64_t c, auto lanes) INLINE {
      store(y + c, gate.of(sums, c, lanes) * value.of(sums + SET<rows>, c, lanes), lanes);
    });
  });
  return 0;
}

}  // namespace dicp
