// Floats of eight bits to and from float. Ties round to even. A number too large becomes infinity in e5m2; e4m3 has
// none, and what torch makes of it there depends on its version.
#pragma once
#include "dicp_vec.h"

#ifndef DICP_E4M3_OVERFLOW
#define DICP_E4M3_OVERFLOW 0x7e  // the largest number
#endif

namespace dicp {

DICP_INLINE float e4m3_to_float(uint8_t b) {
  const float number = half_to_float((uint16_t)(((b & 0x80) << 8) | ((b & 0x7f) << 7))) * 256;
  return (b & 0x7f) == 0x7f ? __builtin_nanf("") : number;
}
// read as float16, whose exponent has a bit more, it is 2^-8 times the number; NaN's exponent is one of numbers there,
// and gives 480, which no number is
DICP_INLINE vf32 e4m3_to_float(isa::reg<uint8_t> b) {
  const isa::reg<int16_t> h = isa::convert<int16_t, int8_t, LANES>((isa::reg<int8_t>)b) << 7 & (int16_t)0xbf80;
  const vf32 number = half_to_float((isa::reg<uint16_t>)h) * 256.0f;
  return where(eq(as_bits(number) & 0x7fffffff, 0x43f00000), __builtin_nanf(""), number);
}
// e5m2 is the upper half of a float16
DICP_INLINE float e5m2_to_float(uint8_t b) { return half_to_float((uint16_t)(b << 8)); }
DICP_INLINE vf32 e5m2_to_float(isa::reg<uint8_t> b) {
  return half_to_float((isa::reg<uint16_t>)(isa::convert<uint16_t, uint8_t, LANES>(b) << 8));
}

// to the nearest with so many bits of mantissa; `overflow` from the magnitude with the bits `limit` on
template <int mantissa, int bias, int limit, int overflow, class F> DICP_INLINE auto float_to_float8(F x) {
  using I = bits_of<F>;
  constexpr int drop = 23 - mantissa;
  constexpr int base = (127 - bias + drop + 1) << 23;  // of a sum with it, the last bit is a subnormal's last
  const I u = as_bits(x), size = u & 0x7fffffff;
  const I normal = (size - ((127 - bias) << 23) + (((size >> drop) & 1) + ((1 << (drop - 1)) - 1))) >> drop;
  const I subnormal = as_bits((F)(as_float<F>(size) + bitcast<float>(base))) - base;
  const I finite = where(lt(size, (128 - bias) << 23), subnormal, normal);
  const I rounded = where(gt(size, 0x7f800000), 0x7f, where(ge(size, limit), overflow, finite));
  const I bits = rounded | ((u >> 24) & 0x80);
  if constexpr (is_vec<F>) return isa::convert<uint8_t, int32_t, LANES>(bits);
  else return (uint8_t)bits;
}
template <class F> DICP_INLINE auto float_to_e4m3(F x) {
  return float_to_float8<3, 7, 0x43e80001, DICP_E4M3_OVERFLOW>(x);  // above 464, which rounds to 448
}
template <class F> DICP_INLINE auto float_to_e5m2(F x) { return float_to_float8<2, 15, 0x47800000, 0x7c>(x); }

}  // namespace dicp
