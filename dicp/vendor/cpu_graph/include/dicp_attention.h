// Attention by tiles: softmax(scale Q K^T + mask) V, a block of query rows against one block of keys after the
// other. Each row keeps its maximum and sum so far, so that no more than one tile of scores exists at a time
// (flash attention, Dao et al. 2022). The products are oneDNN's micro-kernels, which libtorch exports.
#pragma once
#include "dicp_brgemm.h"

namespace dicp {

// Sizes, and strides in elements per batch, head and row (and column of the mask); the depth is dense in every
// operand. Query head h reads key head h / (heads / kv_heads).
struct Attention {
  int64_t batch, heads, kv_heads, rows, keys, depth, depth_v;
  int64_t q[3], k[3], v[3], out[3], log_sum[3], mask[4];
};

// Blocks of a thread: their scores (256 KB) and weights stay in its second-level cache, and each key that is
// brought into tile order serves many rows. Smaller ones are slower, larger ones hardly faster.
constexpr int64_t QUERY_BLOCK = 128, KEY_BLOCK = 512;
constexpr float NEVER = -__builtin_inff();

// rows a and b of 16-bit values, element by element side by side; b may be absent
inline void pair_rows(const uint16_t* a, const uint16_t* b, int64_t n, uint32_t* to) {
  if (b)
    for (int64_t i = 0; i < n; ++i) to[i] = (uint32_t)a[i] | (uint32_t)b[i] << 16;
  else
    for (int64_t i = 0; i < n; ++i) to[i] = a[i];
}

// The workspace of one thread, and the work on one block of query rows.
template <class T, class M> struct AttentionTile {
  static constexpr bool pairs = is_low<T>;  // operands go to the products as 16-bit pairs
  const Attention& a;
  float scale;
  int64_t width;  // keys of a block
  char* memory;
  float *scores, *keys, *result, *top, *sum;  // scores, weights [rows][width], keys [depth (/ 2)][width] words
  T *weights, *values;                        // of 16-bit types; else the weights take the scores' place

  AttentionTile(const Attention& attention, float factor) : a(attention), scale(factor) {
    const int64_t rows = a.rows < QUERY_BLOCK ? (a.rows + LANES - 1) / LANES * LANES : QUERY_BLOCK;
    width = a.keys < KEY_BLOCK ? (a.keys + LANES - 1) / LANES * LANES : KEY_BLOCK;
    const int64_t tile = rows * width, words = a.depth / (pairs ? 2 : 1);
    const int64_t floats = tile + words * width + rows * a.depth_v + 2 * rows;
    const int64_t low = pairs ? tile + width * a.depth_v : 0;
    memory = (char*)aligned_alloc(64, (floats * 4 + low * 2 + 63) / 64 * 64);
    scores = (float*)memory;
    keys = scores + tile;
    result = keys + words * width;
    top = result + rows * a.depth_v;
    sum = top + rows;
    weights = (T*)(pairs ? sum + rows : scores);
    values = weights + tile;
  }
  ~AttentionTile() { free(memory); }

  // scores -> weights of one row: n keys of which the first `valid` count; what was summed so far is rescaled
  DICP_INLINE void soft_row(int64_t r, int64_t n, int64_t valid, const M* mask) {
    float* const s = scores + r * width;
    T* const w = weights + r * width;
    vf32 most = splat<vf32>(NEVER);
    each_part(valid, [&](int64_t c, auto lanes) {
      vf32 x = load(s + c, lanes) * scale;
      if (mask && a.mask[3] == 1) x = x + load(mask + c, lanes);
      else if (mask) x = x + load_strided(mask + c * a.mask[3], a.mask[3], lanes);
      store(s + c, x, lanes);
      most = PickMax()(most, blend(lanes, x, NEVER));
    });
    const float before = top[r], now = PickMax()(hmax(most), before);
    const float bias = now == NEVER ? 0.0f : now;  // all masked so far: every weight is 0
    vf32 total = splat<vf32>(0.0f);
    each_part(valid, [&](int64_t c, auto lanes) {
      const vf32 x = exp(load(s + c, lanes) - bias);
      store(w + c, x, lanes);
      total = total + blend(lanes, x, 0.0f);
    });
    each_part(n - valid, [&](int64_t c, auto lanes) { store(w + valid + c, splat<vf32>(0.0f), lanes); });
    const float keep = exp(before - bias);
    top[r] = now;
    sum[r] = sum[r] * keep + hsum(total);
    if (before != NEVER && keep != 1.0f) {
      float* const o = result + r * a.depth_v;
      each_part(a.depth_v, [&](int64_t c, auto lanes) { store(o + c, load(o + c, lanes) * keep, lanes); });
    }
  }

  // query rows [first, first + count), count <= QUERY_BLOCK; the pointers are those of the batch and head
  void block(const T* q, const T* k, const T* v, const M* mask, bool causal, int64_t first, int64_t count, T* out,
             float* log_sum) {
    for (int64_t r = 0; r < count; ++r) top[r] = NEVER, sum[r] = 0.0f;
    const int64_t end = causal && first + count < a.keys ? first + count : a.keys;
    for (int64_t k0 = 0; k0 < end; k0 += width) {
      const int64_t n = end - k0 < width ? end - k0 : width;
      // words of 32 bits: floats, or the pairs of 16-bit values that the product wants
      bring((const float*)(k + k0 * a.k[2]), 1, a.k[2] / (pairs ? 2 : 1), a.depth / (pairs ? 2 : 1), n, keys, width);
      product(count, n, a.depth, q + first * a.q[2], a.q[2], (const T*)keys, width, scores, width, false);
      const int64_t even = pairs ? (n + 1) / 2 * 2 : n;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t seen = first + r + 1 - k0, valid = !causal || seen > n ? n : seen < 0 ? 0 : seen;
        soft_row(r, even, valid, mask ? mask + (first + r) * a.mask[2] + k0 * a.mask[3] : nullptr);
      }
      const T* b = v + k0 * a.v[2];
      int64_t ldb = a.v[2];
      if constexpr (pairs) {
        for (int64_t i = 0; i < n; i += 2)
          pair_rows((const uint16_t*)(b + i * ldb), i + 1 < n ? (const uint16_t*)(b + (i + 1) * ldb) : nullptr,
                    a.depth_v, (uint32_t*)values + i / 2 * a.depth_v);
        b = values, ldb = a.depth_v;
      }
      product(count, a.depth_v, even, weights, width, b, ldb, result, a.depth_v, k0 > 0);
    }
    for (int64_t r = 0; r < count; ++r) {
      const float* const o = result + r * a.depth_v;
      T* const to = out + (first + r) * a.out[2];
      const float total = top[r] == NEVER ? 1.0f : sum[r];  // a row of which all is masked gives zeros
      each_part(a.depth_v, [&](int64_t c, auto lanes) { store(to + c, load(o + c, lanes) / total, lanes); });
      if (log_sum) log_sum[(first + r) * a.log_sum[2]] = top[r] == NEVER ? NEVER : top[r] + log(sum[r]);
    }
  }
};

