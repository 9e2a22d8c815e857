// Circular functions of vf32 and their inverses, inline as those of dicp_elementary.h.
#pragma once
#include "dicp_elementary.h"

namespace dicp {

// x = n pi/2 + r + low; pi/2 in three floats, of which the first is so short that its product by n is exact for |x| up
// to 6,000. Without fused mad there is no `low`.
#if DICP_AVX512 || DICP_AVX2
struct Turn { vf32 r, low; vi32 n; };
DICP_INLINE Turn turn_of(vf32 x) {
  const vf32 z = mad(x, splat<vf32>(0x1.45f306p-1f), splat<vf32>(0x1.8p23f)), n = z - 0x1.8p23f;
  constexpr float SHORT = 0x1.922p0f, NEXT = -0x1.2aeef4p-18f, LAST = -0x1.73dcb4p-43f;
  const vf32 some = mad(n, splat<vf32>(-SHORT), x), more = n * NEXT, lost = mad(n, splat<vf32>(NEXT), -more);
  const vf32 r = some - more, low = some - r - more - lost;
  return {r, mad(n, splat<vf32>(-LAST), low), as_bits(z)};
}
// sin x = sin(r + low), or cos, and their negatives, by the quarter; of |x| above 6,000 the library's
template <int quarter> DICP_INLINE vf32 circular(vf32 x) {
  const Turn t = turn_of(x);
  const vf32 s = t.r * t.r;
  const vf32 sine = t.r + mad(s * t.r, horner(s, -0.16666655f, 0.008332178f, -0.00019517216f), t.low);
  const vf32 half = mad(s, horner(s, 0.041666646f, -0.0013887367f, 2.443836e-05f), splat<vf32>(-0.5f));
  const vf32 cosine = 1.0f + mad(s, half, -t.r * t.low);
  const vi32 q = t.n + quarter;
  const vf32 magnitude = where(ne(q & 1, 0), cosine, sine);
  return as_float<vf32>((vi32)(as_bits(magnitude) ^ ((q & 2) << 30)));
}
template <class F> DICP_INLINE vf32 unless_far(vf32 x, vf32 r, F f) {
  const auto far = lnot(lt(abs(x), 6000.0f));
  return __builtin_expect(hany(far), 0) ? where(far, f(x), r) : r;
}
// The largest errors up to there: sin and cos 1.2, tan 1.3 ulp; of all floats asin 1.1, acos 1.3, atan 1.4 ulp.
DICP_INLINE vf32 sin_f32(vf32 x) {
  const vf32 r = unless_far(x, circular<0>(x), [](vf32 a) { return lib::sin(a); });
  return where(eq(x, 0.0f), x, r);  // -0
}
DICP_INLINE vf32 cos_f32(vf32 x) { return unless_far(x, circular<1>(x), [](vf32 a) { return lib::cos(a); }); }
// tan(r + low) by an odd polynomial, and of odd quarters -1 / that, for which what rounding took from it counts
DICP_INLINE vf32 tan_f32(vf32 x) {
  const Turn t = turn_of(x);
  const vf32 s = t.r * t.r;
  const vf32 p = horner(s, 0.33333352f, 0.13332605f, 0.05406614f, 0.021251805f, 0.010910746f, -1.3287425e-06f,
                        0.0044193394f);
  const vf32 more = mad(s * t.r, p, mad(t.low, s, t.low)), tangent = t.r + more, lost = t.r - tangent + more;
  const vf32 inverse = -1.0f / tangent, miss = mad(tangent, inverse, splat<vf32>(1.0f));
  const vf32 near = where(ne(t.n & 1, 0), mad(inverse, mad(lost, inverse, miss), inverse), tangent);
  const vf32 r = unless_far(x, near, [](vf32 a) { return lib::tan(a); });
  return where(eq(x, 0.0f), x, r);  // -0
}
#else
DICP_INLINE vf32 sin_f32(vf32 x) { return lib::sin(x); }
DICP_INLINE vf32 cos_f32(vf32 x) { return lib::cos(x); }
DICP_INLINE vf32 tan_f32(vf32 x) { return lib::tan(x); }
#endif

constexpr float HALF_PI = 0x1.921fb6p0f, HALF_PI_LOW = -0x1.777a5cp-25f;
// atan: of |z| <= 1/2 by an odd polynomial; more is turned by 1/4 or, from 2 on, 1/2 pi
DICP_INLINE vf32 atan_f32(vf32 x) {
  const vf32 a = abs(x), one = splat<vf32>(1.0f), none = splat<vf32>(0.0f);
  const auto beyond = gt(a, 2.0f), over = gt(a, 0.5f);
  const vf32 z = where(beyond, -one, where(over, a - 1.0f, a)) / where(beyond, a, where(over, a + 1.0f, one));
  const vf32 turns = where(beyond, one, where(over, 0.5f * one, none)), s = z * z;
  const vf32 p = horner(s, -0.33333328f, 0.199995f, -0.1427225f, 0.10942366f, -0.07989111f, 0.038791742f);
  return copysign(mad(turns, splat<vf32>(HALF_PI), z + mad(s * z, p, turns * HALF_PI_LOW)), x);
}
// asin a = z + z^3 P(z^2) up to 1/2, above it pi/2 - 2 asin of z = sqrt((1 - a) / 2)
struct Arc { vf32 z, more; vbool far; };
DICP_INLINE Arc arc_of(vf32 a) {
  const auto far = gt(a, 0.5f);
  const vf32 s = where(far, (1.0f - a) * 0.5f, a * a), z = where(far, sqrt(s), a);
  const vf32 p = horner(s, 0.1666666f, 0.07500511f, 0.044515714f, 0.031817656f, 0.014402425f, 0.03756547f);
  return {z, s * z * p, far};
}
DICP_INLINE vf32 asin_f32(vf32 x) {
  const Arc arc = arc_of(abs(x));
  const vf32 far = HALF_PI - 2.0f * arc.z, lost = HALF_PI - far - 2.0f * arc.z;
  return copysign(where(arc.far, far - (2.0f * arc.more - (lost + HALF_PI_LOW)), arc.z + arc.more), x);
}
DICP_INLINE vf32 acos_f32(vf32 x) {
  const Arc arc = arc_of(abs(x));
  const vf32 z = copysign(arc.z, x), more = copysign(arc.more, x), none = splat<vf32>(0.0f);
  const vf32 turns = where(lt(x, 0.0f), none + 2.0f, none), near = HALF_PI - z, lost = HALF_PI - near - z;
  const vf32 far = mad(turns, splat<vf32>(HALF_PI), 2.0f * (z + more));
  return where(arc.far, far, near - (more - (lost + HALF_PI_LOW)));
}

#define DICP_CIRCULAR(name)                                                                         \
  template <class V> DICP_INLINE V name(V x) {                                                       \
    if constexpr (same<V, vf32>) return name##_f32(x);                                               \
    else return lib::name(x);                                                                        \
  }
DICP_CIRCULAR(sin)
DICP_CIRCULAR(cos)
DICP_CIRCULAR(tan)
DICP_CIRCULAR(asin)
DICP_CIRCULAR(acos)
DICP_CIRCULAR(atan)
#undef DICP_CIRCULAR

}  // namespace dicp
