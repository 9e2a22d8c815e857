// What generated kernels need besides vectors: checked run-time indices and the states of reductions.
#pragma once
#include "dicp_vec.h"

namespace dicp {

// n elements whose bytes are 0. What is larger than caches is streamed past them: Zen 4 clears 125 MB so in a third of
// the time that stores, or memset of parts, take.
template <class T> void zeros(T* p, int64_t n) {
  constexpr int64_t PART = 1 << 16, LARGE = 1 << 23, STEP = 4 * LANES;
  const int64_t bytes = n * sizeof(T), parts = (bytes + PART - 1) / PART;
#pragma omp parallel for schedule(static) if (parts > 1)
  for (int64_t k = 0; k < parts; ++k) {
    char *from = (char*)p + k * PART, *const to = (char*)p + (k + 1 < parts ? (k + 1) * PART : bytes);
    if (bytes >= LARGE) {
      const int64_t rest = to - from, unaligned = -(uintptr_t)from % STEP, ahead = unaligned < rest ? unaligned : rest;
      __builtin_memset(from, 0, ahead);
      for (from += ahead; to - from >= STEP; from += STEP) isa::stream_zeros(from);
      isa::stream_end();
    }
    __builtin_memset(from, 0, to - from);
  }
}

// The number of lanes a loop step covers when `rest` elements are left.
DICP_INLINE Lanes lanes_left(int64_t rest) { return Lanes{(int)(rest < LANES ? rest : LANES)}; }

// An index read at run time: negative ones count from the end when `wrap`; an index out of range raises the flag and
// becomes 0, so that no access leaves the buffer.
template <class N>
DICP_INLINE int64_t check_index(int64_t i, int64_t size, bool wrap, int32_t* flag, N, bool active = true) {
  if (wrap && i < 0) i += size;
  if (i >= 0 && i < size) return i;
  if (active) *flag = 1;
  return 0;
}
DICP_INLINE isa::half_reg<int64_t> check_half(isa::half_reg<int64_t>& i, int64_t size, bool wrap) {  // -1: out of range
  if (wrap) i += (i >> 63) & size;
  const isa::half_reg<int64_t> good = (i >= 0) & (i < size);
  i &= good;
  return ~good;
}
template <class N>
DICP_INLINE vi64 check_index(vi64 i, int64_t size, bool wrap, int32_t* flag, N lanes, vbool m) {
  const vi64 bad{check_half(i.lo, size, wrap), check_half(i.hi, size, wrap)};
  if (hany(land(land(ne(bad, int64_t(0)), m), active(lanes)))) *flag = 1;
  return i;
}
template <class N>
DICP_INLINE vi64 check_index(vi64 i, int64_t size, bool wrap, int32_t* flag, N lanes, bool m = true) {
  if constexpr (!same<N, Full>) return check_index(i, size, wrap, flag, lanes, splat<vbool>(m));
  const isa::half_reg<int64_t> lo = check_half(i.lo, size, wrap), bad = lo | check_half(i.hi, size, wrap);
  int64_t any = 0;
  for (int k = 0; k < LANES / 2; ++k) any |= bad[k];
  if (m && any) *flag = 1;
  return i;
}

// An integer divisor: a zero raises the flag.
template <class V, class N> DICP_INLINE V nonzero(V x, int32_t* flag, N lanes, vbool m) {
  if (hany(land(land(eq(x, 0), m), active(lanes)))) *flag = 1;
  return x;
}
template <class V, class N> DICP_INLINE V nonzero(V x, int32_t* flag, N lanes, bool m = true) {
  if constexpr (is_vec<V>) return nonzero(x, flag, lanes, splat<vbool>(m));
  else {
    if (m && x == 0) *flag = 1;
    return x;
  }
}

// A float sum whose rounding error grows with n / 1024, not n: parts of 32 steps are added up on their own, and 32 of those.
template <class V> struct LongSum {
  V part = splat_any(0), total = splat_any(0), grand = splat_any(0);
  uint32_t steps = 0;
  DICP_INLINE void add(V v) {
    part = part + v;
    if (++steps % 32 == 0) {
      total = total + part;
      part = splat_any(0);
      if (steps % 1024 == 0) {
        grand = grand + total;
        total = splat_any(0);
      }
    }
  }
  DICP_INLINE V result() const { return grand + (total + part); }
  static DICP_INLINE V splat_any(scalar<V> s) {
    if constexpr (is_vec<V>) return splat<V>(s);
    else return s;
  }
};

// What parts of a row that do not wait for each other add up to.
template <class V, int N> DICP_INLINE V together(const LongSum<V> (&parts)[N]) {
  V sum = parts[0].result();
  for (int u = 1; u < N; ++u) sum = sum + parts[u].result();
  return sum;
}

template <class V, int N> DICP_INLINE V largest(const V (&parts)[N]) {
  V most = parts[0];
  for (int u = 1; u < N; ++u) most = maximum(most, parts[u]);
  return most;
}
template <class V, int N> DICP_INLINE V smallest(const V (&parts)[N]) {
  V least = parts[0];
  for (int u = 1; u < N; ++u) least = minimum(least, parts[u]);
  return least;
}

// Mean and sum of squared deviations of floats, from their sum and sum of squares in double: the square of a float is
// exact there, so the subtraction loses no more than the mean's share of 1e-16. As eager, which accumulates in double.
template <class V> struct Moments {
  using D = choose<is_vec<V>, vf64, double>;
  D sum = cast<D>(0.0), squares = cast<D>(0.0);
  DICP_INLINE void add(V x) {
    const D d = cast<D>(x);
    sum = sum + d;
    squares = fma(d, d, squares);
  }
  template <class S> static DICP_INLINE S m2_of(S sum, S squares, double n) {
    return maximum(squares - sum * (sum / n), cast<S>(0.0));
  }
  DICP_INLINE V mean(double n) const { return cast<V>(sum / n); }
  DICP_INLINE V m2(double n) const { return cast<V>(m2_of(sum, squares, n)); }
  DICP_INLINE scalar<V> row_mean(double n) const { return (scalar<V>)(hsum(sum) / n); }
  DICP_INLINE scalar<V> row_m2(double n) const { return (scalar<V>)m2_of(hsum(sum), hsum(squares), n); }
};

// Running mean and sum of squared deviations of values that arrive one by one, in every lane alike (Welford 1962).
template <class V> struct Welford {
  V mean, m2;
  DICP_INLINE void add(V x, scalar<V> one_over_count) {
    const V d = x - mean;
    mean = mean + d * one_over_count;
    m2 = m2 + d * (x - mean);
  }
};

// Welford along a row: each lane has a state of its own, with its own count; Chan's formula joins the lanes.
template <class V> struct RowWelford {
  V average = splat<V>(0), squares = splat<V>(0), seen = splat<V>(0);
  DICP_INLINE void add(V x, Full) {
    seen = seen + scalar<V>(1);
    const V d = x - average;
    average = average + d / seen;
    squares = squares + d * (x - average);
  }
  DICP_INLINE void add(V x, Lanes lanes) {
    RowWelford<V> next = *this;
    next.add(x, Full{});
    average = where(active(lanes), next.average, average);
    squares = where(active(lanes), next.squares, squares);
    seen = where(active(lanes), next.seen, seen);
  }
  DICP_INLINE scalar<V> mean() const { return hsum(average * seen) / hsum(seen); }
  DICP_INLINE scalar<V> m2() const {
    const V d = average - mean();
    return hsum(squares + d * d * seen);
  }
};

template <class V> DICP_INLINE V splat_like(V, double s) {
  if constexpr (is_vec<V>) return splat<V>(scalar<V>(s));
  else return V(s);
}

// log(exp(a) + exp(b)) without overflow.
template <class V> DICP_INLINE V log_add_exp(V a, V b) {
  const V top = maximum(a, b), low = minimum(a, b);
  return where(eq(top, low), top + splat_like(top, 0.6931471805599453), top + log1p(exp(low - top)));
}

// Integer powers, wrapping. A negative exponent gives 0, but 1 for a base of 1 and +-1 for a base of -1, as eager.
template <class T> inline T pow_one(T base, T exponent) {
  if (exponent < 0) return base == 1 ? T(1) : base == -1 ? (exponent % 2 ? T(-1) : T(1)) : T(0);
  T out = 1;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) out *= base;
    base *= base;
  }
  return out;
}
template <class A, class B> DICP_INLINE auto pow_int(A x, B y) {
  using V = common<A, B>;
  if constexpr (is_vec<V>) return each_lane([](auto a, auto b) { return pow_one(a, b); }, cast<V>(x), cast<V>(y));
  else return pow_one<V>(x, y);
}

