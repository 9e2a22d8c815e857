// The AVX-512 builtins that generated code calls, in instructions of AVX2, so that kernels with vectors of 16 run on
// a processor without them: included before everything else by the compiler `cxx` in this folder. Semantics: Intel's
// Software Developer's Manual, volume 2.
#pragma once
#if DICP_LANES == 16
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1

namespace emulated {

typedef char v16c __attribute__((vector_size(16)));
typedef short v8s __attribute__((vector_size(16)));
typedef short v16s __attribute__((vector_size(32)));
typedef int v8i __attribute__((vector_size(32)));
typedef int v16i __attribute__((vector_size(64)));
typedef long long v8l __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));
typedef float v16f __attribute__((vector_size(64)));
typedef double v4d __attribute__((vector_size(32)));
typedef double v8d __attribute__((vector_size(64)));
using mask8 = unsigned char;
using mask16 = unsigned short;

#define EMULATED static inline __attribute__((always_inline))
template <class V> constexpr int lanes = sizeof(V) / sizeof(V{}[0]);

// a register of 64 bytes as two of 32
template <class H, class W> struct Halves { H lo, hi; };
template <class H, class W> EMULATED Halves<H, W> halves(W w) {
  Halves<H, W> h;
  __builtin_memcpy(&h, &w, sizeof h);
  return h;
}
template <class W, class H> EMULATED W whole(H lo, H hi) {
  Halves<H, W> h{lo, hi};
  W w;
  __builtin_memcpy(&w, &h, sizeof w);
  return w;
}

// masked lanes touch no memory; those of a load are taken from `other`
template <class T, class V, class K> EMULATED V load(const T* p, V other, K k) {
  for (int i = 0; i < lanes<V>; ++i)
    if (k >> i & 1) other[i] = p[i];
  return other;
}
template <class T, class V, class K> EMULATED void store(T* p, V v, K k) {
  for (int i = 0; i < lanes<V>; ++i)
    if (k >> i & 1) p[i] = v[i];
}
EMULATED v16c load16c(const char* p, v16c other, mask16 k) { return load(p, other, k); }
EMULATED v16s load16s(const short* p, v16s other, mask16 k) { return load(p, other, k); }
EMULATED v16i load16i(const int* p, v16i other, mask16 k) { return load(p, other, k); }
EMULATED v16i gather16i(v16i other, const int* p, v16i at, mask16 k, int) {  // of elements of 4 bytes
  for (int i = 0; i < 16; ++i)
    if (k >> i & 1) other[i] = p[at[i]];
  return other;
}
EMULATED v8l load8l(const long long* p, v8l other, mask8 k) { return load(p, other, k); }
EMULATED void store16c(char* p, v16c v, mask16 k) { store(p, v, k); }
EMULATED void store16s(short* p, v16s v, mask16 k) { store(p, v, k); }
EMULATED void store16i(int* p, v16i v, mask16 k) { store(p, v, k); }
EMULATED void store8l(long long* p, v8l v, mask8 k) { store(p, v, k); }
EMULATED void stream(v8l* p, v8l v) { *p = v; }

// bits to lanes and back
EMULATED mask16 signs(v16i v) {
  auto h = halves<v8f>(v);
  return (mask16)(__builtin_ia32_movmskps256(h.lo) | __builtin_ia32_movmskps256(h.hi) << 8);
}
EMULATED v16i lanes_of(mask16 k) {
  v16i bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (bit & (int)k) != 0;
}
EMULATED mask16 unpack(mask16 high, mask16 low) { return (mask16)(high << 8 | (low & 255)); }
template <class V> EMULATED V blend(V a, V b, mask8 k) {
  for (int i = 0; i < lanes<V>; ++i)
    if (k >> i & 1) a[i] = b[i];
  return a;
}

// lane by lane; `old` stands for the lanes that a mask leaves out, and every caller's mask is full
template <class To, class From> EMULATED To convert(From v) { return __builtin_convertvector(v, To); }
template <class V, class Old> EMULATED Old widen_unsigned(V v, Old) {
  Old out;
  for (int i = 0; i < lanes<V>; ++i) out[i] = sizeof(v[0]) == 1 ? (unsigned char)v[i] : (unsigned short)v[i];
  return out;
}
EMULATED v8d widen(v8f v, v8d, int, int) { return convert<v8d>(v); }
EMULATED v8f narrow(v8d v, v8f, int, int) { return convert<v8f>(v); }
EMULATED v8d widen(v8i v, v8d, int) { return convert<v8d>(v); }
EMULATED v8i truncate(v8d v, v8i, int, int) {
  auto h = halves<v4d>(v);
  typedef int v4i __attribute__((vector_size(16)));
  return whole<v8i>((v4i)__builtin_ia32_cvttpd2dq256(h.lo), (v4i)__builtin_ia32_cvttpd2dq256(h.hi));
}
template <class V, class Old> EMULATED Old widen_signed(V v, Old, int) { return convert<Old>(v); }
template <class V, class Old> EMULATED Old widen_unsigned(V v, Old old, int) { return widen_unsigned(v, old); }
template <class V, class Old> EMULATED Old cut(V v, Old, int) { return convert<Old>(v); }
EMULATED v16f from_half(v16s v, v16f, int, int) {
  auto h = halves<v8s>(v);
  return whole<v16f>((v8f)__builtin_ia32_vcvtph2ps256(h.lo), (v8f)__builtin_ia32_vcvtph2ps256(h.hi));
}
EMULATED v16s to_half(v16f v, int, v16s, int) {
  auto h = halves<v8f>(v);
  return whole<v16s>((v8s)__builtin_ia32_vcvtps2ph256(h.lo, 0), (v8s)__builtin_ia32_vcvtps2ph256(h.hi, 0));
}

