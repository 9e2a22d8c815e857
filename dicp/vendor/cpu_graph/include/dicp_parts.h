// What templates write loops over rows and blocks with.
#pragma once
#include "dicp_kernel.h"

extern "C" int omp_get_max_threads();
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

#define INLINE __attribute__((always_inline))  // of a lambda

namespace dicp {

DICP_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// f(position, lanes) for each vector of n elements
template <class F> DICP_INLINE void each_part(int64_t n, F f) {
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) f(c, Full());
  if (c < n) f(c, Lanes{(int)(n - c)});
}

template <int... i> DICP_INLINE vf32 pick(vf32 a, vf32 b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, i...);
#else
  return __builtin_shuffle(a, b, vi32{i...});
#endif
}
// a perfect shuffle
template <int start, int... i> DICP_INLINE vf32 interleave(vf32 a, vf32 b, isa::Seq<i...>) {
  return pick<(i / 2 + start + i % 2 * LANES)...>(a, b);
}
// Of two rows, the elements (unit 1), pairs (2) or quads (4) in turn. Within quads, which AVX2 does in one instruction.
template <int unit, int half, int... i> DICP_INLINE vf32 in_turn(vf32 a, vf32 b, isa::Seq<i...>) {
  if constexpr (unit == 1) return pick<(i / 4 * 4 + 2 * half + i % 4 / 2 + i % 2 * LANES)...>(a, b);
  else if constexpr (unit == 2) return pick<(i / 4 * 4 + 2 * half + i % 2 + i % 4 / 2 * LANES)...>(a, b);
  else return pick<(4 * half + i % 4 + i / 4 * LANES)...>(a, b);
}
// LANES rows of LANES elements become its columns
DICP_INLINE void transpose(vf32* r) {
  if constexpr (LANES == 8) {
    constexpr auto all = isa::seq<>();
    vf32 s[8];
    for (int q = 0; q < 8; q += 4) {
      const vf32 a = in_turn<1, 0>(r[q], r[q + 1], all), b = in_turn<1, 0>(r[q + 2], r[q + 3], all);
      const vf32 c = in_turn<1, 1>(r[q], r[q + 1], all), d = in_turn<1, 1>(r[q + 2], r[q + 3], all);
      s[q] = in_turn<2, 0>(a, b, all), s[q + 1] = in_turn<2, 1>(a, b, all);
      s[q + 2] = in_turn<2, 0>(c, d, all), s[q + 3] = in_turn<2, 1>(c, d, all);
    }
    for (int i = 0; i < 4; ++i)
      r[i] = in_turn<4, 0>(s[i], s[i + 4], all), r[i + 4] = in_turn<4, 1>(s[i], s[i + 4], all);
    return;
  }
  // a perfect shuffle for each bit of the position
#pragma GCC unroll 8
  for (int bit = 1; bit < LANES; bit *= 2) {
    vf32 s[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; ++i) {
      s[2 * i] = interleave<0>(r[i], r[i + LANES / 2], isa::seq<>());
      s[2 * i + 1] = interleave<LANES / 2>(r[i], r[i + LANES / 2], isa::seq<>());
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) r[i] = s[i];
  }
}

// to[i][j] = from[i * down + j * across] as float32, of m rows and n columns. One of the strides is 1.
template <class T>
inline void bring(const T* from, int64_t down, int64_t across, int64_t m, int64_t n, float* to, int64_t to_row) {
  if (across == 1) {
    for (int64_t i = 0; i < m; ++i)
      each_part(n, [&](int64_t j, auto lanes) INLINE {
        store(to + i * to_row + j, cast<vf32>(load(from + i * down + j, lanes)), lanes);
      });
    return;
  }
  constexpr int LINE = LANES < 16 ? 2 : 1;  // vectors: what is written is whole cache lines
  for (int64_t j = 0; j < n; j += LINE * LANES)
    each_part(m, [&](int64_t i, auto lanes) INLINE {
      for (int64_t at = j; at < n && at < j + LINE * LANES; at += LANES) {
        const T* const corner = from + i + at * across;
        const int64_t columns = n - at < LANES ? n - at : LANES;
        vf32 r[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < LANES; ++k) r[k] = cast<vf32>(load(corner + (k < columns ? k : 0) * across, lanes));
        transpose(r);
        for (int k = 0; k < count(lanes); ++k) {
          float* const row = to + (i + k) * to_row + at;
          if (columns == LANES) store(row, r[k], Full());
          else store(row, r[k], lanes_left(columns));
        }
      }
    });
}

// A workspace, and the threads that it is for: not more than were planned.
struct Workspace {
  float* memory;
  int64_t floats, threads;
  Workspace(void* at, int64_t bytes, int64_t planned) : memory((float*)at), floats(bytes / (int64_t)sizeof(float)) {
    threads = omp_get_max_threads() < planned ? omp_get_max_threads() : planned;
  }
  float* take(int64_t n) {  // null where it is short
    float* const found = memory;
    memory += n, floats -= n;
    return floats < 0 ? nullptr : found;
  }
};

}  // namespace dicp
