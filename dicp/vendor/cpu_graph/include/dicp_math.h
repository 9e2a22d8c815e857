// Mathematics on scalars and vectors under one name. Scalars: libm. Vectors: SLEEF from libtorch_cpu, as in
// eager, but for those of vf32 in dicp_elementary.h and dicp_circular.h; the portable build calls libm by lanes.
#pragma once
#include "dicp_vec.h"

namespace dicp {

// lib: the library functions, overloaded on float, double, vf32, vf64
#if DICP_AVX512
#define DICP_SLEEF(M, name, ulp) M(name, Sleef_##name##f16##ulp, Sleef_##name##d8##ulp)
#elif DICP_AVX2
#define DICP_SLEEF(M, name, ulp) M(name, Sleef_##name##f8##ulp, Sleef_##name##d4##ulp)
#endif
#ifdef DICP_SLEEF
#define DICP_VECTOR1(name, f32, f64)                                                                 \
  extern "C" vf32 f32(vf32);                                                                         \
  extern "C" isa::half_reg<double> f64(isa::half_reg<double>);                                       \
  DICP_INLINE vf32 name(vf32 x) { return f32(x); }                                                   \
  DICP_INLINE vf64 name(vf64 x) { return {f64(x.lo), f64(x.hi)}; }
#define DICP_VECTOR2(name, f32, f64)                                                                 \
  extern "C" vf32 f32(vf32, vf32);                                                                   \
  extern "C" isa::half_reg<double> f64(isa::half_reg<double>, isa::half_reg<double>);                \
  DICP_INLINE vf32 name(vf32 x, vf32 y) { return f32(x, y); }                                        \
  DICP_INLINE vf64 name(vf64 x, vf64 y) { return {f64(x.lo, y.lo), f64(x.hi, y.hi)}; }
#else
#define DICP_SLEEF(M, name, ulp) M(name)
#define DICP_VECTOR1(name)                                                                           \
  DICP_INLINE vf32 name(vf32 x) { return each_lane([](float a) { return name(a); }, x); }            \
  DICP_INLINE vf64 name(vf64 x) { return each_lane([](double a) { return name(a); }, x); }
#define DICP_VECTOR2(name)                                                                           \
  template <class V> DICP_INLINE V name(V x, V y) {                                                  \
    return each_lane([](auto a, auto b) { return name(a, b); }, x, y);                               \
  }
#endif
#define DICP_LIB1(name, ulp)                                                                         \
  namespace lib {                                                                                    \
  DICP_INLINE float name(float x) { return __builtin_##name##f(x); }                                 \
  DICP_INLINE double name(double x) { return __builtin_##name(x); }                                  \
  DICP_SLEEF(DICP_VECTOR1, name, ulp)                                                                \
  }
#define DICP_MATH1(name, ulp)                                                                        \
  DICP_LIB1(name, ulp)                                                                               \
  template <class V> DICP_INLINE V name(V x) { return lib::name(x); }
#define DICP_LIB2(name, ulp)                                                                         \
  namespace lib {                                                                                    \
  DICP_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); }                     \
  DICP_INLINE double name(double x, double y) { return __builtin_##name(x, y); }                     \
  DICP_SLEEF(DICP_VECTOR2, name, ulp)                                                                \
  }
#define DICP_MATH2(name, ulp)                                                                        \
  DICP_LIB2(name, ulp)                                                                               \
  template <class A, class B> DICP_INLINE common<A, B> name(A x, B y) {                              \
    return lib::name(cast<common<A, B>>(x), cast<common<A, B>>(y));                                  \
  }
DICP_LIB1(exp, _u10)
DICP_LIB1(tanh, _u10)
DICP_LIB1(erf, _u10)
DICP_LIB1(sinh, _u10)
DICP_LIB1(cosh, _u10)
DICP_LIB1(asinh, _u10)
DICP_LIB1(acosh, _u10)
DICP_LIB2(fmod, )
DICP_MATH1(exp2, _u10)
DICP_MATH1(expm1, _u10)
DICP_LIB1(log, _u10)
DICP_LIB1(log2, _u10)
DICP_LIB1(log10, _u10)
DICP_LIB1(log1p, _u10)
DICP_LIB1(sin, _u10)
DICP_LIB1(cos, _u10)
DICP_LIB1(tan, _u10)
DICP_LIB1(asin, _u10)
DICP_LIB1(acos, _u10)
DICP_LIB1(atan, _u10)
DICP_MATH1(atanh, _u10)
DICP_MATH1(erfc, _u15)
DICP_MATH1(lgamma, _u10)
DICP_MATH2(pow, _u10)
DICP_MATH2(atan2, _u10)
DICP_MATH2(hypot, _u05)
DICP_MATH2(nextafter, )
#undef DICP_MATH1
#undef DICP_MATH2
#undef DICP_LIB1
#undef DICP_LIB2
#undef DICP_VECTOR1
#undef DICP_VECTOR2
#undef DICP_SLEEF

// per_register: f on each register of a vector, or on a scalar
template <class V, class F, class... More> DICP_INLINE V per_register(F f, V x, More... more) {
  if constexpr (is_two<V>) return {f(x.lo, more.lo...), f(x.hi, more.hi...)};
  else return f(x, more...);
}

// sqrt, fma, floor, ceil, trunc, round (half to even)
template <class V> DICP_INLINE V sqrt(V x) {
  if constexpr (!is_vec<V>) return isa::sqrt_scalar(x);
  else return per_register([](auto r) { return isa::sqrt_reg(r); }, x);
}
template <class V> DICP_INLINE V rsqrt(V x) { return 1 / sqrt(x); }
template <class A, class B, class C> DICP_INLINE auto fma(A x, B y, C z) {
  using V = common<common<A, B>, C>;
  V a = cast<V>(x), b = cast<V>(y), c = cast<V>(z);
  if constexpr (!is_vec<V>) return isa::fma_scalar(a, b, c);
  else return per_register([](auto p, auto q, auto r) { return isa::fma_reg(p, q, r); }, a, b, c);
}
template <isa::Rounding mode, class V> DICP_INLINE V round_to(V x) {
  if constexpr (same<scalar<V>, int32_t> || same<scalar<V>, int64_t>) return x;
  else if constexpr (!is_vec<V>) return isa::round_scalar(x, mode);
  else return per_register([](auto r) { return isa::round_reg<mode>(r); }, x);
}
template <class V> DICP_INLINE V floor(V x) { return round_to<isa::FLOOR>(x); }
template <class V> DICP_INLINE V ceil(V x) { return round_to<isa::CEIL>(x); }
template <class V> DICP_INLINE V trunc(V x) { return round_to<isa::TRUNC>(x); }
template <class V> DICP_INLINE V round(V x) { return round_to<isa::NEAREST>(x); }

// abs neg sign copysign signbit isnan isinf isfinite
template <class V> constexpr bool is_float = same<scalar<V>, float> || same<scalar<V>, double>;
template <class V> DICP_INLINE V neg(V x) { return -x; }
template <class V> constexpr auto sign_bit = (scalar<bits_of<V>>)1 << (8 * sizeof(scalar<V>) - 1);
template <class V> DICP_INLINE V abs(V x) {
  if constexpr (is_float<V>) return as_float<V>((bits_of<V>)(as_bits(x) & ~sign_bit<V>));
  else return where(lt(x, 0), (V)(0 - x), x);
}
template <class V> DICP_INLINE V sign(V x) { return cast<V>(gt(x, 0)) - cast<V>(lt(x, 0)); }
template <class A, class B> DICP_INLINE auto copysign(A x, B y) {
  using V = common<A, B>;
  auto magnitude = as_bits(abs(cast<V>(x))), sign = as_bits(cast<V>(y)) & sign_bit<V>;
  return as_float<V>((bits_of<V>)(magnitude | sign));
}
template <class V> DICP_INLINE auto signbit(V x) {
  if constexpr (is_float<V>) return lt(as_bits(x), 0);
  else return lt(x, 0);
}
template <class V> DICP_INLINE auto isnan(V x) { return ne(x, x); }
template <class V> DICP_INLINE auto isinf(V x) { return eq(abs(x), (scalar<V>)__builtin_inff()); }
template <class V> DICP_INLINE auto isfinite(V x) { return lt(abs(x), (scalar<V>)__builtin_inff()); }

// by_lib: SLEEF gives inf or NaN for some finite arguments, near overflow and where fmod has a huge quotient;
// those lanes go to libm.
template <class V, class F, class... More> DICP_INLINE V by_lib(F f, V x, More... more) {
  V r = f(x, more...);
  if constexpr (is_vec<V> && (DICP_AVX512 || DICP_AVX2)) {
    vbool lost = land(isfinite(x), lnot(isfinite(r)));
    if (__builtin_expect(hany(lost), 0)) r = where(lost, each_lane(f, x, more...), r);
  }
  return r;
}
template <class V> DICP_INLINE V sinh(V x) { return by_lib([](auto a) { return lib::sinh(a); }, x); }
template <class V> DICP_INLINE V cosh(V x) { return by_lib([](auto a) { return lib::cosh(a); }, x); }
template <class V> DICP_INLINE V asinh(V x) { return by_lib([](auto a) { return lib::asinh(a); }, x); }
template <class V> DICP_INLINE V acosh(V x) { return by_lib([](auto a) { return lib::acosh(a); }, x); }

// maximum, minimum: NaN wins; fmax, fmin: NaN loses
template <class A, class B> DICP_INLINE auto maximum(A x, B y) {
  using V = common<A, B>;
  return per_register(PickMax(), cast<V>(x), cast<V>(y));
}
template <class A, class B> DICP_INLINE auto minimum(A x, B y) {
  using V = common<A, B>;
  return per_register(PickMin(), cast<V>(x), cast<V>(y));
}
template <class A, class B> DICP_INLINE auto fmax(A x, B y) {
  using V = common<A, B>;
  return per_register([](auto a, auto b) { return b != b ? a : (a > b ? a : b); }, cast<V>(x), cast<V>(y));
}
template <class A, class B> DICP_INLINE auto fmin(A x, B y) {
  using V = common<A, B>;
  return per_register([](auto a, auto b) { return b != b ? a : (a < b ? a : b); }, cast<V>(x), cast<V>(y));
}

// digamma: reflection below 0, recurrence up to 10, then the asymptotic series
DICP_INLINE double digamma_f64(double x) {
  constexpr double pi = 3.14159265358979323846;
  if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
  double y = 0;
  if (x < 0) {
    if (x == __builtin_floor(x)) return __builtin_nan("");
    y = -pi / __builtin_tan(pi * (x - __builtin_rint(x)));
    x = 1 - x;
  }
  for (; x < 10; x += 1) y -= 1 / x;
  if (x == __builtin_inf()) return x;
  double t = 1 / (x * x);
  double tail = 1.0 / 240 - t * (1.0 / 132 - t * (691.0 / 32760 - t / 12));
  double series = t * (1.0 / 12 - t * (1.0 / 120 - t * (1.0 / 252 - t * tail)));
  return y + __builtin_log(x) - 0.5 / x - series;
}
template <class V> DICP_INLINE V digamma(V x) {
  if constexpr (is_vec<V>) return each_lane([](auto a) { return (decltype(a))digamma_f64(a); }, x);
  else return (V)digamma_f64(x);
}

// div_trunc, div_floor, fmod (sign of the dividend), remainder (of the divisor). Integers: x / 0 and x % 0 are 0, INT_MIN / -1 wraps.
template <class T> DICP_INLINE T div_int(T a, T b) {
  using U = choose<sizeof(T) == 8, uint64_t, uint32_t>;
  return b == 0 ? 0 : b == -1 ? (T)(0 - (U)a) : a / b;
}
template <class A, class B> DICP_INLINE auto div_trunc(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y);
  if constexpr (is_float<V>) return trunc(a / b);
  else if constexpr (!is_vec<V>) return div_int(a, b);
  else if constexpr (same<V, vi64>) return each_lane([](auto p, auto q) { return div_int(p, q); }, a, b);
  else {  // exact in double, and there is no vector integer division
    V q = cast<V>(cast<vf64>(a) / cast<vf64>(b));
    return where(eq(b, 0), 0, where(eq(b, -1), 0 - a, q));
  }
}
template <class A, class B> DICP_INLINE auto fmod(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y);
  if constexpr (is_float<V>) return by_lib([](auto p, auto q) { return lib::fmod(p, q); }, a, b);
  else return where(eq(b, 0), 0, a - div_trunc(a, b) * b);
}
template <class A, class B> DICP_INLINE auto remainder(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y), r = fmod(a, b);
  return where(land(ne(r, 0), lxor(lt(r, 0), lt(b, 0))), r + b, r);
}
template <class A, class B> DICP_INLINE auto div_floor(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y);
  if constexpr (is_float<V>) {  // from the exact remainder, for floor(a / b) is wrong where a / b rounds up
    V r = fmod(a, b);
    V q = (a - r) / b - cast<V>(land(ne(r, 0), lxor(lt(r, 0), lt(b, 0))));
    V whole = floor(q), nearest = whole + cast<V>(gt(q - whole, 0.5f));
    return where(eq(b, 0), a / b, where(eq(q, 0), copysign(q, a / b), nearest));
  } else {
    V q = div_trunc(a, b), r = a - q * b;
    return where(land(ne(b, 0), land(ne(r, 0), lxor(lt(r, 0), lt(b, 0)))), q - 1, q);
  }
}

