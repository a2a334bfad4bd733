// The gated linear unit with silu, silu(gate) * up.
//
// `stride` is the number of elements from one row of gate, and of up, to the next: 2 * width where
// they are the halves of the rows of one array. The same holds for their gradients; out and dout
// have nothing between their rows. Arrays without anything between their rows are one long row.
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
