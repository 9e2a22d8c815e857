// Library calls of generated programs, through libtorch's C interface: own declarations, no torch header.
// A call returns 0, or not 0 when it raised (libtorch then has logged what).
#pragma once
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <new>

extern "C" {
typedef struct DicpTensor* Handle;
int32_t aoti_torch_create_tensor_from_blob(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                           int64_t offset, int32_t dtype, int32_t device, int32_t index, Handle* out);
int32_t aoti_torch_delete_tensor_object(Handle t);
int32_t aoti_torch_get_data_ptr(Handle t, void** out);
int32_t aoti_torch_get_stride(Handle t, int64_t d, int64_t* out);
int32_t aoti_torch_get_size(Handle t, int64_t d, int64_t* out);
int32_t aoti_torch_get_dim(Handle t, int64_t* out);
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device, int32_t index, Handle* out);
int32_t aoti_torch_copy_(Handle self, Handle src, int32_t non_blocking);
int32_t aoti_torch_clone(Handle self, Handle* out);
int32_t aoti_torch_new_tensor_handle(Handle t, Handle* out);
int32_t torch_call_dispatcher(const char* op, const char* overload, uint64_t* stack, uint64_t version);
int32_t torch_new_list_reserve_size(size_t size, struct DicpList** out);
int32_t torch_list_push_back(struct DicpList* list, uint64_t item);
int32_t torch_list_get_item(struct DicpList* list, size_t k, uint64_t* item);
int32_t torch_delete_list(struct DicpList* list);
int32_t torch_new_string_handle(const char* data, size_t length, struct DicpString** out);
int32_t aoti_torch_cpu_add_Tensor(Handle x, Handle other, double alpha, Handle* out);
int32_t aoti_torch_cpu_mul_Scalar(Handle x, double other, Handle* out);
int32_t aoti_torch_cpu_histc(Handle x, int64_t bins, double low, double high, Handle* out);
int32_t aoti_torch_cpu_mm_out(Handle out, Handle a, Handle b);
int32_t aoti_torch_cpu_addmm_out(Handle out, Handle bias, Handle a, Handle b, double beta, double alpha);
int32_t aoti_torch_cpu_bmm_out(Handle out, Handle a, Handle b);
int32_t aoti_torch_cpu_baddbmm_out(Handle out, Handle c, Handle a, Handle b, double beta, double alpha);
int32_t aoti_torch_cpu__linear_pointwise(Handle x, Handle w, Handle* bias, const char* act, const double** scalars,
                                         int64_t n_scalars, const char** algorithm, Handle* out);
int32_t aoti_torch_cpu__linear_pointwise_binary(Handle x, Handle other, Handle w, Handle* bias, const char* op,
                                                Handle* out);
int32_t aoti_torch_cpu_convolution(Handle x, Handle w, Handle* bias, const int64_t* stride, int64_t, const int64_t* pad,
                                   int64_t, const int64_t* dilation, int64_t, int32_t transposed, const int64_t* opad,
                                   int64_t, int64_t groups, Handle* out);
int32_t aoti_torch_cpu_mkldnn__convolution_pointwise(Handle x, Handle w, Handle* bias, const int64_t* pad, int64_t,
                                                     const int64_t* stride, int64_t, const int64_t* dilation, int64_t,
                                                     int64_t groups, const char* act, const double** scalars,
                                                     int64_t n_scalars, const char** algorithm, Handle* out);
int32_t aoti_torch_cpu_mkldnn__convolution_pointwise_binary(Handle x, Handle other, Handle w, Handle* bias,
                                                            const int64_t* pad, int64_t, const int64_t* stride, int64_t,
                                                            const int64_t* dilation, int64_t, int64_t groups,
                                                            const char* op, double* alpha, const char** act,
                                                            const double** scalars, int64_t n_scalars,
                                                            const char** algorithm, Handle* out);
int32_t aoti_torch_cpu_mkldnn__convolution_pointwise_binary_(Handle other, Handle x, Handle w, Handle* bias,
                                                             const int64_t* pad, int64_t, const int64_t* stride,
                                                             int64_t, const int64_t* dilation, int64_t, int64_t groups,
                                                             const char* op, double* alpha, const char** act,
                                                             const double** scalars, int64_t n_scalars,
                                                             const char** algorithm, Handle* out);
int32_t aoti_torch_cpu_convolution_backward(Handle grad, Handle x, Handle w, const int64_t** bias_sizes, int64_t,
                                            const int64_t* stride, int64_t, const int64_t* pad, int64_t,
                                            const int64_t* dilation, int64_t, int32_t transposed, const int64_t* opad,
                                            int64_t, int64_t groups, const int32_t* mask, int64_t, Handle* dx,
                                            Handle* dw, Handle* db);