// shl, shr: a shift by less than 0 or by the width or more shifts everything out, as in torch
template <class A, class B> DICP_INLINE auto shl(A x, B y) {
  using V = common<A, B>;
  constexpr int width = 8 * sizeof(scalar<V>);
  V a = cast<V>(x), b = cast<V>(y);
  auto ok = land(ge(b, 0), lt(b, width));
  return where(ok, a << where(ok, b, 0), 0);
}
template <class A, class B> DICP_INLINE auto shr(A x, B y) {
  using V = common<A, B>;
  constexpr int width = 8 * sizeof(scalar<V>);
  V a = cast<V>(x), b = cast<V>(y);
  return a >> where(land(ge(b, 0), lt(b, width)), b, width - 1);
}

// gcd (Of: the dtype, where that is narrower than what it is computed in), lcm
template <class Of, class T> DICP_INLINE T gcd_int(T a, T b) {  // the smallest integer stays negative, as in eager
  a = wrap<Of>(abs(a));
  b = wrap<Of>(abs(b));
  while (a != 0) {
    T c = a;
    a = b - div_int(b, a) * a;
    b = c;
  }
  return b;
}
template <class Of = int64_t, class A, class B> DICP_INLINE auto gcd(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y);
  if constexpr (is_vec<V>) return each_lane([](auto p, auto q) { return gcd_int<Of>(p, q); }, a, b);
  else return gcd_int<Of>(a, b);
}
template <class A, class B> DICP_INLINE auto lcm(A x, B y) {
  using V = common<A, B>;
  V a = cast<V>(x), b = cast<V>(y);
  return abs((V)(div_trunc(a, gcd(a, b)) * b));
}

}  // namespace dicp
