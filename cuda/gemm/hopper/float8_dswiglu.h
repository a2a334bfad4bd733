// The GEMM of an MLP's backward with 8-bit floats and SwiGLU: the gradient of silu(g) u becomes
// those of g and u in the epilogue, which rounds them to 8-bit floats in both layouts. It is never
// in memory.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// dout = scale_a scale_b a b^T: a (rows, depth), b (columns, depth), one scale each. h (rows, 2
// columns): g, then u. Their gradients, divided by scale_out and rounded: values (rows, 2 columns)
// and transposed (2 columns, rows). scale_out is that of a bound that is an eighth too large, or a
// finite number may become an infinity beside one.
//
// cudaErrorNotSupported on other GPUs than Hopper's. Likewise where the depth, the rows or the
// columns are no positive multiples of 16, where the depth is above kWholeDepthOfFloat8, and where
// a pointer is not a multiple of 16 bytes.
template <typename T>
struct Float8Dswiglu {
  const __nv_fp8_e5m2* a;
  const __nv_fp8_e4m3* b;
  const float* scale_a;
  const float* scale_b;
  const T* h;
  const float* scale_out;

  cudaError_t launch(cudaStream_t stream, const GemmShape& shape, __nv_fp8_e5m2* values,
                     __nv_fp8_e5m2* transposed) const;
};

}  // namespace jaxllm