int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(Handle q, Handle k, Handle v, double dropout,
                                                                   int32_t causal, Handle* mask, double* scale,
                                                                   Handle* out, Handle* logsumexp);
int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward(
    Handle grad, Handle q, Handle k, Handle v, Handle out, Handle logsumexp, double dropout, int32_t causal,
    Handle* mask, double* scale, Handle* dq, Handle* dk, Handle* dv);
int32_t aoti_torch_cpu_max_pool2d_with_indices(Handle x, const int64_t* kernel, int64_t, const int64_t* stride, int64_t,
                                               const int64_t* pad, int64_t, const int64_t* dilation, int64_t,
                                               int32_t ceil_mode, Handle* out, Handle* indices);
int32_t aoti_torch_cpu_max_pool2d_with_indices_backward(Handle grad, Handle x, const int64_t* kernel, int64_t,
                                                        const int64_t* stride, int64_t, const int64_t* pad, int64_t,
                                                        const int64_t* dilation, int64_t, int32_t ceil_mode,
                                                        Handle indices, Handle* out);
int32_t aoti_torch_cpu_native_dropout(Handle x, double p, int32_t* train, Handle* out, Handle* mask);
int32_t aoti_torch_cpu_sort(Handle x, int64_t dim, int32_t descending, Handle* values, Handle* indices);
int32_t aoti_torch_cpu_sort_stable(Handle x, int32_t* stable, int64_t dim, int32_t descending, Handle* values,
                                   Handle* indices);
int32_t aoti_torch_cpu_topk(Handle x, int64_t k, int64_t dim, int32_t largest, int32_t sorted, Handle* values,
                            Handle* indices);
// MKL's, with words of 64 bits, of which its interface of 32 bits reads half. a * b, of rows by default; b in its form
void cblas_sgemm_compute(int64_t order, int64_t a_form, int64_t b_form, int64_t m, int64_t n, int64_t k, const float* a,
                         int64_t a_row, const float* b, int64_t b_row, float beta, float* c, int64_t c_row);
void sgemm_(const char* a_form, const char* b_form, const int64_t* m, const int64_t* n, const int64_t* k,
            const float* alpha, const float* a, const int64_t* a_column, const float* b, const int64_t* b_column,
            const float* beta, float* c, const int64_t* c_column);
}

