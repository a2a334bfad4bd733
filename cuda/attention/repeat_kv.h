// Repeats key or value heads for the query heads that share them (grouped-query attention).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T>
struct RepeatKv {
  // Writes each of the `heads` rows of x, `width` wide, `groups` times, one copy after the other.
  static cudaError_t forward(cudaStream_t stream, const T* x, T* out, int64_t heads, int64_t width,
                             int64_t groups);

  // dx is the sum over the copies of dout.
  static cudaError_t backward(cudaStream_t stream, const T* dout, T* dx, int64_t heads,
                              int64_t width, int64_t groups);
};

}  // namespace jaxllm