// arithmetic
template <class V> EMULATED V larger(V a, V b, V, int, int) { return a > b ? a : b; }
template <class V> EMULATED V smaller(V a, V b, V, int, int) { return a < b ? a : b; }
EMULATED v16f fma(v16f a, v16f b, v16f c, int, int) {
  auto x = halves<v8f>(a), y = halves<v8f>(b), z = halves<v8f>(c);
  return whole<v16f>((v8f)__builtin_ia32_vfmaddps256(x.lo, y.lo, z.lo),
                     (v8f)__builtin_ia32_vfmaddps256(x.hi, y.hi, z.hi));
}
EMULATED v8d fma(v8d a, v8d b, v8d c, int, int) {
  auto x = halves<v4d>(a), y = halves<v4d>(b), z = halves<v4d>(c);
  return whole<v8d>((v4d)__builtin_ia32_vfmaddpd256(x.lo, y.lo, z.lo),
                    (v4d)__builtin_ia32_vfmaddpd256(x.hi, y.hi, z.hi));
}
EMULATED v16f sqrt(v16f v, v16f, int, int) {
  auto h = halves<v8f>(v);
  return whole<v16f>((v8f)__builtin_ia32_sqrtps256(h.lo), (v8f)__builtin_ia32_sqrtps256(h.hi));
}
EMULATED v8d sqrt(v8d v, v8d, int, int) {
  auto h = halves<v4d>(v);
  return whole<v8d>((v4d)__builtin_ia32_sqrtpd256(h.lo), (v4d)__builtin_ia32_sqrtpd256(h.hi));
}
template <class V> EMULATED V rounded(V v, int mode, V, int, int) {
  for (int i = 0; i < lanes<V>; ++i) {
    const double x = v[i];  // a float rounded as a double is the same float
    v[i] = mode == 8 ? __builtin_rint(x) : mode == 9 ? __builtin_floor(x)
         : mode == 10 ? __builtin_ceil(x) : __builtin_trunc(x);
  }
  return v;
}
EMULATED v16f scale(v16f v, v16f by, v16f, int, int) {  // v 2^floor(by)
  for (int i = 0; i < 16; ++i) {
    const float n = __builtin_floorf(by[i]);
    if (n != n) v[i] = n;
    else if (__builtin_isinf(n)) v[i] *= n > 0 ? n : 0;
    else v[i] = __builtin_ldexpf(v[i], n > 1000 ? 1000 : n < -1000 ? -1000 : (int)n);
  }
  return v;
}

template <class V> EMULATED mask8 bits(V m) {
  mask8 k = 0;
  for (int i = 0; i < 8; ++i) k |= (mask8)((m[i] & 1) << i);
  return k;
}
EMULATED mask8 compare(v8l a, v8l b, int test, int) {
  switch (test) {
    case 0: return bits(a == b);
    case 1: return bits(a < b);
    case 2: return bits(a <= b);
    case 4: return bits(a != b);
    case 5: return bits(a >= b);
    case 6: return bits(a > b);
    default: __builtin_trap();
  }
}
EMULATED mask8 compare(v8d a, v8d b, int test, int, int) {
  switch (test) {
    case 0: return bits(a == b);
    case 4: return bits(a != b);
    case 17: return bits(a < b);
    case 18: return bits(a <= b);
    case 29: return bits(a >= b);
    case 30: return bits(a > b);
    default: __builtin_trap();
  }
}

}  // namespace emulated

