// The vectors of generated kernels: types, casts, comparisons, selection and horizontal reductions.
// Every vector has LANES lanes whatever its element type, so that types mix freely in one loop; each function
// takes vectors, scalars or both, so that one emitted expression serves vector loops and scalar loops.
#pragma once
#include "dicp_isa.h"

namespace dicp {

// types: int8, uint8, int16 are computed in vi32, bf16, half, e4m3 and e5m2 in vf32
using vf32 = isa::reg<float>;
using vi32 = isa::reg<int32_t>;
using vf64 = isa::Two<double>;
using vi64 = isa::Two<int64_t>;
struct vbool { vi32 m; };  // lanes are 0 or -1

// how many lanes a statement covers
struct Full {};
struct Lanes { int n; };  // the first n, 0 <= n <= LANES
struct One {};            // a scalar loop

template <class T> constexpr bool is_two = same<T, vf64> || same<T, vi64>;
template <class T> constexpr bool is_vec = same<T, vf32> || same<T, vi32> || same<T, vbool> || is_two<T>;
template <class T> constexpr bool is_small_int = same<T, int8_t> || same<T, uint8_t> || same<T, int16_t>;

template <class T> struct Scalar { using type = T; };
template <> struct Scalar<vf32> { using type = float; };
template <> struct Scalar<vf64> { using type = double; };
template <> struct Scalar<vi32> { using type = int32_t; };
template <> struct Scalar<vi64> { using type = int64_t; };
template <> struct Scalar<vbool> { using type = bool; };
template <class T> using scalar = typename Scalar<T>::type;  // the lane type of a vector

template <class T> struct Vec { using type = T; };
template <> struct Vec<float> { using type = vf32; };
template <> struct Vec<bf16> { using type = vf32; };
template <> struct Vec<half> { using type = vf32; };
template <> struct Vec<e4m3> { using type = vf32; };
template <> struct Vec<e5m2> { using type = vf32; };
template <> struct Vec<double> { using type = vf64; };
template <> struct Vec<int8_t> { using type = vi32; };
template <> struct Vec<uint8_t> { using type = vi32; };
template <> struct Vec<int16_t> { using type = vi32; };
template <> struct Vec<int32_t> { using type = vi32; };
template <> struct Vec<int64_t> { using type = vi64; };
template <> struct Vec<bool> { using type = vbool; };
template <class T> using vec = typename Vec<T>::type;  // the vector that computes a storage type

// common: the type in which a binary function computes; a scalar beside a vector is broadcast
template <class A, class B, bool both_scalar = !is_vec<A> && !is_vec<B>> struct Common {
  static_assert(same<A, B> || !is_vec<A> || !is_vec<B>, "cast one operand: the vector types differ");
  using type = choose<is_vec<A>, A, B>;
};
template <class A, class B> struct Common<A, B, true> { using type = decltype(A{} + B{}); };
template <> struct Common<bool, bool, true> { using type = bool; };
template <class A, class B> using common = typename Common<A, B>::type;

// splat: every lane s
template <class V, int... i> DICP_INLINE V splat_reg(scalar<V> s, isa::Seq<i...>) {
  return V{((void)i, s)...};
}
template <class V> DICP_INLINE V splat(scalar<V> s) {
  if constexpr (same<V, vbool>) return {splat_reg<vi32>(-(int32_t)s, isa::seq<>())};
  else if constexpr (is_two<V>) return V(s);
  else return splat_reg<V>(s, isa::seq<>());
}

// iota: start, start + 1, ..
template <int... i> DICP_INLINE vi32 iota32(int32_t start, isa::Seq<i...>) { return vi32{i...} + start; }
DICP_INLINE vi32 iota32(int32_t start) { return iota32(start, isa::seq<>()); }
template <int... i> DICP_INLINE vi64 iota(int64_t start, isa::Seq<i...>) {
  return {isa::half_reg<int64_t>{i...} + start, isa::half_reg<int64_t>{(i + LANES / 2)...} + start};
}
DICP_INLINE vi64 iota(int64_t start) { return iota(start, isa::seq<LANES / 2>()); }

// small_quotient, small_remainder: of lanes 0 <= n < 2^21, for which a product with the reciprocal misses no integer
DICP_INLINE vi32 small_quotient(vi32 n, int32_t by) {
  vf32 middle = isa::convert<float, int32_t, LANES>(n) + 0.5f;  // half a step from any integer, the error is less
  return isa::convert<int32_t, float, LANES>(middle * (1.0f / by));
}
DICP_INLINE vi32 small_remainder(vi32 n, int32_t by) { return n - small_quotient(n, by) * by; }

// Array: the lanes in memory, for what has no vector form
template <class V> struct Array {
  scalar<V> at[LANES];
  DICP_INLINE explicit Array(V v) {
    if constexpr (same<V, vbool>)
      for (int i = 0; i < LANES; ++i) at[i] = v.m[i] != 0;
    else isa::store_rows<scalar<V>>(at, v);
  }
  Array() = default;
  DICP_INLINE V vector() const { return isa::load_rows<scalar<V>>(at); }
};
template <class V, class F, class... More> DICP_INLINE V each_lane(F f, V x, More... more) {
  Array<V> r(x);
  [&](auto... arrays) {
    for (int i = 0; i < LANES; ++i) r.at[i] = f(r.at[i], arrays.at[i]...);
  }(Array<More>(more)...);
  return r.vector();
}

// as_float, as_bits: the same bits as a number or as an integer
template <class T> using scalar_bits = choose<sizeof(T) == 8, int64_t, int32_t>;
template <class V> using bits_of = choose<is_vec<V>, vec<scalar_bits<scalar<V>>>, scalar_bits<scalar<V>>>;
template <class V> DICP_INLINE bits_of<V> as_bits(V v) {
  if constexpr (same<V, vf64>) return {(isa::half_reg<int64_t>)v.lo, (isa::half_reg<int64_t>)v.hi};
  else return bitcast<bits_of<V>>(v);
}
template <class V, class I> DICP_INLINE V as_float(I v) {
  if constexpr (same<V, vf64>) return {(isa::half_reg<double>)v.lo, (isa::half_reg<double>)v.hi};
  else return bitcast<V>(v);
}

// wrap: the value of an int8, uint8 or int16 after overflow, still computed as int32
template <class T, class V> DICP_INLINE V wrap(V v) {
  if constexpr (same<T, uint8_t>) return v & 0xff;
  else if constexpr (same<V, vi32>) return (v << (32 - 8 * (int)sizeof(T))) >> (32 - 8 * (int)sizeof(T));
  else return (V)(T)v;
}

// cast: to the scalar type or vector type named; the result has lanes when either side has
template <class A, class B> auto ne(A x, B y);
template <class A, class B> auto eq(A x, B y);
template <class F> F round_bf16(F x);
template <class F> F round_half(F x);
// whole: an integer made of a float, whose making the compiler does not see. Without traps it takes the float of such
// an integer for trunc(x), which keeps the sign of zero, and what no integer holds.
template <class I> DICP_INLINE I whole(I i) {
  if constexpr (sizeof(I) <= 8) asm("" : "+r"(i));
#if (DICP_AVX2 || DICP_AVX512) && !defined(EMULATED)  // test/emulation: no register is so wide
  else asm("" : "+x"(i));
#else
  else asm("" : "+m"(i));
#endif
  return i;
}
template <class To, class From> DICP_INLINE vec<To> cast_lanes(From v) {
  using F = scalar<From>;
  constexpr int n = LANES, h = LANES / 2;
  if constexpr (same<To, F>) {
    return v;
  } else if constexpr (same<F, bool>) {
    if constexpr (sizeof(To) == 8) return cast_lanes<To>(v.m & 1);
    else return (vec<To>)(v.m & bitcast<int32_t>((To)1));
  } else if constexpr (same<To, bool>) {
    return ne(v, (F)0);
  } else if constexpr (same<F, float> && same<To, int64_t>) {
#if !DICP_AVX512  // which has no instruction for 64 bits: those of 32 give INT32_MIN for what they cannot hold
    const vi32 narrow = isa::convert<int32_t, float, n>(v);
    if (__builtin_expect(!hany(eq(narrow, INT32_MIN)), 1)) return cast_lanes<int64_t>(narrow);
#endif
    return cast_lanes<int64_t>(cast_lanes<double>(v));
  } else if constexpr (same<F, double> && same<To, int64_t>) {
    return {whole(isa::convert<To, F, h>(v.lo)), whole(isa::convert<To, F, h>(v.hi))};
  } else if constexpr (is_two<From> && sizeof(To) == 8) {
    return {isa::convert<To, F, h>(v.lo), isa::convert<To, F, h>(v.hi)};
  } else if constexpr (is_two<From>) {
    return isa::join<To, n>(isa::convert<To, F, h>(v.lo), isa::convert<To, F, h>(v.hi));
  } else if constexpr (sizeof(To) == 8) {
    return {isa::convert<To, F, h>(isa::low<F, n>(v)), isa::convert<To, F, h>(isa::high<F, n>(v))};
  } else {
    return isa::convert<To, F, n>(v);
  }
}
template <class X, class V> DICP_INLINE auto cast(V v) {
  using To = scalar<X>;
  if constexpr (is_small_int<To>) return wrap<To>(cast<int32_t>(v));
  else if constexpr (same<To, bf16>) return round_bf16(cast<float>(v));
  else if constexpr (same<To, half>) return round_half(cast<float>(v));
  else if constexpr (is_vec<V>) return cast_lanes<To>(v);
  else if constexpr (is_vec<X>) return splat<X>(cast<To>(v));
  else if constexpr ((double)(V)0.5 == 0.5 && (To)0.5 == 0) return whole((To)v);
  else return (To)v;
}

// lt le gt ge eq ne: vbool, or bool for scalars. Names: the operator, and its number in vpcmpq and vcmppd.
template <int int_test, int float_test, class T, class F>
DICP_INLINE vbool compare_two(isa::Two<T> a, isa::Two<T> b, F f) {
#if DICP_AVX512
  using v8ll = isa::reg<long long, 8>;
  auto test = [](isa::half_reg<T> x, isa::half_reg<T> y) {
    if constexpr (same<T, double>) return __builtin_ia32_cmppd512_mask(x, y, float_test, -1, 4);
    else return __builtin_ia32_cmpq512_mask((v8ll)x, (v8ll)y, int_test, -1);
  };
  (void)f;  // without the builtins GCC would make a vector mask of each half before it makes bits of it
  return {isa::lanes_of(__builtin_ia32_kunpckhi((uint8_t)test(a.hi, b.hi), (uint8_t)test(a.lo, b.lo)))};
#else
  constexpr int n = LANES, h = LANES / 2;
  auto narrow = [](auto m) { return isa::convert<int32_t, int64_t, h>((isa::half_reg<int64_t>)m); };
  return {isa::join<int32_t, n>(narrow(f(a.lo, b.lo)), narrow(f(a.hi, b.hi)))};
#endif
}
#define DICP_COMPARE(name, op, int_test, float_test)                                                 \
  template <class A, class B> DICP_INLINE auto name(A x, B y) {                                      \
    using V = common<A, B>;                                                                          \
    V a = cast<V>(x), b = cast<V>(y);                                                                \
    if constexpr (!is_vec<V>) return a op b;                                                         \
    else if constexpr (same<V, vbool>) return vbool{-a.m op -b.m};                                   \
    else if constexpr (!is_two<V>) return vbool{a op b};                                             \
    else return compare_two<int_test, float_test>(a, b, [](auto p, auto q) { return p op q; });      \
  }
DICP_COMPARE(lt, <, 1, 17)
DICP_COMPARE(le, <=, 2, 18)
DICP_COMPARE(gt, >, 6, 30)
DICP_COMPARE(ge, >=, 5, 29)
DICP_COMPARE(eq, ==, 0, 0)
DICP_COMPARE(ne, !=, 4, 4)
#undef DICP_COMPARE

// land lor lxor lnot on bools, band bor bxor bnot on ints (and bools)
#define DICP_BITS(name, op)                                                                          \
  template <class A, class B> DICP_INLINE auto b##name(A x, B y) {                                   \
    using V = common<A, B>;                                                                          \
    V a = cast<V>(x), b = cast<V>(y);                                                                \
    if constexpr (same<V, vbool>) return vbool{a.m op b.m};                                          \
    else return (V)(a op b);                                                                         \
  }                                                                                                  \
  template <class A, class B> DICP_INLINE auto l##name(A x, B y) {                                   \
    return b##name(cast<bool>(x), cast<bool>(y));                                                    \
  }
