// Activations and their gradients, rounded to 8-bit floats with a given scale, in the layouts that
// a GEMM on Hopper reads.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "quantization/float8_round.h"

namespace jaxllm {

// gelu(h) of h, or silu(g) u of the halves g and u of the rows of h.
struct Float8Gelu {
  static constexpr int kParts = 1;  // of a row of h
};
struct Float8Swiglu {
  static constexpr int kParts = 2;
};

// h is (rows, kParts width). What is finite does not overflow.
//
// cudaErrorNotSupported where the width is no multiple of 8, where a transposed matrix is wanted
// and the rows are no multiple of 16, and where a pointer is not a multiple of 16 bytes, or
// `values` of 8.
template <class Activation, typename T>
struct Float8Activation {
  const T* h;
  const float* scale;
  int64_t rows, width;

  // values = round(f(h) / scale), (rows, width); transposed (width, rows), nullptr where it is not
  // wanted.
  cudaError_t forward(cudaStream_t stream, __nv_fp8_e4m3* values, __nv_fp8_e4m3* transposed) const;

  // The gradient of h, given that of the result, (rows, width), over scale: values (rows, kParts
  // width) and transposed (kParts width, rows). Where dbias is no nullptr it gets the sums over
  // rows of the gradient before it is rounded, (kParts width,), and `partial` is a workspace:
  // (float8_partial_rows(rows), kParts width).
  cudaError_t backward(cudaStream_t stream, const T* dout, __nv_fp8_e5m2* values,
                       __nv_fp8_e5m2* transposed, T* dbias, float* partial) const;
};

}  // namespace jaxllm
