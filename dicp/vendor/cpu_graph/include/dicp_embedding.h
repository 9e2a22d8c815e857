// Gradient of a table of rows that tokens look up, in low precision: the contributions to a row are added in float32
// and the sum is stored once. Each element of the table is written once, zeros included; or, `onto` what the table
// holds, each of the rows that tokens look up.
#pragma once
#include "dicp_kernel.h"

namespace dicp {

// grad: [tokens, columns], table: [rows, columns], both dense. sizes: tokens, columns, rows, and the row that gets
// nothing. lists: rows + tokens words, for the tokens of each row as linked lists: first[row], then next[token], -1 at
// the end.
template <bool onto, class T, class I>
DICP_INLINE void embedding_gradient(const T* grad, const I* index, T* table, const int64_t* sizes, int32_t* lists) {
  const int64_t tokens = sizes[0], columns = sizes[1], rows = sizes[2], padding = sizes[3];
  constexpr int64_t PART = 256;  // columns of a task: tables of few rows keep all threads busy too
  int32_t* const first = lists;
  int32_t* const next = lists + rows;
  for (int64_t r = 0; r < rows; ++r) first[r] = -1;
  for (int64_t t = tokens - 1; t >= 0; --t) {  // backwards, so that lists ascend
    const int64_t r = index[t];
    if (r < 0 || r >= rows || r == padding) continue;  // outside: the look-up has refused it; eager skips it too
    next[t] = first[r];
    first[r] = (int32_t)t;
  }
  const int64_t parts = (columns + PART - 1) / PART;
#pragma omp parallel for collapse(2) schedule(static) if (rows * columns > (1 << 14))
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t p = 0; p < parts; ++p) {
      if (onto && first[r] < 0) continue;
      const int64_t end = (p + 1) * PART < columns ? (p + 1) * PART : columns;
      const auto sum = [&](int64_t c, auto lanes) {
        vf32 total = {};
        if constexpr (onto) total = cast<vf32>(load(table + r * columns + c, lanes));
        for (int64_t t = first[r]; t >= 0; t = next[t]) total = total + cast<vf32>(load(grad + t * columns + c, lanes));
        store(table + r * columns + c, total, lanes);
      };
      int64_t c = p * PART;
      for (; c + LANES <= end; c += LANES) sum(c, Full());
      if (c < end) sum(c, Lanes{(int)(end - c)});
    }
}

}  // namespace dicp
