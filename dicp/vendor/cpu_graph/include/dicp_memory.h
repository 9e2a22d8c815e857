
// Loads, stores, gathers and scatters between storage types and the vectors of dicp_vec.h.
#pragma once
#include "dicp_vec.h"

namespace dicp {

// bf16 and half to and from float; one text for scalars and vectors. Ties round to even, NaN stays NaN.
template <class I> DICP_INLINE auto bf16_to_float(I h) {
  return as_float<choose<is_vec<I>, vf32, float>>((I)(h << 16));
}
template <class F> DICP_INLINE auto float_to_bf16(F x) {
  auto u = as_bits(x);
  return where(ne(x, x), 0x7fc0, (u + (((u >> 16) & 1) + 0x7fff)) >> 16);
}
template <class F, class I> DICP_INLINE F half_bits_to_float(I h) {
  I a = h & 0x7fff;
  I normal = where(ge(a, 0x7c00), (a << 13) | 0x7f800000, (a << 13) + (112 << 23));
  I subnormal = as_bits((F)(cast<F>(a) * 0x1p-24f));
  return as_float<F>((I)(where(lt(a, 0x400), subnormal, normal) | ((h & 0x8000) << 16)));
}
template <class I, class F> DICP_INLINE I float_to_half_bits(F x) {
  I u = as_bits(x), a = u & 0x7fffffff;
  I normal = (a - (112 << 23) + (((a >> 13) & 1) + 0xfff)) >> 13;
  I subnormal = as_bits((F)(as_float<F>(a) + 0.5f)) - 0x3f000000;  // an ulp of 0.5f is a subnormal half's
  I finite = where(lt(a, 0x38800000), subnormal, normal);
  I rounded = where(gt(a, 0x7f800000), 0x7e00, where(ge(a, 0x47800000), 0x7c00, finite));
  return rounded | ((u >> 16) & 0x8000);
}
#if (DICP_AVX512 || DICP_AVX2) && !defined(__clang__)  // clang dropped some of the builtins
DICP_INLINE float half_to_float(uint16_t h) {
  return __builtin_ia32_vcvtph2ps(isa::reg<short, 8>{(short)h})[0];
}
DICP_INLINE uint16_t float_to_half(float x) { return __builtin_ia32_vcvtps2ph(isa::reg<float, 4>{x}, 0)[0]; }
#else
DICP_INLINE float half_to_float(uint16_t h) { return half_bits_to_float<float>((int32_t)h); }
DICP_INLINE uint16_t float_to_half(float x) { return (uint16_t)float_to_half_bits<int32_t>(x); }
#endif
DICP_INLINE vf32 half_to_float(isa::reg<uint16_t> h) {
#if DICP_AVX512
  return __builtin_ia32_vcvtph2ps512_mask((isa::reg<short>)h, vf32{}, -1, 4);
#elif DICP_AVX2 && !defined(__clang__)
  return __builtin_ia32_vcvtph2ps256((isa::reg<short>)h);
#else
  return half_bits_to_float<vf32>(isa::convert<int32_t, uint16_t, LANES>(h));
#endif
}
DICP_INLINE isa::reg<uint16_t> float_to_half(vf32 x) {
#if DICP_AVX512
  return (isa::reg<uint16_t>)__builtin_ia32_vcvtps2ph512_mask(x, 0, isa::reg<short>{}, -1);
#elif DICP_AVX2
  return (isa::reg<uint16_t>)__builtin_ia32_vcvtps2ph256(x, 0);
#else
  return isa::convert<uint16_t, int32_t, LANES>(float_to_half_bits<vi32>(x));
#endif
}

}  // namespace dicp

#include "dicp_float8.h"