// mask and log_sum (of each row's exponentials) may be null. Returns not 0 where the micro-kernels raised.
template <class T, class M>
int32_t flash_attention(const T* q, const T* k, const T* v, const M* mask, T* out, float* log_sum,
                        const int64_t* sizes, double scale, bool causal) {
  const Attention& a = *(const Attention*)sizes;
  const int64_t blocks = (a.rows + QUERY_BLOCK - 1) / QUERY_BLOCK, group = a.heads / a.kv_heads;
  int32_t failed = 0;
#pragma omp parallel reduction(| : failed)
  {
    AttentionTile<T, M> tile(a, (float)scale);
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t first = i * QUERY_BLOCK, count = a.rows - first < QUERY_BLOCK ? a.rows - first : QUERY_BLOCK;
          try {
            tile.block(q + b * a.q[0] + h * a.q[1], k + b * a.k[0] + h / group * a.k[1],
                       v + b * a.v[0] + h / group * a.v[1], mask ? mask + b * a.mask[0] + h * a.mask[1] : nullptr,
                       causal, first, count, out + b * a.out[0] + h * a.out[1],
                       log_sum ? log_sum + b * a.log_sum[0] + h * a.log_sum[1] : nullptr);
          } catch (...) {
            failed = 1;
          }
        }
    if (AttentionTile<T, M>::pairs) at::native::cpublas::brgemm_release(true);
  }
  return failed;
}

}  // namespace dicp
