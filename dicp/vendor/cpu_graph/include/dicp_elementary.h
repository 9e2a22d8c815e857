// Functions of vf32 that are faster inline than in a library: polynomials, off by about a unit of the last place.
#pragma once
#include "dicp_math.h"

namespace dicp {

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

// A float and its logarithm's parts: x = 2^e (1 + f), 3/4 <= 1 + f < 3/2. Of x that is positive and normal.
struct Parts { vf32 e, f; };
constexpr int32_t THREE_QUARTERS = 0x3f400000, EXPONENT = (int32_t)0xff800000;
DICP_INLINE Parts parts_of(vf32 x) {
  const vi32 at = as_bits(x) - THREE_QUARTERS;
  return {cast<vf32>((vi32)(at >> 23)), as_float<vf32>((vi32)(as_bits(x) - (at & EXPONENT))) - 1.0f};
}
// ln(1 + f) = f + f^2 times this, minimax
DICP_INLINE vf32 of_square(vf32 f) {
  return horner(f, -0.5f, 0.3333345f, -0.25000098f, 0.19990847f, -0.16647245f, 0.14478505f, -0.13162075f, 0.10464324f,
                -0.045079853f);
}
// -inf of 0, NaN below, inf and NaN as they are
DICP_INLINE vf32 unless_extreme(vf32 x, vf32 r) {
  const vf32 extreme = where(eq(x, 0.0f), -__builtin_inff(), where(lt(x, 0.0f), __builtin_nanf(""), x));
  return where(land(gt(x, 0.0f), lt(x, __builtin_inff())), r, extreme);
}
template <class F> DICP_INLINE vf32 logarithm(vf32 x, F of_parts) {
  const auto small = lt(x, 0x1p-126f);  // below the normal floats
  const Parts p = parts_of(where(small, x * 0x1p23f, x));
  return unless_extreme(x, of_parts(where(small, p.e - 23.0f, p.e), p.f));
}
constexpr float LN_2 = 0x1.62e430p-1f;
// The largest errors over the floats: log 0.92, log1p 1.3, log2 1.4, log10 1.3 ulp (the last two 2.5 without fused mad).
DICP_INLINE vf32 log_f32(vf32 x) {
  return logarithm(x, [](vf32 e, vf32 f) { return mad(e, splat<vf32>(LN_2), mad(f * f, of_square(f), f)); });
}
// Other bases, of 2^e and of 1 + f, whose unit is one in two floats: what rounding takes from the larger part of the
// sum is added to the smaller, as the two may have opposite signs.
DICP_INLINE vf32 in_base(vf32 of_e, vf32 f, float base, float rest, vf32 low) {
  const vf32 unit = splat<vf32>(base), of_f = f * unit, large = of_e + of_f;
  const vf32 lost = mad(f, unit, -of_f) + (of_e - large + of_f);
  return large + mad(f * f * of_square(f), unit, mad(f, splat<vf32>(rest), lost + low));
}
DICP_INLINE vf32 log2_f32(vf32 x) {
  return logarithm(x, [](vf32 e, vf32 f) { return in_base(e, f, 0x1.715476p0f, 0x1.4ae0c0p-26f, splat<vf32>(0)); });
}
DICP_INLINE vf32 log10_f32(vf32 x) {
  return logarithm(x, [](vf32 e, vf32 f) {
    return in_base(e * 0x1.3442p-2f, f, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f, e * -0x1.95ec10p-19f);
  });
}
// 1 + x = 2^e (1 + f): of x itself, of which 1 + x has lost bits, unless x is so large that 1 does not matter.
DICP_INLINE vf32 log1p_f32(vf32 x) {
  const vf32 sum = 1.0f + x;
  const vi32 at = as_bits(sum) - THREE_QUARTERS, exponent = at & EXPONENT;
  const vf32 part = as_float<vf32>((vi32)(0x3f800000 - exponent));  // 2^-e
  const vf32 of_sum = as_float<vf32>((vi32)(as_bits(sum) - exponent)) - 1.0f;
  const vf32 f = where(gt(x, 0x1p24f), of_sum, mad(x, part, part - 1.0f));
  const vf32 r = mad(cast<vf32>((vi32)(at >> 23)), splat<vf32>(LN_2), mad(f * f, of_square(f), f));
  return where(eq(x, 0.0f), x, unless_extreme(sum, r));  // -0
}

#define DICP_ELEMENTARY(name)                                                                       \
  template <class V> DICP_INLINE V name(V x) {                                                       \
    if constexpr (same<V, vf32>) return name##_f32(x);                                               \
    else return lib::name(x);                                                                        \
  }
DICP_ELEMENTARY(exp)
DICP_ELEMENTARY(tanh)
DICP_ELEMENTARY(erf)
DICP_ELEMENTARY(log)
DICP_ELEMENTARY(log2)
DICP_ELEMENTARY(log10)
DICP_ELEMENTARY(log1p)
#undef DICP_ELEMENTARY
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

}  // namespace dicp
