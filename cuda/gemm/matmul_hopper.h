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

  // h = x weight, out = gelu(h + bias): x (rows, width), weight (width, columns).
  static cudaError_t bias_gelu(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                               T* h, T* out, int64_t rows, int64_t width, int64_t columns);

  // dh = (dout weight^T) gelu'(h + bias), dbias = the sum over rows of dh, before it is rounded:
  // dout (rows, width), weight (columns, width), h (rows, columns). `partial` is a workspace of a
  // row of `columns` floats for every 128 rows.
  static cudaError_t gelu_slope(cudaStream_t stream, const T* dout, const T* weight, const T* h,
                                const T* bias, T* dh, T* dbias, float* partial, int64_t rows,
                                int64_t width, int64_t columns);
};

}  // namespace jaxllm
