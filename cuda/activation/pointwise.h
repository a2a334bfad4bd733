// Activations and sums of arrays of one shape, given as `size` elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// The tanh form of the Gaussian error linear unit.
template <typename T>
struct Gelu {
  static cudaError_t forward(cudaStream_t stream, const T* x, T* out, int64_t size);
  static cudaError_t backward(cudaStream_t stream, const T* x, const T* dout, T* dx, int64_t size);
};

// max(x, 0).
template <typename T>
struct Relu {
  static cudaError_t forward(cudaStream_t stream, const T* x, T* out, int64_t size);
  static cudaError_t backward(cudaStream_t stream, const T* x, const T* dout, T* dx, int64_t size);
};

// 1 / (1 + exp(-x)).
template <typename T>
struct Sigmoid {
  static cudaError_t forward(cudaStream_t stream, const T* x, T* out, int64_t size);
  static cudaError_t backward(cudaStream_t stream, const T* x, const T* dout, T* dx, int64_t size);
};

// x + y; both gradients are dout itself.
template <typename T>
struct Add {
  static cudaError_t forward(cudaStream_t stream, const T* x, const T* y, T* out, int64_t size);
};

}  // namespace jaxllm
