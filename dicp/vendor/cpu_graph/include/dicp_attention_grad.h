// Gradients of attention by tiles: blocks of keys against one block of query rows after the other, whose softmax is
// known from the sums that the forward kept (flash attention, Dao et al. 2022). With P = softmax(scale Q K^T + mask):
//
//   dV = P^T dO    dS = P * (dO V^T - sum(dO * O)) scale    dK = dS^T Q    dQ = dS K
//
// Scores are computed by columns, P^T and dS^T, as three of the five products want them; dS is transposed on the way.
#pragma once
#include "dicp_attention.h"

namespace dicp {

// Strides as in Attention, whose `out` is that of the result O.
struct AttentionGradient {
  Attention of;
  int64_t grad[3], q[3], k[3], v[3];  // of dO, dQ, dK, dV
};

// Blocks of a thread: their scores and slopes (256 KB) stay in its second-level cache; of strips, whole ones.
constexpr int64_t GRAD_QUERIES = BY_STRIPS ? 144 : 128, GRAD_KEYS = BY_STRIPS ? 240 : 256;

// The workspace of one thread, and the work on one head of keys.
template <class T, class M> struct AttentionGradientTile {
  static constexpr bool pairs = is_low<T>;  // operands go to the products as 16-bit pairs
  static constexpr bool strips = BY_STRIPS && !pairs;  // of what products read on their right
  static constexpr int64_t whole = strips ? STRIP_COLUMNS : LANES;
  const AttentionGradient& g;
  const Attention& a;
  float scale;
  int64_t queries, keys;  // of a block, in whole vectors
  char* memory;
  float *scores, *slopes;       // S^T and dP^T: [keys][queries]
  float *transposed_q, *transposed_g;   // words of Q^T and dO^T: [depth (/ 2)][queries]
  float *top, *inner;           // of each query: the logarithm of its sum, dO * O
  float *sum_q, *sum_k, *sum_v;  // [queries][depth], [all keys][depth], [all keys][depth_v]
  T *weights, *tangents, *transposed;     // P^T and dS^T: [keys][queries], dS: [queries][keys]
  T *arranged_q, *arranged_g, *arranged_k;  // rows by pairs or in strips, where products want such

  AttentionGradientTile(const AttentionGradient& gradient, float factor)
      : g(gradient), a(gradient.of), scale(factor) {
    queries = whole_strips(least_of(a.rows, GRAD_QUERIES), whole);
    keys = whole_strips(least_of(a.keys, GRAD_KEYS), whole);
    const int64_t tile = keys * queries, depths = a.depth + a.depth_v;
    const int64_t of_q = strips ? whole_strips(a.depth, whole) : a.depth;
    const int64_t of_g = strips ? whole_strips(a.depth_v, whole) : a.depth_v;
    const int64_t floats = 2 * tile + queries * (depths + 2 + a.depth) + a.keys * depths;
    const int64_t arranged = pairs || strips ? queries * (of_q + of_g) + keys * of_q : 0;
    const int64_t own = tile + (pairs ? 2 * tile : 0) + arranged;
    memory = (char*)aligned_alloc(64, (floats * 4 + own * (int64_t)sizeof(T) + 63) / 64 * 64);
    scores = (float*)memory, slopes = scores + tile;
    transposed_q = slopes + tile, transposed_g = transposed_q + queries * a.depth;
    top = transposed_g + queries * a.depth_v, inner = top + queries;
    sum_q = inner + queries, sum_k = sum_q + queries * a.depth, sum_v = sum_k + a.keys * a.depth;
    transposed = (T*)(sum_v + a.keys * a.depth_v);
    weights = pairs ? transposed + tile : (T*)scores, tangents = pairs ? weights + tile : (T*)slopes;
    arranged_q = pairs ? tangents + tile : transposed + tile;
    arranged_g = arranged_q + queries * of_q, arranged_k = arranged_g + queries * of_g;
  }
  ~AttentionGradientTile() { free(memory); }
  static int64_t least_of(int64_t x, int64_t y) { return x < y ? x : y; }
  static int64_t even(int64_t n) { return pairs ? (n + 1) / 2 * 2 : n; }

  struct Block {  // rows as products read them on their right
    const T* at;
    int64_t row;
  };
  DICP_INLINE Block right(const T* from, int64_t row, int64_t m, int64_t n, T* room) {
    if constexpr (strips) return pack_columns(from, row, 1, m, n, room), Block{room, n};
    if constexpr (!pairs) return {from, row};
    for (int64_t i = 0; i < m; i += 2)
      pair_rows((const uint16_t*)(from + i * row), i + 1 < m ? (const uint16_t*)(from + (i + 1) * row) : nullptr, n,
                (uint32_t*)room + i / 2 * n);
    return {room, n};
  }
  // m rows of n elements -> words of their columns
  DICP_INLINE void transpose_rows(const T* from, int64_t row, int64_t m, int64_t n, float* to) {
    if constexpr (pairs) bring((const float*)from, 1, row / 2, n / 2, m, to, queries);
    else if constexpr (strips) pack_columns(from, 1, row, n, m, to);
    else bring(from, 1, row, n, m, to, queries);
  }

  // c[m][n], `step` from row to row, (+)= m rows, `row` apart, times n columns of the depth
  DICP_INLINE static void multiply(int64_t m, int64_t n, int64_t depth, const T* left, int64_t row, Block on_right,
                                   float* c, int64_t step, bool add) {
    if constexpr (strips) strip_products(m, n, depth, rows_of(left, row, m), on_right.at, c, step, add);
    else product(m, n, even(depth), left, row, on_right.at, on_right.row, c, step, add);
  }

  // what one key, `key`, adds to the scores of the queries from `query` on
  template <class N> DICP_INLINE vf32 masked(const M* mask, int64_t query, int64_t key, N lanes) {
    const M* const from = mask + query * a.mask[2] + key * a.mask[3];
    if (a.mask[2] == 0) return splat<vf32>((float)decode_one(*from));
    if (a.mask[2] == 1) return cast<vf32>(load(from, lanes));
    return cast<vf32>(load_strided(from, a.mask[2], lanes));
  }

  // P^T, dS^T and dS of m queries from `first` on and n keys from k0 on; 0 up to whole vectors of both
  void differentiate(int64_t first, int64_t m, int64_t k0, int64_t n, const M* mask, bool causal) {
    const bool crossed = causal && k0 + n > first + 1;  // some key comes after some query
    for (int64_t r0 = 0; r0 < n; r0 += LANES)
      each_part(m, [&](int64_t c, auto lanes) INLINE {
        const vf32 bias = load(top + c, lanes), mean = load(inner + c, lanes);
        vf32 d[LANES];
        for (int64_t r = 0; r < LANES; ++r) {
          d[r] = splat<vf32>(0.0f);
          if (r0 + r >= n) continue;
          const int64_t at = (r0 + r) * queries + c, key = k0 + r0 + r;
          vf32 s = load(scores + at, lanes) * scale;
          if (mask) s = s + masked(mask, first + c, key, lanes);
          vf32 p = blend(lanes, exp_normal(s - bias), 0.0f);
          if (crossed) p = where(ge(iota32((int32_t)(first + c)), (int32_t)key), p, 0.0f);
          d[r] = blend(lanes, p * (load(slopes + at, lanes) - mean) * scale, 0.0f);
          store(weights + at, p, Full());
          store(tangents + at, d[r], Full());
        }
        transpose(d);
        for (int q = 0; q < count(lanes); ++q) store(transposed + (c + q) * keys + r0, d[q], Full());
      });
  }

  // what the sums of m query rows say: exp(score - top) is the weight, 0 in a row of which all is masked
  void prepare(const T* grad, const T* out, const float* log_sum, int64_t m) {
    for (int64_t i = 0; i < m; ++i) {
      vf32 total = splat<vf32>(0.0f);
      each_part(a.depth_v, [&](int64_t c, auto lanes) INLINE {
        total = fma(cast<vf32>(load(grad + i * g.grad[2] + c, lanes)), cast<vf32>(load(out + i * a.out[2] + c, lanes)),
                    total);
      });
      inner[i] = hsum(total);
      top[i] = log_sum[i * a.log_sum[2]] == NEVER ? -NEVER : log_sum[i * a.log_sum[2]];
    }
  }

  // query rows [first, first + m) of one head against all keys that they see; the pointers are those of the head
  void block(const T* grad, const T* q, const T* k, const T* v, const M* mask, bool causal, int64_t first, int64_t m,
             T* dq) {
    const T *const rows_q = q + first * a.q[2], *const rows_g = grad + first * g.grad[2];
    transpose_rows(rows_q, a.q[2], m, a.depth, transposed_q);
    transpose_rows(rows_g, g.grad[2], m, a.depth_v, transposed_g);
    const Block right_q = right(rows_q, a.q[2], m, a.depth, arranged_q);
    const Block right_g = right(rows_g, g.grad[2], m, a.depth_v, arranged_g);
    const int64_t end = causal ? least_of(first + m, a.keys) : a.keys;
    for (int64_t i = 0; end == 0 && i < m * a.depth; ++i) sum_q[i] = 0.0f;  // no keys: no product does it
    for (int64_t k0 = 0; k0 < end; k0 += keys) {
      const int64_t n = least_of(end - k0, keys);
      const T *const rows_k = k + k0 * a.k[2], *const rows_v = v + k0 * a.v[2];
      multiply(n, m, a.depth, rows_k, a.k[2], {(const T*)transposed_q, queries}, scores, queries, false);
      multiply(n, m, a.depth_v, rows_v, a.v[2], {(const T*)transposed_g, queries}, slopes, queries, false);
      differentiate(first, m, k0, n, mask, causal);
      float *const to_v = sum_v + k0 * a.depth_v, *const to_k = sum_k + k0 * a.depth;
      multiply(n, a.depth_v, m, weights, queries, right_g, to_v, a.depth_v, true);
      multiply(n, a.depth, m, tangents, queries, right_q, to_k, a.depth, true);
      multiply(m, a.depth, n, transposed, keys, right(rows_k, a.k[2], n, a.depth, arranged_k), sum_q, a.depth, k0 > 0);
    }
    put(sum_q, m, a.depth, dq + first * g.q[2], g.q[2]);
  }

  static void put(const float* sums, int64_t m, int64_t n, T* to, int64_t row) {
    for (int64_t i = 0; i < m; ++i)
      each_part(n, [&](int64_t c, auto lanes) { store(to + i * row + c, load(sums + i * n + c, lanes), lanes); });
  }
};

// log_sum: of each row's exponentials; mask may be null. Returns not 0 where memory is short or the micro-kernels
// raised.
template <class T, class M>
int32_t flash_attention_gradient(const T* grad, const T* q, const T* k, const T* v, const T* out, const float* log_sum,
                                 const M* mask, T* dq, T* dk, T* dv, const int64_t* sizes, double scale, bool causal) {
  const AttentionGradient& g = *(const AttentionGradient*)sizes;
  const Attention& a = g.of;
  const int64_t group = a.heads / a.kv_heads;
  int32_t failed = 0;
#pragma omp parallel reduction(| : failed)
  {
    AttentionGradientTile<T, M> tile(g, (float)scale);
    if (!tile.memory) failed = 1;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t of_keys = 0; of_keys < a.kv_heads; ++of_keys) {
        if (failed) continue;
        const T *const k0 = k + b * a.k[0] + of_keys * a.k[1], *const v0 = v + b * a.v[0] + of_keys * a.v[1];
        for (int64_t i = 0; i < a.keys * (a.depth + a.depth_v); ++i) tile.sum_k[i] = 0.0f;
        try {
          for (int64_t h = of_keys * group; h < (of_keys + 1) * group; ++h)
            for (int64_t first = 0; first < a.rows; first += GRAD_QUERIES) {
              const int64_t m = a.rows - first < GRAD_QUERIES ? a.rows - first : GRAD_QUERIES;
              const T* const grad0 = grad + b * g.grad[0] + h * g.grad[1];
              tile.prepare(grad0 + first * g.grad[2], out + b * a.out[0] + h * a.out[1] + first * a.out[2],
                           log_sum + b * a.log_sum[0] + h * a.log_sum[1] + first * a.log_sum[2], m);
              tile.block(grad0, q + b * a.q[0] + h * a.q[1], k0, v0,
                         mask ? mask + b * a.mask[0] + h * a.mask[1] : nullptr, causal, first, m,
                         dq + b * g.q[0] + h * g.q[1]);
            }
        } catch (...) {
          failed = 1;
        }
        tile.put(tile.sum_k, a.keys, a.depth, dk + b * g.k[0] + of_keys * g.k[1], g.k[2]);
        tile.put(tile.sum_v, a.keys, a.depth_v, dv + b * g.v[0] + of_keys * g.v[1], g.v[2]);
      }
    if (tile.pairs) at::native::cpublas::brgemm_release(true);
  }
  return failed;
}

}  // namespace dicp
