// Matrix products by Hopper's tensor cores, with what precedes or follows them in a network.
//
// Widths are multiples of eight elements and pointers of 16 bytes, or the launchers return
// cudaErrorNotSupported; so they do on other GPUs than Hopper's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/matmul_call.h"

namespace jaxllm {

template <typename T>
struct MatmulHopper {
  // Any product, but for a float32 result of GELU. Widths are those of the arrays as they are
  // stored.
  static cudaError_t product(cudaStream_t stream, const MatmulCall<T>& call);

  // out = gelu(h + bias) with h = x weight: x (rows, width), weight (width, columns). `saved`
  // becomes gelu'(h + bias) with `slope`, else h.
  static cudaError_t bias_gelu(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                               bool slope, T* saved, T* out, int64_t rows, int64_t width,
                               int64_t columns);

  // out = (x weight^T) factors, elementwise, and sums = the sums over rows of out before it is
  // rounded: x (rows, width), weight (columns, width), factors (rows, columns). `partial` is a
  // workspace of a row of `columns` floats for every 128 rows.
  static cudaError_t scale(cudaStream_t stream, const T* x, const T* weight, const T* factors,
                           T* out, T* sums, float* partial, int64_t rows, int64_t width,
                           int64_t columns);

  // out = x weight + bias + residual, rounded once: x (rows, width), weight (width, columns),
  // residual (rows, columns).
  static cudaError_t residual(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                              const T* residual, T* out, int64_t rows, int64_t width,
                              int64_t columns);
};

}  // namespace jaxllm
