// oneDNN's micro-kernels for matrix products, which libtorch exports.
#pragma once
#include "dicp_parts.h"

#define DICP_LIBTORCH __attribute__((visibility("default")))
namespace c10 { struct BFloat16; }
namespace at::native::cpublas {
// C[m,n] (+)= A[m,k] B[k,n]; B of 16-bit types holds pairs of rows side by side ("vnni"): [k/2][n][2]
DICP_LIBTORCH void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                          const float* a, const float* b, float* c, bool vnni);
DICP_LIBTORCH void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                          const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool vnni);
DICP_LIBTORCH void brgemm_release(bool vnni);
}  // namespace at::native::cpublas
extern "C" void* aligned_alloc(unsigned long alignment, unsigned long size);
extern "C" void free(void*);

namespace dicp {

DICP_INLINE void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                         float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, false);
}
DICP_INLINE void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                         float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, (const c10::BFloat16*)a, (const c10::BFloat16*)b, c, true);
}

// Every DEPTH_TILE products a sum is rounded into memory, so that it errs as a sum of so many does and not as one of
// all: as MKL's, or less (scripts/products.py).
constexpr int64_t FEW = 16, DEPTH_TILE = 128;

// Rows beyond a multiple of FEW apart: oneDNN keeps a kernel for each number of rows that it has seen (44 KB a thread),
// which are then few, whatever sizes a program is called with.
template <class T>
DICP_INLINE void products(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                          int64_t ldc, bool add) {
  const int64_t rest = m % FEW, many = m - rest;
  if (many) product(many, n, k, a, lda, b, ldb, c, ldc, add);
  if (rest) product(rest, n, k, a + many * lda, lda, b, ldb, c + many * ldc, ldc, add);
}

}  // namespace dicp
