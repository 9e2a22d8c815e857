// Attention by tiles: softmax(scale Q K^T + mask) V, a block of query rows against one block of keys after the
// other. Each row keeps its maximum and sum so far, so that no more than one tile of scores exists at a time
// (flash attention, Dao et al. 2022). The products are oneDNN's micro-kernels, which libtorch exports, or those of
// dicp_strips.h: of the operands' dtype, or of float32 where the processor has none of that dtype; what is loaded then
// becomes float32 on the way.
#pragma once
#include "dicp_brgemm.h"
#include "dicp_strips.h"

namespace dicp {

// Sizes, and strides in elements per batch, head and row (and column of the mask); the depth is dense in every
// operand. Query head h reads key head h / (heads / kv_heads).
struct Attention {
  int64_t batch, heads, kv_heads, rows, keys, depth, depth_v;
  int64_t q[3], k[3], v[3], out[3], log_sum[3], mask[4];
};

// Blocks of a thread: their scores (256 KB) and weights stay in its second-level cache, and each key that is
// brought into tile order serves many rows. Smaller ones are slower, larger ones hardly faster; of strips, whole ones.
constexpr int64_t QUERY_BLOCK = BY_STRIPS ? 144 : 128, KEY_BLOCK = 512;
constexpr float NEVER = -__builtin_inff();

// rows a and b of 16-bit values, element by element side by side; b may be absent
inline void pair_rows(const uint16_t* a, const uint16_t* b, int64_t n, uint32_t* to) {
  if (b)
    for (int64_t i = 0; i < n; ++i) to[i] = (uint32_t)a[i] | (uint32_t)b[i] << 16;
  else
    for (int64_t i = 0; i < n; ++i) to[i] = a[i];
}

// The workspace of one thread, and the work on one block of query rows. The products are of P: T or float.
template <class P, class T, class M> struct AttentionTile {
  static constexpr bool pairs = is_low<P>;       // operands go to the products as 16-bit pairs
  static constexpr bool converts = !same<P, T>;  // operands become P first
  static constexpr bool strips = BY_STRIPS && !pairs;  // of keys and values
  const Attention& a;
  float scale;
  int64_t width;  // keys of a block
  char* memory;
  float *scores, *keys, *result, *top, *sum;  // scores, weights [rows][width], keys [depth (/ 2)][width] words
  P *queries, *weights, *values;  // [rows][depth], weights [rows][width], values [width][depth_v, whole strips of it]

  AttentionTile(const Attention& attention, float factor) : a(attention), scale(factor) {
    const int64_t rows = a.rows < QUERY_BLOCK ? (a.rows + LANES - 1) / LANES * LANES : QUERY_BLOCK;
    width = a.keys < KEY_BLOCK ? (a.keys + 15) / 16 * 16 : KEY_BLOCK;
    const int64_t tile = rows * width, words = a.depth / (pairs ? 2 : 1);
    const int64_t floats = tile + words * width + rows * a.depth_v + 2 * rows;
    const int64_t row_v = strips ? whole_strips(a.depth_v, STRIP_COLUMNS) : a.depth_v;
    const int64_t of_values = pairs || converts || strips ? width * row_v : 0;
    const int64_t of_queries = converts ? rows * a.depth : 0;
    const int64_t own = of_values + of_queries + (pairs ? tile : 0);
    memory = (char*)aligned_alloc(64, (floats * 4 + own * (int64_t)sizeof(P) + 63) / 64 * 64);
    scores = (float*)memory;
    keys = scores + tile;
    result = keys + words * width;
    top = result + rows * a.depth_v;
    sum = top + rows;
    values = (P*)(sum + rows);
    queries = values + of_values;
    weights = pairs ? queries + of_queries : (P*)scores;  // floats take the scores' place
  }
  ~AttentionTile() { free(memory); }

  struct Block {  // rows as products read them
    const P* at;
    int64_t row;
  };
  // m rows of n elements in the products' dtype: as they lie, or in `room`
  DICP_INLINE Block as_products_read(const T* from, int64_t row, int64_t m, int64_t n, P* room) {
    if constexpr (!converts) return {from, row};
    else return bring(from, row, 1, m, n, room, n), Block{room, n};
  }
  // n rows of values, by pairs of rows where products want such
  DICP_INLINE Block values_of(const T* v, int64_t n) {
    if constexpr (pairs) {
      for (int64_t i = 0; i < n; i += 2)
        pair_rows((const uint16_t*)(v + i * a.v[2]), i + 1 < n ? (const uint16_t*)(v + (i + 1) * a.v[2]) : nullptr,
                  a.depth_v, (uint32_t*)values + i / 2 * a.depth_v);
      return {values, a.depth_v};
    } else {
      return as_products_read(v, a.v[2], n, a.depth_v, values);
    }
  }

  // scores -> weights of one row: n keys of which the first `valid` count; what was summed so far is rescaled
  DICP_INLINE void soft_row(int64_t r, int64_t n, int64_t valid, const M* mask) {
    float* const s = scores + r * width;
    P* const w = weights + r * width;
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
      const vf32 x = exp_normal(load(s + c, lanes) - bias);
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
    const Block of_queries = as_products_read(q + first * a.q[2], a.q[2], count, a.depth, queries);
    for (int64_t i = 0; end == 0 && i < count * a.depth_v; ++i) result[i] = 0.0f;  // no keys: no product does it
    for (int64_t k0 = 0; k0 < end; k0 += width) {
      const int64_t n = end - k0 < width ? end - k0 : width;
      // pairs of 16-bit values, which the product wants, move as words of 32 bits
      if constexpr (pairs) bring((const float*)(k + k0 * a.k[2]), 1, a.k[2] / 2, a.depth / 2, n, keys, width);
      else if constexpr (strips) pack_columns(k + k0 * a.k[2], 1, a.k[2], a.depth, n, keys);
      else bring(k + k0 * a.k[2], 1, a.k[2], a.depth, n, keys, width);
      if constexpr (strips)
        strip_products(count, n, a.depth, rows_of(of_queries.at, of_queries.row, count), keys, scores, width, false);
      else product(count, n, a.depth, of_queries.at, of_queries.row, (const P*)keys, width, scores, width, false);
      const int64_t even = pairs ? (n + 1) / 2 * 2 : n;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t seen = first + r + 1 - k0, valid = !causal || seen > n ? n : seen < 0 ? 0 : seen;
        soft_row(r, even, valid, mask ? mask + (first + r) * a.mask[2] + k0 * a.mask[3] : nullptr);
      }
      if constexpr (strips) {
        pack_columns(v + k0 * a.v[2], a.v[2], 1, n, a.depth_v, values);
        strip_products(count, a.depth_v, n, rows_of(weights, width, count), values, result, a.depth_v, k0 > 0);
      } else {
        const Block of_values = values_of(v + k0 * a.v[2], n);
        product(count, a.depth_v, even, weights, width, of_values.at, of_values.row, result, a.depth_v, k0 > 0);
      }
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
template <class P, class T, class M>
int32_t flash_attention(const T* q, const T* k, const T* v, const M* mask, T* out, float* log_sum,
                        const int64_t* sizes, double scale, bool causal) {
  const Attention& a = *(const Attention*)sizes;
  const int64_t blocks = (a.rows + QUERY_BLOCK - 1) / QUERY_BLOCK, group = a.heads / a.kv_heads;
  int32_t failed = 0;
#pragma omp parallel reduction(| : failed)
  {
    AttentionTile<P, T, M> tile(a, (float)scale);
    if (!tile.memory) failed = 1;
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t i = 0; i < blocks; ++i) {
          if (failed) continue;
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
    if (AttentionTile<P, T, M>::pairs) at::native::cpublas::brgemm_release(true);
  }
  return failed;
}

}  // namespace dicp
