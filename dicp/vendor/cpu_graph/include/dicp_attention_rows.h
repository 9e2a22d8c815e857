// Attention of few query rows, as in decoding: each key and value is read once, for all query heads that share it.
#pragma once
#include "dicp_attention.h"
#include "dicp_gemv.h"

namespace dicp {

struct Total { float top, sum; };  // the largest score, and the sum of exponentials of the differences to it

// scores of a row -> weights, not yet divided by their sum: the first `valid` of n count
template <class M>
inline Total soften(float* s, int64_t n, int64_t valid, float scale, const M* mask, int64_t mask_step) {
  vf32 most = splat<vf32>(NEVER), total = splat<vf32>(0.0f);
  each_part(valid, [&](int64_t c, auto lanes) INLINE {
    vf32 x = load(s + c, lanes) * scale;
    if (mask && mask_step == 1) x = x + load(mask + c, lanes);
    else if (mask) x = x + load_strided(mask + c * mask_step, mask_step, lanes);
    store(s + c, x, lanes);
    most = PickMax()(most, blend(lanes, x, NEVER));
  });
  const float top = hmax(most), bias = top == NEVER ? 0.0f : top;
  each_part(valid, [&](int64_t c, auto lanes) INLINE {
    const vf32 x = exp_normal(load(s + c, lanes) - bias);
    store(s + c, x, lanes);
    total = total + blend(lanes, x, 0.0f);
  });
  for (int64_t c = valid; c < n; ++c) s[c] = 0.0f;
  return {top, hsum(total)};
}

constexpr int64_t VALUES = 128;  // values whose weighted sum is put away before the next: the error grows with a part

// One key head of one batch: `rows` query rows of `group` heads against all keys. memory: group * rows *
// (depth + keys + 2 depth_v + 2) floats.
template <class T, class M>
inline void attend(const Attention& a, float scale, bool causal, const T* q, const T* k, const T* v, const M* mask,
                   T* out, float* log_sum, float* memory) {
  const int64_t group = a.heads / a.kv_heads, lines = group * a.rows, quarter = (a.keys + STREAMS - 1) / STREAMS;
  float *const x = memory, *const scores = x + lines * a.depth, *const sums = scores + lines * a.keys;
  float* const part = sums + lines * a.depth_v;
  Total* const total = (Total*)(part + lines * a.depth_v);
  for (int64_t i = 0; i < lines; ++i)
    for (int64_t d = 0; d < a.depth; ++d)
      x[i * a.depth + d] = decode_one(q[i / a.rows * a.q[1] + i % a.rows * a.q[2] + d]);
  for (int64_t i = 0; i < lines * a.keys; ++i) scores[i] = 0.0f;
  for (int64_t i = 0; i < lines * a.depth_v; ++i) sums[i] = part[i] = 0.0f;
  for (int64_t s = 0; s < quarter; ++s) {
    const T* from[STREAMS];
    int64_t key[STREAMS];
    for (int64_t j = 0; j < STREAMS; ++j) {
      key[j] = s + j * quarter < a.keys ? s + j * quarter : a.keys - 1;
      from[j] = k + key[j] * a.k[2];
    }
    row_blocks<0>(lines, [&](int64_t i, auto size) INLINE {
      constexpr int n = first_of(decltype(size)());
      float found[STREAMS * n] = {};
      dots<n>(x + i * a.depth, a.depth, from, a.depth, found, 1, n);
      for (int64_t j = 0; j < STREAMS; ++j)
        for (int64_t r = 0; r < n; ++r) scores[(i + r) * a.keys + key[j]] = found[j * n + r];
    });
  }
  for (int64_t i = 0; i < lines; ++i) {
    const int64_t h = i / a.rows, r = i % a.rows, valid = causal && r + 1 < a.keys ? r + 1 : a.keys;
    const M* const m = mask ? mask + h * a.mask[1] + r * a.mask[2] : nullptr;
    total[i] = soften(scores + i * a.keys, a.keys, valid, scale, m, a.mask[3]);
    if (log_sum)
      log_sum[h * a.log_sum[1] + r * a.log_sum[2]] = total[i].top == NEVER ? NEVER : total[i].top + log(total[i].sum);
  }
  for (int64_t s = 0; s < a.keys; s += STREAMS) {
    const int64_t some = a.keys - s < STREAMS ? a.keys - s : STREAMS;
    row_blocks<0>(lines, [&](int64_t i, auto size) INLINE {
      axpys<first_of(decltype(size)())>(scores + i * a.keys + s, a.keys, v + s * a.v[2], a.v[2], some, a.depth_v,
                                        part + i * a.depth_v, a.depth_v);
    });
    if ((s + STREAMS) % VALUES == 0 || s + STREAMS >= a.keys)
      for (int64_t i = 0; i < lines * a.depth_v; ++i) sums[i] += part[i], part[i] = 0.0f;
  }
  for (int64_t i = 0; i < lines; ++i) {
    T* const to = out + i / a.rows * a.out[1] + i % a.rows * a.out[2];
    const float by = total[i].top == NEVER ? 1.0f : total[i].sum;  // a row of which all is masked gives zeros
    for (int64_t d = 0; d < a.depth_v; ++d) to[d] = encode_one<T>(sums[i * a.depth_v + d] / by);
  }
}

// As flash_attention. Returns not 0 where there is no memory for the scores.
template <class T, class M>
int32_t row_attention(const T* q, const T* k, const T* v, const M* mask, T* out, float* log_sum, const int64_t* sizes,
                      double scale, bool causal) {
  const Attention& a = *(const Attention*)sizes;
  const int64_t group = a.heads / a.kv_heads, bytes = group * a.rows * (a.depth + a.keys + 2 * a.depth_v + 2) * 4;
  int32_t failed = 0;
#pragma omp parallel reduction(| : failed) if (a.batch * a.heads * a.rows * a.keys * a.depth > SMALL_PRODUCT)
  {
    float* const memory = (float*)aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) failed = 1;
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t h = 0; h < a.kv_heads; ++h)
        if (memory)
          attend(a, (float)scale, causal, q + b * a.q[0] + h * group * a.q[1], k + b * a.k[0] + h * a.k[1],
                 v + b * a.v[0] + h * a.v[1], mask ? mask + b * a.mask[0] + h * group * a.mask[1] : nullptr,
                 out + b * a.out[0] + h * group * a.out[1],
                 log_sum ? log_sum + b * a.log_sum[0] + h * group * a.log_sum[1] : nullptr, memory);
    free(memory);
  }
  return failed;
}

}  // namespace dicp