DICP_BITS(and, &)
DICP_BITS(or, |)
DICP_BITS(xor, ^)
#undef DICP_BITS
template <class V> DICP_INLINE V bnot(V v) {
  if constexpr (same<V, vbool>) return {~v.m};
  else if constexpr (same<V, bool>) return !v;
  else return ~v;
}
template <class V> DICP_INLINE auto lnot(V v) { return bnot(cast<bool>(v)); }

// where: a in the lanes where m holds, else b
template <class T> DICP_INLINE isa::Two<T> select_two(vbool m, isa::Two<T> a, isa::Two<T> b) {
#if DICP_AVX512 && !defined(__clang__)
  using v8d = isa::reg<double, 8>;
  using R = isa::half_reg<T>;
  isa::Mask k = isa::mask_of(m.m);
  return {(R)__builtin_ia32_blendmpd_512_mask((v8d)b.lo, (v8d)a.lo, (uint8_t)k),
          (R)__builtin_ia32_blendmpd_512_mask((v8d)b.hi, (v8d)a.hi, (uint8_t)(k >> 8))};
#else
  constexpr int n = LANES, h = LANES / 2;
  auto lo = isa::convert<int64_t, int32_t, h>(isa::low<int32_t, n>(m.m));
  auto hi = isa::convert<int64_t, int32_t, h>(isa::high<int32_t, n>(m.m));
  return {lo ? a.lo : b.lo, hi ? a.hi : b.hi};
#endif
}
template <class M, class A, class B> DICP_INLINE auto where(M m, A x, B y) {
  using C = common<A, B>;
  using V = choose<is_vec<M>, vec<C>, C>;
  V a = cast<V>(x), b = cast<V>(y);
  if constexpr (!is_vec<M>) return m ? a : b;
  else if constexpr (is_two<V>) return select_two(m, a, b);
  else if constexpr (same<V, vbool>) return vbool{m.m ? a.m : b.m};
  else return (V)(m.m ? a : b);
}

