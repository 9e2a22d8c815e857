// The registers, and the few instructions that the compilers' vector extension cannot spell.
// GCC's <immintrin.h> takes 0.3 s to parse, longer than a whole kernel: hence the __builtin_ia32_* names.
#pragma once
#include <stdint.h>

#ifndef DICP_LANES
#define DICP_LANES 4
#endif
#define DICP_INLINE inline __attribute__((always_inline))
#define DICP_EXPORT extern "C" __attribute__((visibility("default")))
#define DICP_AVX512 (DICP_LANES == 16)
#define DICP_AVX2 (DICP_LANES == 8)
#if DICP_AVX512 && \
    !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__))
#error "DICP_LANES=16 needs -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"
#elif DICP_AVX2 && !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#error "DICP_LANES=8 needs -mavx2 -mfma -mf16c"
#elif !DICP_AVX512 && !DICP_AVX2 && DICP_LANES != 4
#error "DICP_LANES is 4, 8 or 16"
#endif

namespace dicp {

constexpr int LANES = DICP_LANES;

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // float8_e4m3fn
struct e5m2 { uint8_t bits; };

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
template <bool c, class A, class B> struct Choose { using type = A; };
template <class A, class B> struct Choose<false, A, B> { using type = B; };
template <bool c, class A, class B> using choose = typename Choose<c, A, B>::type;

template <class To, class From> DICP_INLINE To bitcast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bitcast keeps the size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

namespace isa {

template <class T, int n> struct Reg { typedef T type __attribute__((vector_size(sizeof(T) * n))); };
template <class T, int n = LANES> using reg = typename Reg<T, n>::type;
template <class T> using half_reg = reg<T, LANES / 2>;

template <bool b> struct Bool { static constexpr bool value = b; };
template <int... i> struct Seq {};
template <int n, int... i> struct MakeSeq : MakeSeq<n - 1, n - 1, i...> {};
template <int... i> struct MakeSeq<0, i...> { using type = Seq<i...>; };
template <int n = LANES> using seq = typename MakeSeq<n>::type;

// low, high, join: a register of n lanes as two of n/2
#if defined(__clang__) || __GNUC__ >= 12
template <class T, int n, int start, int... i> DICP_INLINE reg<T, n / 2> part(reg<T, n> v, Seq<i...>) {
  return __builtin_shufflevector(v, v, (i + start)...);
}
template <class T, int n, int... i>
DICP_INLINE reg<T, n> join_parts(reg<T, n / 2> a, reg<T, n / 2> b, Seq<i...>) {
  return __builtin_shufflevector(a, b, i...);
}
template <class T, int n>
DICP_INLINE reg<T, n / 2> low(reg<T, n> v) { return part<T, n, 0>(v, seq<n / 2>()); }
template <class T, int n>
DICP_INLINE reg<T, n / 2> high(reg<T, n> v) { return part<T, n, n / 2>(v, seq<n / 2>()); }
template <class T, int n> DICP_INLINE reg<T, n> join(reg<T, n / 2> a, reg<T, n / 2> b) {
  return join_parts<T, n>(a, b, seq<n>());
}
#else
template <class T, int n> struct Parts { reg<T, n / 2> lo, hi; };
template <class T, int n> DICP_INLINE reg<T, n / 2> low(reg<T, n> v) { return bitcast<Parts<T, n>>(v).lo; }
template <class T, int n> DICP_INLINE reg<T, n / 2> high(reg<T, n> v) { return bitcast<Parts<T, n>>(v).hi; }
template <class T, int n> DICP_INLINE reg<T, n> join(reg<T, n / 2> a, reg<T, n / 2> b) {
  return bitcast<reg<T, n>>(Parts<T, n>{a, b});
}
#endif

// transpose: LANES registers as the rows of a square, turned. A step swaps one bit of the numbers of row and column.
template <int step, bool second, class R, int... i> DICP_INLINE R swapped(R a, R b, Seq<i...>) {
  constexpr int n = LANES;
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (second ? (i & step ? i + n : i + step) : (i & step ? i - step + n : i))...);
#else
  R out;
  ((out[i] = second ? (i & step ? b[i] : a[i + step]) : (i & step ? b[i - step] : a[i])), ...);
  return out;
#endif
}
template <int step = 1, class R> DICP_INLINE void transpose(R* row) {
  if constexpr (step < LANES) {
#pragma GCC unroll 16
    for (int k = 0; k < LANES; ++k)
      if (!(k & step)) {
        const R a = row[k], b = row[k + step];
        row[k] = swapped<step, false>(a, b, seq<>());
        row[k + step] = swapped<step, true>(a, b, seq<>());
      }
    transpose<2 * step>(row);
  }
}

// convert: lane by lane, C rules. GCC 12 splits conversions that change the lane width: name the instruction.
template <class To, class From, int n> DICP_INLINE reg<To, n> convert(reg<From, n> v) {
#if DICP_AVX512 && !defined(__clang__)
  using Out = reg<To, n>;
  constexpr bool narrow_int = same<From, int32_t> && sizeof(To) < 4;
  Out zero{};
  if constexpr (same<From, float> && same<To, double>) return __builtin_ia32_cvtps2pd512_mask(v, zero, -1, 4);
  if constexpr (same<From, double> && same<To, float>) return __builtin_ia32_cvtpd2ps512_mask(v, zero, -1, 4);
  if constexpr (same<From, int32_t> && same<To, double>) return __builtin_ia32_cvtdq2pd512_mask(v, zero, -1);
  if constexpr (same<From, double> && same<To, int32_t>)
    return __builtin_ia32_cvttpd2dq512_mask(v, zero, -1, 4);
  using v8ll = reg<long long, 8>;
  using v16c = reg<char, 16>;
  using v16s = reg<short, 16>;
  if constexpr (same<From, int32_t> && same<To, int64_t>)
    return (Out)__builtin_ia32_pmovsxdq512_mask(v, v8ll{}, -1);
  if constexpr (same<From, int64_t> && same<To, int32_t>)
    return __builtin_ia32_pmovqd512_mask((v8ll)v, zero, -1);
  if constexpr (same<From, int8_t> && same<To, int16_t>) return (Out)__builtin_ia32_pmovsxbw256((v16c)v);
  else if constexpr (same<From, uint8_t> && same<To, uint16_t>) return (Out)__builtin_ia32_pmovzxbw256((v16c)v);
  else if constexpr (same<From, int8_t>) return (Out)__builtin_ia32_pmovsxbd512_mask((v16c)v, reg<int>{}, -1);
  else if constexpr (same<From, uint8_t>) return (Out)__builtin_ia32_pmovzxbd512_mask((v16c)v, reg<int>{}, -1);
  if constexpr (same<From, int16_t>) return (Out)__builtin_ia32_pmovsxwd512_mask((v16s)v, reg<int>{}, -1);
  if constexpr (same<From, uint16_t>) return (Out)__builtin_ia32_pmovzxwd512_mask((v16s)v, reg<int>{}, -1);
  if constexpr (narrow_int && sizeof(To) == 1) return (Out)__builtin_ia32_pmovdb512_mask(v, v16c{}, -1);
  if constexpr (narrow_int && sizeof(To) == 2) return (Out)__builtin_ia32_pmovdw512_mask(v, v16s{}, -1);
#elif DICP_AVX2 && !defined(__clang__)
  if constexpr (same<From, float> && same<To, double>) return __builtin_ia32_cvtps2pd256(v);
  if constexpr (same<From, double> && same<To, float>) return __builtin_ia32_cvtpd2ps256(v);
  if constexpr (same<From, int32_t> && same<To, double>) return __builtin_ia32_cvtdq2pd256(v);
  if constexpr (same<From, double> && same<To, int32_t>) return __builtin_ia32_cvttpd2dq256(v);
  if constexpr (same<From, int32_t> && same<To, int64_t>) return (reg<To, n>)__builtin_ia32_pmovsxdq256(v);
  if constexpr (same<From, int16_t>) return (reg<To, n>)__builtin_ia32_pmovsxwd256((reg<short, 8>)v);
  if constexpr (same<From, uint16_t>) return (reg<To, n>)__builtin_ia32_pmovzxwd256((reg<short, 8>)v);
  if constexpr (sizeof(From) == 1) {
    reg<char, 16> wide = (reg<char, 16>)reg<int64_t, 2>{bitcast<int64_t>(v), 0};
    if constexpr (same<From, int8_t> && same<To, int16_t>) return (reg<To, n>)__builtin_ia32_pmovsxbw128(wide);
    else if constexpr (same<To, uint16_t>) return (reg<To, n>)__builtin_ia32_pmovzxbw128(wide);
    else if constexpr (same<From, int8_t>) return (reg<To, n>)__builtin_ia32_pmovsxbd256(wide);
    else return (reg<To, n>)__builtin_ia32_pmovzxbd256(wide);
  }
  if constexpr (same<From, int32_t> && sizeof(To) == 1) {
    reg<char, 32> pick = {0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    reg<int32_t> packed = (reg<int32_t>)__builtin_ia32_pshufb256((reg<char, 32>)v, pick);
    return (reg<To, n>)reg<int32_t, 2>{packed[0], packed[4]};
  }
#endif
  return __builtin_convertvector(v, reg<To, n>);
}

// Mask: which lanes a load or store may touch. Bits with AVX-512, else int32 lanes of 0 or -1.
#if DICP_AVX512
using Mask = uint16_t;
DICP_INLINE Mask mask_of(int n) { return (Mask)((1u << n) - 1); }
DICP_INLINE Mask mask_of(reg<int32_t> m) { return (Mask)__builtin_ia32_cvtd2mask512(m); }
DICP_INLINE reg<int32_t> lanes_of(Mask k) { return (reg<int32_t>)__builtin_ia32_cvtmask2d512(k); }
#else
using Mask = reg<int32_t>;
template <int... i> DICP_INLINE reg<int32_t> first_lanes(int n, Seq<i...>) { return reg<int32_t>{i...} < n; }
DICP_INLINE Mask mask_of(int n) { return first_lanes(n, seq<>()); }
DICP_INLINE Mask mask_of(reg<int32_t> m) { return m; }
DICP_INLINE reg<int32_t> lanes_of(Mask m) { return m; }
#endif


// rows: the registers of LANES storage elements (one, or two when 8 bytes each)
template <class T> struct Two;
template <class T> struct Rows { using type = reg<T>; };
template <> struct Rows<double> { using type = Two<double>; };
template <> struct Rows<int64_t> { using type = Two<int64_t>; };
template <class T> using rows = typename Rows<T>::type;

// Two: 64-bit lanes. GCC keeps a vector wider than a register in memory, a struct of two in registers.
template <class T> struct Two {
  half_reg<T> lo, hi;
  Two() = default;
  DICP_INLINE Two(half_reg<T> a, half_reg<T> b) : lo(a), hi(b) {}
  DICP_INLINE Two(T s) : lo(fill(s, seq<LANES / 2>())), hi(lo) {}
  DICP_INLINE T operator[](int i) const { return i < LANES / 2 ? lo[i] : hi[i - LANES / 2]; }
#define DICP_OP(op)                                                                                  \
  friend DICP_INLINE Two operator op(Two a, Two b) { return {a.lo op b.lo, a.hi op b.hi}; }          \
  friend DICP_INLINE Two& operator op##=(Two& a, Two b) { return a = a op b; }
  DICP_OP(+) DICP_OP(-) DICP_OP(*) DICP_OP(/) DICP_OP(&) DICP_OP(|) DICP_OP(^) DICP_OP(<<) DICP_OP(>>)
#undef DICP_OP
  friend DICP_INLINE Two operator-(Two a) { return {-a.lo, -a.hi}; }
  friend DICP_INLINE Two operator~(Two a) { return {~a.lo, ~a.hi}; }

 private:
  template <int... i> static DICP_INLINE half_reg<T> fill(T s, Seq<i...>) {
    return half_reg<T>{((void)i, s)...};
  }
};

// load_rows, store_rows: memory to registers, no alignment needed; masked lanes touch no memory and read 0
struct AnyPtr {  // GCC and clang declare the same builtins with different pointer types
  const void* p;
  template <class U> DICP_INLINE operator U*() const { return (U*)p; }
};

template <class T> DICP_INLINE rows<T> load_rows(const T* p) {
  rows<T> r;
  if constexpr (sizeof(T) == 8) {
    __builtin_memcpy(&r.lo, p, sizeof r.lo);
    __builtin_memcpy(&r.hi, p + LANES / 2, sizeof r.hi);
  } else {
    __builtin_memcpy(&r, p, sizeof r);
  }
  return r;
}

template <class T> DICP_INLINE void store_rows(T* p, rows<T> r) {
  if constexpr (sizeof(T) == 8) {
    __builtin_memcpy(p, &r.lo, sizeof r.lo);
    __builtin_memcpy(p + LANES / 2, &r.hi, sizeof r.hi);
  } else {
    __builtin_memcpy(p, &r, sizeof r);
  }
}

template <class T> DICP_INLINE rows<T> load_rows(const T* p, Mask k) {
#if DICP_AVX512
  AnyPtr at{p}, upper{p + LANES / 2};
  using v8ll = reg<long long, 8>;
  if constexpr (sizeof(T) == 1) return (rows<T>)__builtin_ia32_loaddquqi128_mask(at, reg<char>{}, k);
  else if constexpr (sizeof(T) == 2) return (rows<T>)__builtin_ia32_loaddquhi256_mask(at, reg<short>{}, k);
  else if constexpr (sizeof(T) == 4) return (rows<T>)__builtin_ia32_loaddqusi512_mask(at, reg<int>{}, k);
  else return {(half_reg<T>)__builtin_ia32_loaddqudi512_mask(at, v8ll{}, (uint8_t)k),
               (half_reg<T>)__builtin_ia32_loaddqudi512_mask(upper, v8ll{}, (uint8_t)(k >> 8))};
#else
#if DICP_AVX2
  using v4ll = reg<long long, 4>;
  if constexpr (sizeof(T) == 4) return (rows<T>)__builtin_ia32_maskloadd256(AnyPtr{p}, k);
  if constexpr (sizeof(T) == 8) {
    v4ll a = (v4ll)convert<int64_t, int32_t, 4>(low<int32_t, 8>(k));
    v4ll b = (v4ll)convert<int64_t, int32_t, 4>(high<int32_t, 8>(k));
    return {(half_reg<T>)__builtin_ia32_maskloadq256(AnyPtr{p}, a),
            (half_reg<T>)__builtin_ia32_maskloadq256(AnyPtr{p + 4}, b)};
  }
#endif
  T buffer[LANES] = {};
  for (int i = 0; i < LANES; ++i)
    if (k[i]) buffer[i] = p[i];
  return load_rows<T>(buffer);
#endif
}

// gather_rows: p[at[i]] of 4 bytes, by one instruction where there is one; masked lanes touch no memory and read 0
template <class T> DICP_INLINE rows<T> gather_rows(const T* p, reg<int32_t> at, Mask k) {
#if DICP_AVX512
  return (rows<T>)__builtin_ia32_gathersiv16si(reg<int>{}, AnyPtr{p}, at, k, 4);
#elif DICP_AVX2 && defined(__clang__)
  return (rows<T>)__builtin_ia32_gatherd_d256(reg<int>{}, AnyPtr{p}, at, k, 4);
#elif DICP_AVX2
  return (rows<T>)__builtin_ia32_gathersiv8si(reg<int>{}, AnyPtr{p}, at, k, 4);
#else
  T buffer[LANES] = {};
  for (int i = 0; i < LANES; ++i)
    if (k[i]) buffer[i] = p[at[i]];
  return load_rows<T>(buffer);
#endif
}

template <class T> DICP_INLINE void store_rows(T* p, rows<T> r, Mask k) {
#if DICP_AVX512
  AnyPtr at{p}, upper{p + LANES / 2};
  using v8ll = reg<long long, 8>;
  if constexpr (sizeof(T) == 1) __builtin_ia32_storedquqi128_mask(at, (reg<char>)r, k);
  else if constexpr (sizeof(T) == 2) __builtin_ia32_storedquhi256_mask(at, (reg<short>)r, k);
  else if constexpr (sizeof(T) == 4) __builtin_ia32_storedqusi512_mask(at, (reg<int>)r, k);
  else {
    __builtin_ia32_storedqudi512_mask(at, (v8ll)r.lo, (uint8_t)k);
    __builtin_ia32_storedqudi512_mask(upper, (v8ll)r.hi, (uint8_t)(k >> 8));
  }
#else
#if DICP_AVX2
  using v4ll = reg<long long, 4>;
  if constexpr (sizeof(T) == 4) return __builtin_ia32_maskstored256(AnyPtr{p}, k, (reg<int>)r);
  if constexpr (sizeof(T) == 8) {
    v4ll a = (v4ll)convert<int64_t, int32_t, 4>(low<int32_t, 8>(k));
    v4ll b = (v4ll)convert<int64_t, int32_t, 4>(high<int32_t, 8>(k));
    __builtin_ia32_maskstoreq256(AnyPtr{p}, a, (v4ll)r.lo);
    return __builtin_ia32_maskstoreq256(AnyPtr{p + 4}, b, (v4ll)r.hi);
  }
#endif
  T buffer[LANES];
  store_rows<T>(buffer, r);
  for (int i = 0; i < LANES; ++i)
    if (k[i]) p[i] = buffer[i];
#endif
}

// load_first, store_first: of the first n lanes, 0 <= n <= LANES. Without masks in registers of their own these are
// pieces of 4, 2 and 1: a masked store takes some 20 cycles on the AMD processors that have AVX2 alone, and what is
// stored by pieces is not forwarded to a load of the whole
template <class T> DICP_INLINE rows<T> load_first(const T* p, int n) {
  if constexpr (DICP_AVX512 || (DICP_AVX2 && sizeof(T) >= 4)) return load_rows(p, mask_of(n));
  if (n >= LANES) return load_rows(p);
  if constexpr (sizeof(T) <= 2 && LANES == 8) {
    using Half = choose<sizeof(T) == 2, uint64_t, uint32_t>;  // of four lanes
    using Pair = choose<sizeof(T) == 2, uint32_t, uint16_t>;
    Half four = 0, rest = 0;
    Pair two = 0;
    const bool upper = n & 4;
    if (upper) __builtin_memcpy(&four, p, sizeof four);
    if (n & 2) __builtin_memcpy(&two, p + (n & 4), sizeof two);
    rest = two;
    if (n & 1) rest |= (Half)(choose<sizeof(T) == 2, uint16_t, uint8_t>)p[n - 1] << (8 * sizeof(T) * (n & 2));
    const Half halves[2] = {upper ? four : rest, upper ? rest : 0};
    rows<T> r;
    __builtin_memcpy(&r, halves, sizeof r);
    return r;
  }
  T buffer[LANES] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_rows<T>(buffer);
}
template <class T> DICP_INLINE void store_first(T* p, rows<T> r, int n) {
  if constexpr (DICP_AVX512) return store_rows(p, r, mask_of(n));
  if (n >= LANES) return store_rows(p, r);
  T buffer[LANES];
  store_rows<T>(buffer, r);
  int done = 0;
#pragma GCC unroll 8
  for (int piece = LANES / 2; piece > 0; piece /= 2) {
    if (!(n & piece)) continue;
    __builtin_memcpy(p + done, buffer + done, piece * sizeof(T));
    done += piece;
  }
}

// larger, smaller: a > b ? a : b and a < b ? a : b, which is b where either is NaN. GCC does not see one
// instruction in it once more conditions follow.
template <class R> DICP_INLINE R larger(R a, R b) {
#if DICP_AVX512 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_maxps512_mask(a, b, a, -1, 4);
  if constexpr (same<R, half_reg<double>>) return __builtin_ia32_maxpd512_mask(a, b, a, -1, 4);
#elif DICP_AVX2 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_maxps256(a, b);
  if constexpr (same<R, half_reg<double>>) return __builtin_ia32_maxpd256(a, b);
#endif
  return a > b ? a : b;
}
template <class R> DICP_INLINE R smaller(R a, R b) {
#if DICP_AVX512 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_minps512_mask(a, b, a, -1, 4);
  if constexpr (same<R, half_reg<double>>) return __builtin_ia32_minpd512_mask(a, b, a, -1, 4);
#elif DICP_AVX2 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_minps256(a, b);
  if constexpr (same<R, half_reg<double>>) return __builtin_ia32_minpd256(a, b);
#endif
  return a < b ? a : b;
}

// round_reg, fma_reg, sqrt_reg: R is reg<float> or half_reg<double>; by lanes where no instruction is named
enum Rounding { NEAREST = 8, FLOOR = 9, CEIL = 10, TRUNC = 11 };  // the immediates of roundps and rndscaleps

DICP_INLINE float round_scalar(float x, int mode) {
  return mode == NEAREST ? __builtin_rintf(x) : mode == FLOOR ? __builtin_floorf(x)
       : mode == CEIL ? __builtin_ceilf(x) : __builtin_truncf(x);
}
DICP_INLINE double round_scalar(double x, int mode) {
  return mode == NEAREST ? __builtin_rint(x) : mode == FLOOR ? __builtin_floor(x)
       : mode == CEIL ? __builtin_ceil(x) : __builtin_trunc(x);
}
DICP_INLINE float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DICP_INLINE double fma_scalar(double a, double b, double c) { return __builtin_fma(a, b, c); }
DICP_INLINE float sqrt_scalar(float x) { return __builtin_sqrtf(x); }
DICP_INLINE double sqrt_scalar(double x) { return __builtin_sqrt(x); }

template <int mode, class R> DICP_INLINE R round_reg(R v) {
#if DICP_AVX512
  if constexpr (same<R, reg<float>>) return __builtin_ia32_rndscaleps_mask(v, mode, v, -1, 4);
  else return __builtin_ia32_rndscalepd_mask(v, mode, v, -1, 4);
#elif DICP_AVX2
  if constexpr (same<R, reg<float>>) return __builtin_ia32_roundps256(v, mode);
  else return __builtin_ia32_roundpd256(v, mode);
#else
  for (int i = 0; i < (int)(sizeof v / sizeof v[0]); ++i) v[i] = round_scalar(v[i], mode);
  return v;
#endif
}
template <class R> DICP_INLINE R fma_reg(R a, R b, R c) {
#if DICP_AVX512
  if constexpr (same<R, reg<float>>) return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
  else return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
#elif DICP_AVX2 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_vfmaddps256(a, b, c);
  else return __builtin_ia32_vfmaddpd256(a, b, c);
#else
  for (int i = 0; i < (int)(sizeof c / sizeof c[0]); ++i) c[i] = fma_scalar(a[i], b[i], c[i]);
  return c;
#endif
}
template <class R> DICP_INLINE R sqrt_reg(R v) {
#if DICP_AVX512 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_sqrtps512_mask(v, v, -1, 4);
  else return __builtin_ia32_sqrtpd512_mask(v, v, -1, 4);
#elif DICP_AVX2 && !defined(__clang__)
  if constexpr (same<R, reg<float>>) return __builtin_ia32_sqrtps256(v);
  else return __builtin_ia32_sqrtpd256(v);
#else
  for (int i = 0; i < (int)(sizeof v / sizeof v[0]); ++i) v[i] = sqrt_scalar(v[i]);
  return v;
#endif
}

// One register of zeros to an address that a register's size divides, past the caches where the instruction exists.
DICP_INLINE void stream_zeros(char* p) {
#if defined(__clang__)
  __builtin_nontemporal_store(reg<long long, LANES / 2>{}, (reg<long long, LANES / 2>*)p);
#elif DICP_AVX512
  __builtin_ia32_movntdq512((reg<long long, 8>*)p, reg<long long, 8>{});
#elif DICP_AVX2
  __builtin_ia32_movntdq256((reg<long long, 4>*)p, reg<long long, 4>{});
#else
  *(reg<long long, LANES / 2>*)p = reg<long long, LANES / 2>{};
#endif
}
// What has been streamed is seen by other threads before what is stored next.
DICP_INLINE void stream_end() {
#if DICP_AVX512 || DICP_AVX2
  __builtin_ia32_sfence();
#endif
}

}  // namespace isa
}  // namespace dicp
