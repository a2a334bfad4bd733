// The gated linear unit with silu, silu(gate) * up.
//
// `stride` is the row stride of gate and up and of their gradients, in elements: 2 * width where
// they are the halves of the rows of one array. out and dout are dense. Where all arrays are dense,
// they count as one row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T>
struct Swiglu {
  static cudaError_t forward(cudaStream_t stream, const T* gate, const T* up, T* out, int64_t rows,
                             int64_t width, int64_t stride);
  static cudaError_t backward(cudaStream_t stream, const T* gate, const T* up, const T* dout,
                              T* dgate, T* dup, int64_t rows, int64_t width, int64_t stride);
};

}  // namespace jaxllm