// active: the lanes covered; blend: the others replaced, for tails of reductions
DICP_INLINE vbool active(Full) { return splat<vbool>(true); }
DICP_INLINE vbool active(Lanes lanes) { return {iota32(0) < lanes.n}; }
DICP_INLINE bool active(One) { return true; }
template <class N, class V, class S> DICP_INLINE V blend(N lanes, V v, S fill) {
  if constexpr (same<N, Lanes>) return where(active(lanes), v, fill);
  else return v;
}

// PickMax, PickMin: NaN wins; of two registers or two scalars. In a running maximum a is the accumulator, for
// the test of b is then no part of the chain from one step to the next.
struct PickMax {
  template <class R> DICP_INLINE R operator()(R a, R b) const {
    R m = isa::larger(b, a);
    return b != b ? b : m;
  }
};
struct PickMin {
  template <class R> DICP_INLINE R operator()(R a, R b) const {
    R m = isa::smaller(b, a);
    return b != b ? b : m;
  }
};

// hsum hprod hmax hmin hany hall: all lanes to one scalar, by halves
template <class T, int n, class F> DICP_INLINE T fold_reg(isa::reg<T, n> v, F f) {
  if constexpr (n > 4) return fold_reg<T, n / 2>(f(isa::low<T, n>(v), isa::high<T, n>(v)), f);
  if constexpr (n == 4) {
    v = f(v, isa::reg<T, n>{v[2], v[3], v[0], v[1]});
    return f(v, isa::reg<T, n>{v[1], v[0], v[3], v[2]})[0];
  }
  if constexpr (n == 2) return f(v, isa::reg<T, n>{v[1], v[0]})[0];
}
template <class V, class F> DICP_INLINE scalar<V> fold(V v, F f) {
  if constexpr (!is_vec<V>) return v;
  else if constexpr (is_two<V>) return fold_reg<scalar<V>, LANES / 2>(f(v.lo, v.hi), f);
  else return fold_reg<scalar<V>, LANES>(v, f);
}
template <class V> DICP_INLINE scalar<V> hsum(V v) { return fold(v, [](auto a, auto b) { return a + b; }); }
// four of them at once, in less than half of the instructions
template <int n = LANES> DICP_INLINE isa::reg<float, 4> added_halves(isa::reg<float, n> v) {
  if constexpr (n > 4) return added_halves<n / 2>(isa::low<float, n>(v) + isa::high<float, n>(v));
  else return v;
}
template <int apart> DICP_INLINE vf32 added_pairs(vf32 a, vf32 b) {
  return isa::swapped<apart, false>(a, b, isa::seq<>()) + isa::swapped<apart, true>(a, b, isa::seq<>());
}
DICP_INLINE isa::reg<float, 4> hsums(vf32 a, vf32 b, vf32 c, vf32 d) {
  return added_halves(added_pairs<2>(added_pairs<1>(a, b), added_pairs<1>(c, d)));
}
template <class V> DICP_INLINE scalar<V> hprod(V v) { return fold(v, [](auto a, auto b) { return a * b; }); }
template <class V> DICP_INLINE scalar<V> hmax(V v) { return fold(v, PickMax()); }
template <class V> DICP_INLINE scalar<V> hmin(V v) { return fold(v, PickMin()); }
DICP_INLINE bool hany(bool v) { return v; }
DICP_INLINE bool hall(bool v) { return v; }
DICP_INLINE bool hany(vbool v) { return fold(v.m, [](auto a, auto b) { return a | b; }) != 0; }
DICP_INLINE bool hall(vbool v) { return fold(v.m, [](auto a, auto b) { return a & b; }) != 0; }
DICP_INLINE bool hany(vbool v, Full) { return hany(v); }
DICP_INLINE bool hany(vbool v, Lanes lanes) { return hany(land(v, active(lanes))); }

