// A bias, alone and with the GELU after it.
//
// A call has `groups` groups (the axis that jax.vmap adds), each with its own bias and bias
// gradient. Every group has `rows` rows of `width` elements. `partial` is a workspace of (groups,
// partial_rows, width) floats.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T>
struct BiasAdd {
  // out = x + bias.
  static cudaError_t forward(cudaStream_t stream, const T* x, const T* bias, T* out, int64_t groups,
                             int64_t rows, int64_t width);

  // dbias = the sum over rows of dout; the gradient of x is dout itself.
  static cudaError_t backward(cudaStream_t stream, const T* dout, T* dbias, float* partial,
                              int64_t groups, int64_t rows, int64_t width, int64_t partial_rows);
};

template <typename T>
struct BiasGelu {
  // out = gelu(x + bias).
  static cudaError_t forward(cudaStream_t stream, const T* x, const T* bias, T* out, int64_t groups,
                             int64_t rows, int64_t width);

  // dx = dout * gelu'(x + bias); dbias = the sum over rows of dx, before it is rounded.
  static cudaError_t backward(cudaStream_t stream, const T* x, const T* bias, const T* dout, T* dx,
                              T* dbias, float* partial, int64_t groups, int64_t rows, int64_t width,
                              int64_t partial_rows);
};

}  // namespace jaxllm