namespace dicp {

// round_bf16, round_half, round_e4m3, round_e5m2: the value a store and a load would give back
template <class F> DICP_INLINE F round_bf16(F x) {
  return bf16_to_float((bits_of<F>)float_to_bf16(x));
}
template <class F> DICP_INLINE F round_half(F x) { return half_to_float(float_to_half(x)); }
template <class F> DICP_INLINE F round_e4m3(F x) { return e4m3_to_float(float_to_e4m3(x)); }
template <class F> DICP_INLINE F round_e5m2(F x) { return e5m2_to_float(float_to_e5m2(x)); }

// decode, encode: storage (rows of a vector, or one element) to and from the type that computes
template <class T> constexpr bool is_low = same<T, bf16> || same<T, half>;
template <class T> constexpr bool is_float8 = same<T, e4m3> || same<T, e5m2>;
template <class T> using raw = choose<is_low<T>, uint16_t, choose<is_float8<T> || same<T, bool>, uint8_t, T>>;

template <class T> DICP_INLINE vec<T> decode(isa::rows<raw<T>> r) {
  if constexpr (same<T, half>) return half_to_float(r);
  else if constexpr (same<T, bf16>) return bf16_to_float(isa::convert<int32_t, uint16_t, LANES>(r));
  else if constexpr (same<T, e4m3>) return e4m3_to_float(r);
  else if constexpr (same<T, e5m2>) return e5m2_to_float(r);
  else if constexpr (same<T, bool>) return {isa::convert<int32_t, uint8_t, LANES>(r) != 0};
  else if constexpr (is_small_int<T>) return isa::convert<int32_t, T, LANES>(r);
  else return r;
}
template <class T, class V> DICP_INLINE isa::rows<raw<T>> encode(V v) {
  vec<T> x = cast<vec<T>>(v);
  if constexpr (same<T, half>) return float_to_half(x);
  else if constexpr (same<T, bf16>) return isa::convert<uint16_t, int32_t, LANES>(float_to_bf16(x));
  else if constexpr (same<T, e4m3>) return float_to_e4m3(x);
  else if constexpr (same<T, e5m2>) return float_to_e5m2(x);
  else if constexpr (same<T, bool>) return isa::convert<uint8_t, int32_t, LANES>(x.m & 1);
  else if constexpr (is_small_int<T>) return isa::convert<T, int32_t, LANES>(x);
  else return x;
}
template <class T> DICP_INLINE scalar<vec<T>> decode_one(T x) {
  if constexpr (same<T, half>) return half_to_float(x.bits);
  else if constexpr (same<T, bf16>) return bf16_to_float((int32_t)x.bits);
  else if constexpr (same<T, e4m3>) return e4m3_to_float(x.bits);
  else if constexpr (same<T, e5m2>) return e5m2_to_float(x.bits);
  else return x;
}
template <class T, class S> DICP_INLINE T encode_one(S s) {
  auto x = (scalar<vec<T>>)s;
  if constexpr (same<T, half>) return {float_to_half(x)};
  else if constexpr (same<T, bf16>) return {(uint16_t)float_to_bf16(x)};
  else if constexpr (same<T, e4m3>) return {float_to_e4m3(x)};
  else if constexpr (same<T, e5m2>) return {float_to_e5m2(x)};
  else return (T)x;
}

// mask_in: the lanes that are covered, and in m
DICP_INLINE isa::Mask mask_in(Full, vbool m) { return isa::mask_of(m.m); }
DICP_INLINE isa::Mask mask_in(Lanes lanes) { return isa::mask_of(lanes.n); }
DICP_INLINE isa::Mask mask_in(Lanes lanes, vbool m) {
  return (isa::Mask)(isa::mask_of(m.m) & isa::mask_of(lanes.n));
}

// load: lanes that are not covered or not in m read 0, and their memory is not touched
template <class T> DICP_INLINE vec<T> load(const T* p, Full) {
  return decode<T>(isa::load_rows((const raw<T>*)p));
}
template <class T> DICP_INLINE vec<T> load(const T* p, Lanes lanes) {
  return decode<T>(isa::load_first((const raw<T>*)p, lanes.n));
}
template <class T> DICP_INLINE vec<T> load(const T* p, Full, vbool m) {
  return decode<T>(isa::load_rows((const raw<T>*)p, isa::mask_of(m.m)));
}
template <class T> DICP_INLINE vec<T> load(const T* p, Lanes lanes, vbool m) {
  return decode<T>(isa::load_rows((const raw<T>*)p, mask_in(lanes, m)));
}
// the same m for all lanes, where no instruction masks elements of this size
template <class T, class N> DICP_INLINE vec<T> load(const T* p, N lanes, bool m) {
  if constexpr (DICP_AVX512 || (DICP_AVX2 && sizeof(T) >= 4)) return load(p, lanes, splat<vbool>(m));
  else return m ? load(p, lanes) : splat<vec<T>>(0);
}
template <class T> DICP_INLINE auto load(const T* p, One) { return decode_one(*p); }
template <class T> DICP_INLINE auto load(const T* p, One, bool m) {
  return m ? decode_one(*p) : scalar<vec<T>>(0);
}

// store: v is first cast to what computes T, then rounded to T
template <class T, class V> DICP_INLINE void store(T* p, V v, Full) {
  isa::store_rows((raw<T>*)p, encode<T>(v));
}
template <class T, class V> DICP_INLINE void store(T* p, V v, Lanes lanes) {
  isa::store_first((raw<T>*)p, encode<T>(v), lanes.n);
}
template <class T, class V> DICP_INLINE void store(T* p, V v, Full, vbool m) {
  isa::store_rows((raw<T>*)p, encode<T>(v), isa::mask_of(m.m));
}
template <class T, class V> DICP_INLINE void store(T* p, V v, Lanes lanes, vbool m) {
  isa::store_rows((raw<T>*)p, encode<T>(v), mask_in(lanes, m));
}
template <class T, class V> DICP_INLINE void store(T* p, V v, One) { *p = encode_one<T>(v); }
template <class T, class V> DICP_INLINE void store(T* p, V v, One, bool m) {
  if (m) *p = encode_one<T>(v);
}

// Bits: elements on their way from one place to another, as they are stored
template <class T> struct Bits { isa::rows<raw<T>> rows; };
template <class T> DICP_INLINE Bits<T> load_bits(const T* p, Full) { return {isa::load_rows((const raw<T>*)p)}; }
template <class T> DICP_INLINE Bits<T> load_bits(const T* p, Lanes lanes) {
  return {isa::load_first((const raw<T>*)p, lanes.n)};
}
template <class T, class N> DICP_INLINE Bits<T> load_bits(const T* p, N lanes, bool m) {
  return m ? load_bits(p, lanes) : Bits<T>{};
}
template <class T> DICP_INLINE void store(T* p, Bits<T> bits, Full) { isa::store_rows((raw<T>*)p, bits.rows); }
template <class T> DICP_INLINE void store(T* p, Bits<T> bits, Lanes lanes) {
  isa::store_first((raw<T>*)p, bits.rows, lanes.n);
}

// for_active: f(lane) for the lanes that are covered, and in m
DICP_INLINE int count(Full) { return LANES; }
DICP_INLINE int count(Lanes lanes) { return lanes.n; }
template <class N, class F> DICP_INLINE void for_active(N lanes, F f) {
  for (int i = 0; i < count(lanes); ++i) f(i);
}
template <class N, class F> DICP_INLINE void for_active(N lanes, vbool m, F f) {
  for (int i = 0; i < count(lanes); ++i)
    if (m.m[i]) f(i);
}

// gather: p[idx[i]], load_strided: p[i * stride], load_repeated: p[i / times]
template <class T, class I, int... i> DICP_INLINE vec<T> gather_full(const T* p, I idx, isa::Seq<i...>) {
  auto r = (const raw<T>*)p;
  using R = isa::half_reg<raw<T>>;
  if constexpr (sizeof(T) == 8) return {R{r[idx[i]]...}, R{r[idx[i + LANES / 2]]...}};
  else return decode<T>(isa::reg<raw<T>>{r[idx[i]]...});
}
template <class T, class I, class N, class... M>
DICP_INLINE vec<T> gather(const T* p, I idx, N lanes, M... m) {
  if constexpr (same<N, Full> && sizeof...(M) == 0) {
    return gather_full(p, idx, isa::seq<sizeof(T) == 8 ? LANES / 2 : LANES>());
  } else if constexpr (sizeof(T) == 4 && same<I, vi32>) {
    return decode<T>(isa::gather_rows((const raw<T>*)p, idx, mask_in(lanes, m...)));
  } else {
    raw<T> buffer[LANES] = {};
    for_active(lanes, m..., [&](int i) { buffer[i] = ((const raw<T>*)p)[idx[i]]; });
    return decode<T>(isa::load_rows(buffer));
  }
}
struct Stride {  // the index vector 0, stride, 2 stride, .. without computing it
  int64_t stride;
  DICP_INLINE int64_t operator[](int i) const { return i * stride; }
};
// every_other: p[2 i] as the halves of two registers, of which the second begins an element sooner: not beyond the last
template <class T, int... i> DICP_INLINE isa::reg<T> every_other(const T* p, isa::Seq<i...>) {
  const auto low = isa::load_rows(p), high = isa::load_rows(p + LANES - 1);
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(low, high, (2 * i < LANES ? 2 * i : 2 * i + 1)...);
#else
  using At = isa::reg<choose<sizeof(T) == 4, int32_t, choose<sizeof(T) == 2, int16_t, int8_t>>>;
  return __builtin_shuffle(low, high, At{(2 * i < LANES ? 2 * i : 2 * i + 1)...});
#endif
}
template <class T, class N, class... M>
DICP_INLINE vec<T> load_strided(const T* p, int64_t stride, N lanes, M... m) {
  if constexpr (same<N, Full> && sizeof...(M) == 0 && sizeof(T) <= 4)
    if (__builtin_constant_p(stride) && stride == 2) return decode<T>(every_other((const raw<T>*)p, isa::seq<>()));
  return gather(p, Stride{stride}, lanes, m...);
}

template <int times> struct Repeated {
  DICP_INLINE int64_t operator[](int i) const { return i / times; }
};
// Spelt out as a load and a shuffle: GCC would put the register together in memory, and wait for its own stores.
#if defined(__clang__) || __GNUC__ >= 12
template <class T, int n, int all> DICP_INLINE isa::reg<T, all> tiled(isa::reg<T, n> few) {  // again and again
  if constexpr (n == all) return few;
  else return tiled<T, 2 * n, all>(isa::join<T, 2 * n>(few, few));
}
template <int times, int first, class R, int... i> DICP_INLINE auto repeat(R r, isa::Seq<i...>) {
  return __builtin_shufflevector(r, r, ((i + first) / times)...);
}
template <int times, class T> DICP_INLINE vec<T> repeated_full(const T* p) {
  constexpr int count = LANES / times, bytes = count * sizeof(T), all = sizeof(T) == 8 ? LANES / 2 : LANES;
  isa::reg<raw<T>, all> some;
  if constexpr (bytes <= 8) {
    using Bits = choose<bytes == 8, uint64_t, choose<bytes == 4, uint32_t, uint16_t>>;
    Bits bits;
    __builtin_memcpy(&bits, p, bytes);
    some = (isa::reg<raw<T>, all>)(isa::reg<Bits, all * sizeof(T) / bytes>{} + bits);
  } else {
    isa::reg<raw<T>, count> few;
    __builtin_memcpy(&few, p, bytes);
    some = tiled<raw<T>, count, all>(few);
  }
  if constexpr (sizeof(T) == 8) return {repeat<times, 0>(some, isa::seq<all>()), repeat<times, all>(some, isa::seq<all>())};
  else return decode<T>(repeat<times, 0>(some, isa::seq<>()));
}
#else
template <int times, class T> DICP_INLINE vec<T> repeated_full(const T* p) {
  return gather(p, Repeated<times>(), Full());
}
#endif
template <int times, class T, class N, class... M>
DICP_INLINE vec<T> load_repeated(const T* p, N lanes, M... m) {
  if constexpr (same<N, Full> && sizeof...(M) == 0 && times < LANES) return repeated_full<times>(p);
  else return gather(p, Repeated<times>(), lanes, m...);
}

// Elements of LANES rows, `stride` apart, whose columns can be loaded as vectors. Rows beyond `lanes` and columns beyond
// `columns` are neither read nor defined.
template <class T> struct TransposedTile {
  alignas(64) T tile[LANES * LANES];
  template <class N> DICP_INLINE void load(const T* p, int64_t stride, N lanes, int64_t columns) {
    if constexpr (sizeof(T) <= 4 && same<N, Full>)
      if (columns == LANES) {
        isa::reg<raw<T>> row[LANES];
        for (int i = 0; i < LANES; ++i) row[i] = isa::load_rows((const raw<T>*)(p + i * stride));
        isa::transpose(row);
        for (int i = 0; i < LANES; ++i) isa::store_rows((raw<T>*)tile + i * LANES, row[i]);
        return;
      }
    for (int i = 0; i < count(lanes); ++i)
      for (int k = 0; k < columns; ++k) tile[k * LANES + i] = p[i * stride + k];
  }
  DICP_INLINE T* column(int64_t k) { return tile + k * LANES; }
  template <class N> DICP_INLINE void store(T* p, int64_t stride, N lanes, int64_t columns) const {
    if constexpr (sizeof(T) <= 4 && same<N, Full>)
      if (columns == LANES) {
        isa::reg<raw<T>> row[LANES];
        for (int i = 0; i < LANES; ++i) row[i] = isa::load_rows((const raw<T>*)tile + i * LANES);
        isa::transpose(row);
        for (int i = 0; i < LANES; ++i) isa::store_rows((raw<T>*)(p + i * stride), row[i]);
        return;
      }
    for (int i = 0; i < count(lanes); ++i)
      for (int k = 0; k < columns; ++k) p[i * stride + k] = tile[k * LANES + i];
  }
};

// rows[k * n + j] = p[j * stride + k], of n columns of up to LANES rows
template <class T> inline void load_transposed(T* rows, const T* p, int64_t stride, int64_t n, int64_t count) {
  for (int64_t j = 0; j < n; j += LANES) {
    TransposedTile<T> tile;
    if (n - j >= LANES) {
      tile.load(p + j * stride, stride, Full{}, count);
      for (int64_t k = 0; k < count; ++k) __builtin_memcpy(rows + k * n + j, tile.column(k), LANES * sizeof(T));
    } else {
      tile.load(p + j * stride, stride, Lanes{(int)(n - j)}, count);
      for (int64_t k = 0; k < count; ++k) __builtin_memcpy(rows + k * n + j, tile.column(k), (n - j) * sizeof(T));
    }
  }
}

// p[j * stride + k] = rows[k * n + j]
template <class T> inline void store_transposed(T* p, int64_t stride, const T* rows, int64_t n, int64_t count) {
  for (int64_t j = 0; j < n; j += LANES) {
    TransposedTile<T> tile;
    const int64_t columns = n - j < LANES ? n - j : LANES;
    if (count == LANES) {
      tile.load(rows + j, n, Full{}, columns);
      for (int64_t k = 0; k < columns; ++k) __builtin_memcpy(p + (j + k) * stride, tile.column(k), LANES * sizeof(T));
    } else {
      tile.load(rows + j, n, Lanes{(int)count}, columns);
      for (int64_t k = 0; k < columns; ++k) __builtin_memcpy(p + (j + k) * stride, tile.column(k), count * sizeof(T));
    }
  }
}

// scatter: p[idx[i]] = v[i] in lane order, store_strided: p[i * stride] = v[i]
template <class T, class I, class V, class N, class... M>
DICP_INLINE void scatter(T* p, I idx, V v, N lanes, M... m) {
  raw<T> buffer[LANES];
  isa::store_rows(buffer, encode<T>(v));
  for_active(lanes, m..., [&](int i) { ((raw<T>*)p)[idx[i]] = buffer[i]; });
}
template <class T, class V, class N, class... M>
DICP_INLINE void store_strided(T* p, int64_t stride, V v, N lanes, M... m) {
  scatter(p, Stride{stride}, v, lanes, m...);
}
// store_pairs: p[2 i] = v[i], p[2 i + 1] = w[i]
template <class R, int... i> DICP_INLINE R in_pairs(R v, R w, isa::Seq<i...>, int half) {
  constexpr int mid = LANES / 2;
#if defined(__clang__) || __GNUC__ >= 12
  if (half == 0) return __builtin_shufflevector(v, w, (i / 2 + i % 2 * LANES)...);
  return __builtin_shufflevector(v, w, (mid + i / 2 + i % 2 * LANES)...);
#else
  using At = isa::reg<choose<sizeof(v[0]) == 4, int32_t, choose<sizeof(v[0]) == 2, int16_t, int8_t>>>;
  if (half == 0) return __builtin_shuffle(v, w, At{(i / 2 + i % 2 * LANES)...});
  return __builtin_shuffle(v, w, At{(mid + i / 2 + i % 2 * LANES)...});
#endif
}
template <class T, class V, class N> DICP_INLINE void store_pairs(T* p, V v, V w, N lanes) {
  if constexpr (same<N, Full> && sizeof(T) <= 4) {
    const auto a = encode<T>(v), b = encode<T>(w);
    isa::store_rows((raw<T>*)p, in_pairs(a, b, isa::seq<>(), 0));
    isa::store_rows((raw<T>*)p + LANES, in_pairs(a, b, isa::seq<>(), 1));
  } else {
    store_strided(p, 2, v, lanes);
    store_strided(p + 1, 2, w, lanes);
  }
}

// add_to, atomic_add: *p += v in the type that computes T
template <class T, class S> DICP_INLINE void add_to(T* p, S v) {
  *p = encode_one<T>(decode_one(*p) + (scalar<vec<T>>)v);
}
template <class T, class S> DICP_INLINE void atomic_add(T* p, S v) {
  if constexpr (same<raw<T>, T> && !same<T, float> && !same<T, double>) {
    __atomic_fetch_add(p, (T)v, __ATOMIC_RELAXED);
  } else {
    using Plain = choose<sizeof(T) == 8, uint64_t, choose<sizeof(T) == 4, uint32_t, uint16_t>>;
    typedef Plain __attribute__((may_alias)) Bits;
    Bits old = __atomic_load_n((Bits*)p, __ATOMIC_RELAXED), sum;
    do {
      sum = bitcast<Plain>(encode_one<T>(decode_one(bitcast<T>((Plain)old)) + (scalar<vec<T>>)v));
    } while (!__atomic_compare_exchange_n((Bits*)p, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
}

// scatter_add, scatter_atomic_add: p[idx[i]] += v[i] lane by lane, so equal indices all count
template <class T, class I, class V, class N, class... M>
DICP_INLINE void scatter_add(T* p, I idx, V v, N lanes, M... m) {
  Array<vec<T>> value(cast<vec<T>>(v));
  for_active(lanes, m..., [&](int i) { add_to(p + idx[i], value.at[i]); });
}
template <class T, class I, class V, class N, class... M>
DICP_INLINE void scatter_atomic_add(T* p, I idx, V v, N lanes, M... m) {
  Array<vec<T>> value(cast<vec<T>>(v));
  for_active(lanes, m..., [&](int i) { atomic_add(p + idx[i], value.at[i]); });
}

}  // namespace dicp