// better_max, better_min: where v must replace the best so far. NaN beats numbers, an equal value does not.
template <class A, class B> DICP_INLINE auto better_max(A v, B best) {
  return lor(gt(v, best), land(ne(v, v), eq(best, best)));
}
template <class A, class B> DICP_INLINE auto better_min(A v, B best) {
  return lor(lt(v, best), land(ne(v, v), eq(best, best)));
}

// hargmax, hargmin: the first index of the best lane
template <class V, class F> DICP_INLINE int64_t arg_best(V values, vi64 indices, F better) {
  Array<V> v(values);
  Array<vi64> at(indices);
  int best = 0;
  for (int i = 1; i < LANES; ++i) {
    bool tie = !better(v.at[i], v.at[best]) && !better(v.at[best], v.at[i]);
    if (tie ? at.at[i] < at.at[best] : better(v.at[i], v.at[best])) best = i;
  }
  return at.at[best];
}
template <class V> DICP_INLINE int64_t hargmax(V values, vi64 indices) {
  return arg_best(values, indices, [](auto a, auto b) { return better_max(a, b); });
}
template <class V> DICP_INLINE int64_t hargmin(V values, vi64 indices) {
  return arg_best(values, indices, [](auto a, auto b) { return better_min(a, b); });
}

}  // namespace dicp

#include "dicp_memory.h"
#include "dicp_circular.h"