// The inverse of erf. Of floats: an odd polynomial near 0, else x P(w), w = -log(1 - x^2), with P in the root of w
// for large w; all minimax.
DICP_INLINE vf32 erfinv_f32(vf32 x) {
  const vf32 s = x * x, w = -log(fma(-x, x, 1.0f)), mid = w - 2.5f, far = sqrt(w) - 3.143034f;
  const vf32 o = horner(s, 0.2320137f, 0.127549f, 0.08682951f, 0.061007127f, 0.07787057f, -0.041581582f, 0.1554152f);
  const vf32 p = horner(mid, 1.5014094f, 0.24664028f, -0.004177387f, -0.0012527419f, 0.00021834444f, -4.9633454e-06f,
                        -3.4627044e-06f, 4.6617012e-07f, 2.3232625e-08f, -8.791018e-09f);
  const vf32 q = horner(far, 2.9764233f, 1.003966f, 0.0067730993f, -0.005005027f, 0.0035379655f, -0.0025222905f,
                        0.001313986f, -0.00011273537f, -0.00018147063f);
  const vf32 y = where(lt(s, 0.36f), fma(s * x, o, x * 0.88622693f), x * where(lt(w, 5.0f), p, q));
  return where(eq(abs(x), 1.0f), x * __builtin_inff(), y);
}
// Of doubles: Winitzki's approximation, then Halley's steps on erf or (towards 1) on erfc.
template <class V> DICP_INLINE V erfinv_f64(V x) {
  const V a = abs(x), l = log1p(-a * a), t = 4.330746750799873 + 0.5 * l;      // 2 / (pi * 0.147)
  V y = sqrt(sqrt(t * t - l / 0.147) - t);
  for (int k = 0; k < 3; ++k) {
    const V miss = where(lt(a, 0.5), erf(y) - a, (1.0 - a) - erfc(y));
    const V step = miss / (1.1283791670955126 * exp(-y * y));
    y = y - step / (1.0 + y * step);
  }
  return where(eq(a, 1.0), x * __builtin_inf(), copysign(y, x));
}
template <class V> DICP_INLINE V erfinv(V x) {
  if constexpr (same<V, vf32>) return erfinv_f32(x);
  else if constexpr (same<V, float>) return (float)erfinv_f64((double)x);
  else return erfinv_f64(x);
}

// The value of the last active lane: what a loop over the lanes would have written last.
DICP_INLINE int last_of(Full) { return LANES - 1; }
DICP_INLINE int last_of(Lanes lanes) { return lanes.n - 1; }
template <class V, class N> DICP_INLINE scalar<V> last_lane(V v, N lanes) { return Array<V>(v).at[last_of(lanes)]; }

}  // namespace dicp
