// What the templates of matrix products share: y = act(x w * scale + bias) + other.
#pragma once
#include "dicp_parts.h"

namespace dicp {

// Sizes, and strides in elements: x's per batch, row and depth, w's per batch, depth and column, y's and other's per
// batch and row (their columns are dense), scale's per batch and column (0: one for all).
struct Product {
  int64_t batch, rows, columns, depth;
  int64_t x[3], w[3], y[2], other[2], scale[2];
};

constexpr int64_t SMALL_PRODUCT = 1 << 16;  // multiply-adds that are not worth waking threads for
DICP_INLINE bool worth_threads(const Product& g) {
  return g.batch * g.rows * g.columns * g.depth > SMALL_PRODUCT;
}
DICP_INLINE int64_t threads_for(const Product& g, int64_t threads) { return worth_threads(g) ? threads : 1; }

// LIMITED: none, ReLU or ReLU6, by limits that are given, so that one function serves all three. Others have none.
enum Activation { LIMITED, SIGMOID, TANH, SILU, GELU, GELU_TANH };
struct Limits { float low, high; };
constexpr Limits UNLIMITED{-__builtin_inff(), __builtin_inff()};
DICP_INLINE bool is_limited(Limits by) { return by.low > UNLIMITED.low || by.high < UNLIMITED.high; }
// NaN as it is: of it and a limit, which never is, larger and smaller return the second operand
DICP_INLINE vf32 limited(vf32 x, Limits by) {
  x = per_register([](auto v, auto low) { return isa::larger(low, v); }, x, splat<vf32>(by.low));
  return per_register([](auto v, auto high) { return isa::smaller(high, v); }, x, splat<vf32>(by.high));
}

template <Activation act> DICP_INLINE vf32 activate(vf32 x, Limits by) {
  if constexpr (act == LIMITED) return limited(x, by);
  else if constexpr (act == SIGMOID) return sigmoid(x);
  else if constexpr (act == TANH) return tanh(x);
  else if constexpr (act == SILU) return x / (1.0f + exp_normal(-x));
  else if constexpr (act == GELU) return 0.5f * x * one_plus_erf(x * 0.70710678f);
  else return 0.5f * x * one_plus_tanh(0.79788456f * (x + 0.044715f * x * x * x));
}

template <class T, class S> struct Epilogue {
  const S* scale = nullptr;
  const T *bias = nullptr, *other = nullptr;
  Limits limits = UNLIMITED;
  template <Activation act> DICP_INLINE bool leaves_sums() const {
    return act == LIMITED && !is_limited(limits) && !scale && !bias && !other;
  }
};

// What the epilogue of a row reads, from one of its columns on.
template <Activation act, class T, class S> struct RowEpilogue {
  const S* scale;
  const T *bias, *other;
  bool scaled_by_column;
  Limits limits;
  RowEpilogue(const Product& g, const Epilogue<T, S>& e, int64_t batch, int64_t row, int64_t column)
      : scale(e.scale ? e.scale + batch * g.scale[0] + column * g.scale[1] : nullptr),
        bias(e.bias ? e.bias + column : nullptr),
        other(e.other ? e.other + batch * g.other[0] + row * g.other[1] + column : nullptr),
        scaled_by_column(g.scale[1]), limits(e.limits) {}
  // results of sums at c
  template <class L> DICP_INLINE vf32 of(const float* sums, int64_t c, L lanes) const {
    vf32 v = load(sums + c, lanes);
    if (scale && scaled_by_column) v = v * load(scale + c, lanes);
    else if (scale) v = v * (float)decode_one(*scale);
    if (bias) v = v + load(bias + c, lanes);
    v = activate<act>(v, limits);
    if (other) v = v + load(other + c, lanes);
    return v;
  }
};

// n columns, from `column`, of a row of sums to y
template <Activation act, class T, class S>
DICP_INLINE void finish(const float* sums, int64_t n, const Product& g, const Epilogue<T, S>& e, int64_t batch,
                        int64_t row, int64_t column, T* y) {
  y += batch * g.y[0] + row * g.y[1] + column;
  const RowEpilogue<act, T, S> results(g, e, batch, row, column);
  each_part(n, [&](int64_t c, auto lanes) INLINE { store(y + c, results.of(sums, c, lanes), lanes); });
}

}  // namespace dicp