namespace dicp {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// An owned tensor handle.
struct Tensor {
  Handle h = nullptr;
  Tensor() = default;
  Tensor(Tensor&& o) : h(o.h) { o.h = nullptr; }
  Tensor(const Tensor&) = delete;
  ~Tensor() { reset(); }
  void reset() {
    if (h) aoti_torch_delete_tensor_object(h);
    h = nullptr;
  }
  Handle release() {
    Handle out = h;
    h = nullptr;
    return out;
  }
  template <class T> T* data() const {
    void* p = nullptr;
    if (h) aoti_torch_get_data_ptr(h, &p);
    return (T*)p;
  }
  bool allocate(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    return !aoti_torch_empty_strided(ndim, sizes, strides, dtype, 0, 0, &h);
  }
  // Lay the tensor out with the strides that the program was planned for; libraries may choose others. False where it
  // is of another size than was foreseen.
  bool require(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    int64_t have = 0;
    aoti_torch_get_dim(h, &have);
    if (have != ndim) return false;
    bool same = true;
    for (int64_t d = 0; d < ndim; ++d) {
      aoti_torch_get_size(h, d, &have);
      if (have != sizes[d]) return false;
      aoti_torch_get_stride(h, d, &have);
      same &= sizes[d] == 1 || have == strides[d];
    }
    if (same) return true;
    Tensor fresh;
    if (!fresh.allocate(ndim, sizes, strides, dtype)) return false;
    if (aoti_torch_copy_(fresh.h, h, 0)) return false;
    Handle old = h;
    h = fresh.h;
    fresh.h = old;
    return true;
  }
};

// A tensor handle on memory of the program.
inline Tensor view(const void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  Tensor t;
  aoti_torch_create_tensor_from_blob((void*)data, ndim, sizes, strides, 0, dtype, 0, 0, &t.h);
  return t;
}

// y = conv(x, w) + bias + other, of stride 1, into memory of the program; bias and other may be null. By oneDNN's call,
// which takes a bias of float32 with images in bf16.
inline int32_t convolve_into(Handle y, Handle x, Handle w, Handle* bias, Handle other, const int64_t* padding) {
  const int64_t ones[] = {1, 1};
  Tensor result, sum;
  if (aoti_torch_cpu_mkldnn__convolution_pointwise(x, w, bias, padding, 2, ones, 2, ones, 2, 1, "none", nullptr, 0, nullptr,
                                                   &result.h))
    return 1;
  if (other && aoti_torch_cpu_add_Tensor(result.h, other, 1.0, &sum.h)) return 1;
  return aoti_torch_copy_(y, other ? sum.h : result.h, 0);
}

// to = a gradient of conv(x, w), of stride 1, from that of its result: 0 of x, 1 of w
inline int32_t gradient_into(Handle to, Handle grad, Handle x, Handle w, const int64_t* padding, int of) {
  const int64_t ones[] = {1, 1}, none[] = {0, 0};
  const int32_t mask[] = {of == 0, of == 1, 0};
  Tensor results[3];
  if (aoti_torch_cpu_convolution_backward(grad, x, w, nullptr, 0, ones, 2, padding, 2, ones, 2, 0, none, 2, 1, mask, 3,
                                          &results[0].h, &results[1].h, &results[2].h))
    return 1;
  return aoti_torch_copy_(to, results[of].h, 0);
}

// -- Calls through the dispatcher: arguments and results are 64-bit words on a stack. The call takes over what the
// words of its arguments own.

typedef uint64_t Word;
const uint64_t OLDEST = (uint64_t)2 << 56 | (uint64_t)11 << 48;  // the torch whose conventions the words follow

inline Word word(int64_t n) { return (Word)n; }
inline Word word(double x) {
  Word w;
  memcpy(&w, &x, sizeof w);
  return w;
}
inline Word word(const Tensor& t) {
  Handle own = nullptr;
  aoti_torch_new_tensor_handle(t.h, &own);
  return (Word)own;
}
inline Word word(const char* text) {
  DicpString* own = nullptr;
  torch_new_string_handle(text, strlen(text), &own);
  return (Word)own;
}
inline Word list(const Word* items, size_t n) {
  DicpList* own = nullptr;
  torch_new_list_reserve_size(n, &own);
  for (size_t k = 0; k < n; ++k) torch_list_push_back(own, items[k]);
  return (Word)own;
}
// An optional that has a value; one without is 0.
inline Word some(Word w) { return (Word) new Word(w); }

// Leaves what a failed call was given in the caller's words, and gives the code back.
template <size_t n> inline int64_t failed(int64_t* words, int64_t code, const Word (&given)[n]) {
  memcpy(words, given, sizeof given);
  return code;
}

// Results into tensors; `copy` where the op returns views, which would change with the memory of the program.
inline void take(Word w, Tensor* into, bool copy) {
  Tensor found;
  found.h = (Handle)w;
  if (!into) return;
  into->reset();
  if (copy && found.h) aoti_torch_clone(found.h, &into->h);
  else into->h = found.release();
}
inline void take_list(Word w, Tensor* const* into, size_t n, bool copy) {
  for (size_t k = 0; k < n; ++k) {
    Word item = 0;
    torch_list_get_item((DicpList*)w, k, &item);
    take(item, into[k], copy);
  }
  torch_delete_list((DicpList*)w);
}

// Words of claims/packed_mkl.py: a weight as MKL multiplies `rows` rows by it, and [columns, depth] as it was, of which
// dim `along` is dense and the other's elements are `apart`.
struct PackedByMkl {
  const float *form, *weight;
  int64_t rows, columns, depth, apart, along;
};

// y = x w^T + bias: rows of x are x_row apart, y is dense.
inline int32_t linear_by_mkl(const float* x, int64_t rows, int64_t x_row, const int64_t* words, const float* bias,
                             float* y) {
  constexpr int64_t ROW_MAJOR = 101, AS_IT_IS = 111, PACKED = 151;
  const PackedByMkl& w = *(const PackedByMkl*)words;
  if (!rows) return 0;
  if (bias) {
#pragma omp parallel for if (rows * w.columns > 1 << 15)
    for (int64_t i = 0; i < rows; ++i) memcpy(y + i * w.columns, bias, sizeof(float) * w.columns);
  }
  const float product = 1, before = bias ? 1 : 0;
  if (rows == w.rows) {
    cblas_sgemm_compute(ROW_MAJOR, AS_IT_IS, PACKED, rows, w.columns, w.depth, x, x_row, w.form, w.depth, before, y,
                        w.columns);
  } else {  // by columns, as which rows of y are those of y^T = w x^T
    sgemm_(w.along ? "T" : "N", "N", &w.columns, &rows, &w.depth, &product, w.weight, &w.apart, x, &x_row, &before, y,
           &w.columns);
  }
  return 0;
}

}  // namespace dicp