#define __builtin_ia32_loaddquqi128_mask ::emulated::load16c
#define __builtin_ia32_loaddquhi256_mask ::emulated::load16s
#define __builtin_ia32_loaddqusi512_mask ::emulated::load16i
#define __builtin_ia32_gathersiv16si ::emulated::gather16i
#define __builtin_ia32_loaddqudi512_mask ::emulated::load8l
#define __builtin_ia32_storedquqi128_mask ::emulated::store16c
#define __builtin_ia32_storedquhi256_mask ::emulated::store16s
#define __builtin_ia32_storedqusi512_mask ::emulated::store16i
#define __builtin_ia32_storedqudi512_mask ::emulated::store8l
#define __builtin_ia32_movntdq512 ::emulated::stream
#define __builtin_ia32_cvtd2mask512 ::emulated::signs
#define __builtin_ia32_cvtmask2d512 ::emulated::lanes_of
#define __builtin_ia32_kunpckhi ::emulated::unpack
#define __builtin_ia32_blendmpd_512_mask ::emulated::blend
#define __builtin_ia32_cvtps2pd512_mask ::emulated::widen
#define __builtin_ia32_cvtpd2ps512_mask ::emulated::narrow
#define __builtin_ia32_cvtdq2pd512_mask ::emulated::widen
#define __builtin_ia32_cvttpd2dq512_mask ::emulated::truncate
#define __builtin_ia32_pmovsxdq512_mask ::emulated::widen_signed
#define __builtin_ia32_pmovsxbd512_mask ::emulated::widen_signed
#define __builtin_ia32_pmovsxwd512_mask ::emulated::widen_signed
#define __builtin_ia32_pmovzxbd512_mask ::emulated::widen_unsigned
#define __builtin_ia32_pmovzxwd512_mask ::emulated::widen_unsigned
#define __builtin_ia32_pmovqd512_mask ::emulated::cut
#define __builtin_ia32_pmovdb512_mask ::emulated::cut
#define __builtin_ia32_pmovdw512_mask ::emulated::cut
#define __builtin_ia32_vcvtph2ps512_mask ::emulated::from_half
#define __builtin_ia32_vcvtps2ph512_mask ::emulated::to_half
#define __builtin_ia32_maxps512_mask ::emulated::larger
#define __builtin_ia32_maxpd512_mask ::emulated::larger
#define __builtin_ia32_minps512_mask ::emulated::smaller
#define __builtin_ia32_minpd512_mask ::emulated::smaller
#define __builtin_ia32_vfmaddps512_mask ::emulated::fma
#define __builtin_ia32_vfmaddpd512_mask ::emulated::fma
#define __builtin_ia32_sqrtps512_mask ::emulated::sqrt
#define __builtin_ia32_sqrtpd512_mask ::emulated::sqrt
#define __builtin_ia32_rndscaleps_mask ::emulated::rounded
#define __builtin_ia32_rndscalepd_mask ::emulated::rounded
#define __builtin_ia32_scalefps512_mask ::emulated::scale
#define __builtin_ia32_cmpq512_mask ::emulated::compare
#define __builtin_ia32_cmppd512_mask ::emulated::compare

// SLEEF's functions for AVX-512, each by two calls of those for AVX2. Used, since they are called by declarations of
// their names in another namespace; hidden, so that torch's own are not taken for them.
#define EMULATED_FUNCTION extern "C" inline __attribute__((visibility("hidden"), used))
#define EMULATED_1(W, H, wide, half)                                                                 \
  extern "C" emulated::H half(emulated::H);                                                          \
  EMULATED_FUNCTION emulated::W wide(emulated::W x) {                                                \
    auto a = emulated::halves<emulated::H>(x);                                                       \
    return emulated::whole<emulated::W>(half(a.lo), half(a.hi));                                     \
  }
#define EMULATED_2(W, H, wide, half)                                                                 \
  extern "C" emulated::H half(emulated::H, emulated::H);                                             \
  EMULATED_FUNCTION emulated::W wide(emulated::W x, emulated::W y) {                                 \
    auto a = emulated::halves<emulated::H>(x), b = emulated::halves<emulated::H>(y);                 \
    return emulated::whole<emulated::W>(half(a.lo, b.lo), half(a.hi, b.hi));                         \
  }
#define EMULATED_SLEEF(arity, name, ulp)                                                             \
  EMULATED_##arity(v16f, v8f, Sleef_##name##f16##ulp, Sleef_##name##f8##ulp)                         \
  EMULATED_##arity(v8d, v4d, Sleef_##name##d8##ulp, Sleef_##name##d4##ulp)
EMULATED_SLEEF(1, exp, _u10)
EMULATED_SLEEF(1, tanh, _u10)
EMULATED_SLEEF(1, erf, _u10)
EMULATED_SLEEF(1, sinh, _u10)
EMULATED_SLEEF(1, cosh, _u10)
EMULATED_SLEEF(1, asinh, _u10)
EMULATED_SLEEF(1, acosh, _u10)
EMULATED_SLEEF(1, exp2, _u10)
EMULATED_SLEEF(1, expm1, _u10)
EMULATED_SLEEF(1, log, _u10)
EMULATED_SLEEF(1, log2, _u10)
EMULATED_SLEEF(1, log10, _u10)
EMULATED_SLEEF(1, log1p, _u10)
EMULATED_SLEEF(1, sin, _u10)
EMULATED_SLEEF(1, cos, _u10)
EMULATED_SLEEF(1, tan, _u10)
EMULATED_SLEEF(1, asin, _u10)
EMULATED_SLEEF(1, acos, _u10)
EMULATED_SLEEF(1, atan, _u10)
EMULATED_SLEEF(1, atanh, _u10)
EMULATED_SLEEF(1, erfc, _u15)
EMULATED_SLEEF(1, lgamma, _u10)
EMULATED_SLEEF(2, fmod, )
EMULATED_SLEEF(2, pow, _u10)
EMULATED_SLEEF(2, atan2, _u10)
EMULATED_SLEEF(2, hypot, _u05)
EMULATED_SLEEF(2, nextafter, )
#endif
