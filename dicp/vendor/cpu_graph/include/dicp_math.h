// Mathematics on scalars and vectors under one name. Scalars: libm. Vectors: SLEEF from libtorch_cpu, as in
// eager, but exp, tanh and erf of vf32 are inline, being faster so; the portable build calls libm by lanes.
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
DICP_MATH1(log, _u10)
DICP_MATH1(log2, _u10)
DICP_MATH1(log10, _u10)
DICP_MATH1(log1p, _u10)
DICP_MATH1(sin, _u10)
DICP_MATH1(cos, _u10)
DICP_MATH1(tan, _u10)
DICP_MATH1(asin, _u10)
DICP_MATH1(acos, _u10)
DICP_MATH1(atan, _u10)
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

// mad: a * b + c, fused where that is one instruction
DICP_INLINE vf32 mad(vf32 a, vf32 b, vf32 c) {
#if DICP_AVX512 || DICP_AVX2
  return isa::fma_reg(a, b, c);
#else
  return a * b + c;
#endif
}
// horner: c[0] + x c[1] + x^2 c[2] + ..
DICP_INLINE vf32 horner(vf32, float c) { return splat<vf32>(c); }
template <class... More> DICP_INLINE vf32 horner(vf32 x, float c, More... more) {
  return mad(horner(x, more...), x, splat<vf32>(c));
}
// scale_pow2: p * 2^n, n = z - 1.5 * 2^23 (its bits are the last of z); in two steps where 2^n itself may not be a
// normal float. Unless extreme, 0 from n = -127 down: Intel's processors take some 150 cycles for an operation with
// floats below the normal ones.
template <bool extreme> DICP_INLINE vf32 scale_pow2(vf32 p, vf32 z) {
#if DICP_AVX512
  const vf32 n = z - 0x1.8p23f, scaled = __builtin_ia32_scalefps512_mask(p, n, p, -1, 4);
  if constexpr (extreme) return scaled;
  else return n <= -127.0f ? splat<vf32>(0.0f) : scaled;
#else
  if constexpr (!extreme) return p * as_float<vf32>((as_bits(z) << 23) + (127 << 23));
  const vi32 n = as_bits(z) - 0x4b400000, part = n >> 1;
  return p * as_float<vf32>((part + 127) << 23) * as_float<vf32>((n - part + 127) << 23);
#endif
}
// exp_near: x = n ln2 + r, e^x = 2^n P(r), P minimax on |r| <= ln2 / 2. Extreme: |x| <= 104. Else from -88 on,
// where it is 0, up to 89, where it is inf: the results next to those are lost, too.
template <bool extreme> DICP_INLINE vf32 exp_near(vf32 x) {
  vf32 round_bias = splat<vf32>(0x1.8p23f);
  vf32 z = mad(x, splat<vf32>(1.44269504f), round_bias), n = z - round_bias;
  vf32 r = mad(n, splat<vf32>(-0.693359375f), x);
  r = mad(n, splat<vf32>(2.12194440e-4f), r);
  vf32 p = horner(r, 1.0f, 1.0f, 0.49999994f, 0.166665196f, 0.0416682363f, 0.00836882275f, 0.00138235372f);
  return scale_pow2<extreme>(p, z);
}
// the largest errors over the floats: exp 0.86, tanh 0.95, erf 1.04 ulp (1.14, 1.1, 1.3 without fused mad)
template <bool extreme> DICP_INLINE vf32 exp_between(float low, float high, vf32 x) {
  vf32 least = splat<vf32>(low), most = splat<vf32>(high);
  if constexpr (extreme || !DICP_AVX512) x = least > x ? least : x;  // keeps NaN
  return exp_near<extreme>(most < x ? most : x);
}
DICP_INLINE vf32 exp_f32(vf32 x) { return exp_between<true>(-104.0f, 89.0f, x); }  // underflows, overflows
// exp_normal: 0 where e^x is no normal float, inf from 88.4 on; for what is added to 1, or is a part of 1
DICP_INLINE vf32 exp_normal(vf32 x) { return exp_between<false>(-88.0f, 89.0f, x); }
// tanh: an odd polynomial near 0, else 1 - 2 / (e^2x + 1), which the subtraction keeps accurate
DICP_INLINE vf32 tanh_f32(vf32 x) {
  vf32 a = abs(x), s = x * x, most = splat<vf32>(10.0f);
  vf32 p = horner(s, -0.333332956f, 0.133323476f, -0.0538799949f, 0.0214872174f, -0.0079469271f,
                  0.0023019556f, -0.000358618476f);
  vf32 b = most < a ? most : a;
  vf32 far = 1.0f - 2.0f / (exp_near<false>(b + b) + 1.0f);
  return copysign(a < 1.0f ? mad(s * x, p, x) : far, x);  // of -0, too
}
// erf: an odd polynomial near 0, else 1 - e^-q(|x|), q = -log erfc; erfc(4) is less than half an ulp of 1
DICP_INLINE vf32 erf_f32(vf32 x) {
  vf32 a = abs(x), s = x * x, most = splat<vf32>(4.0f);
  vf32 p = horner(s, 0.128379166f, -0.37612626f, 0.112835832f, -0.0268536918f, 0.00518807396f,
                  -0.00080078782f, 7.84610893e-05f);
  vf32 b = most < a ? most : a;
  vf32 q = horner(b, 0.00034151852f, 1.12708926f, 0.638144612f, 0.103107043f, -0.0218382496f, 0.00294771581f,
                  -0.000186385892f);
  return a < 1.0f ? mad(x, p, x) : copysign(1.0f - exp_near<false>(-q), x);
}
// 1 + erf: the quotient of two polynomials, 4e-7 off at the most, so that GELU is off by 2.2e-7 of x (docs/numerics.md).
// 1 + tanh is 2 / (1 + e^-2x), a few ulp off, far below 0 too.
DICP_INLINE vf32 one_plus_erf_f32(vf32 x) {
  vf32 most = splat<vf32>(3.92f);  // erf there is 1 within half an ulp
  vf32 b = most < x ? most : x;    // keeps NaN
  b = -most > b ? -most : b;
  vf32 s = b * b;
  vf32 p = horner(s, 1.12837915f, 0.190406909f, 0.0527487876f, 0.00376563754f, 0.000284883467f, 2.05008753e-06f);
  vf32 q = horner(s, 1.0f, 0.50207647f, 0.1141093f, 0.0149692576f, 0.00116254102f, 3.80917564e-05f);
  return x < -most ? splat<vf32>(0.0f) : mad(b, p, q) / q;
}
DICP_INLINE vf32 one_plus_tanh_f32(vf32 x) { return 2.0f / (1.0f + exp_normal(-2.0f * x)); }
template <class V> DICP_INLINE V exp(V x) {
  if constexpr (same<V, vf32>) return exp_f32(x);
  else return lib::exp(x);
}
template <class V> DICP_INLINE V tanh(V x) {
  if constexpr (same<V, vf32>) return tanh_f32(x);
  else return lib::tanh(x);
}
template <class V> DICP_INLINE V erf(V x) {
  if constexpr (same<V, vf32>) return erf_f32(x);
  else return lib::erf(x);
}
// of what is no vector of floats: the functions themselves
template <class V> DICP_INLINE V exp_normal(V x) { return lib::exp(x); }
template <class V> DICP_INLINE V one_plus_erf(V x) {
  if constexpr (same<V, vf32>) return one_plus_erf_f32(x);
  else return 1 + lib::erf(x);
}
template <class V> DICP_INLINE V one_plus_tanh(V x) {
  if constexpr (same<V, vf32>) return one_plus_tanh_f32(x);
  else return 1 + lib::tanh(x);
}
template <class V> DICP_INLINE V sigmoid(V x) {
  if constexpr (same<V, vf32>) return 1.0f / (1.0f + exp_normal(-x));
  else return 1 / (1 + exp(-x));
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
