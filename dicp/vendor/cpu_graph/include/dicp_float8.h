// Floats of eight bits to and from float, by integers; one text for scalars and vectors. Ties round to even. A number
// too large becomes infinity in e5m2; e4m3 has none, and what torch makes of it there depends on its version.
#pragma once
#include "dicp_vec.h"

#ifndef DICP_E4M3_OVERFLOW
#define DICP_E4M3_OVERFLOW 0x7e  // the largest number
#endif

namespace dicp {

template <class F> DICP_INLINE F e4m3_to_float(bits_of<F> h) {
  using I = bits_of<F>;
  const I size = h & 0x7f;
  const I subnormal = as_bits((F)(cast<F>(size) * 0x1p-9f)), normal = (size << 20) + (120 << 23);
  const I number = where(lt(size, 8), subnormal, normal);
  return as_float<F>((I)(where(eq(size, 0x7f), 0x7fc00000, number) | ((h & 0x80) << 24)));
}
// e5m2 is the upper half of a float16
template <class F> DICP_INLINE F e5m2_to_float(bits_of<F> h) {
  if constexpr (is_vec<F>) return half_to_float(isa::convert<uint16_t, int32_t, LANES>(h << 8));
  else return half_to_float((uint16_t)(h << 8));
}

// to the nearest with so many bits of mantissa; `overflow` from the magnitude with the bits `limit` on
template <int mantissa, int bias, int limit, int overflow, class F> DICP_INLINE bits_of<F> float_to_float8(F x) {
  using I = bits_of<F>;
  constexpr int drop = 23 - mantissa;
  constexpr int base = (127 - bias + drop + 1) << 23;  // of a sum with it, the last bit is a subnormal's last
  const I u = as_bits(x), size = u & 0x7fffffff;
  const I normal = (size - ((127 - bias) << 23) + (((size >> drop) & 1) + ((1 << (drop - 1)) - 1))) >> drop;
  const I subnormal = as_bits((F)(as_float<F>(size) + bitcast<float>(base))) - base;
  const I finite = where(lt(size, (128 - bias) << 23), subnormal, normal);
  const I rounded = where(gt(size, 0x7f800000), 0x7f, where(ge(size, limit), overflow, finite));
  return rounded | ((u >> 24) & 0x80);
}
template <class F> DICP_INLINE bits_of<F> float_to_e4m3(F x) {
  return float_to_float8<3, 7, 0x43e80001, DICP_E4M3_OVERFLOW>(x);  // above 464, which rounds to 448
}
template <class F> DICP_INLINE bits_of<F> float_to_e5m2(F x) { return float_to_float8<2, 15, 0x47800000, 0x7c>(x); }

}  // namespace dicp
