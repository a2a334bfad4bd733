// The GEMMs of an MLP's backward with 8-bit floats that multiply by the derivative of its
// activation in the epilogue, and round to 8-bit floats in both layouts. The product, the gradient
// of the activation's result, is never in memory.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// The workspace for the sums has a row for every so many rows of the result.
inline constexpr int64_t kFloat8DgeluRows = 128;

// dout = scale_a scale_b a b^T: a (rows, depth), b (columns, depth), one scale each. The results
// are divided by scale_out and rounded. It is that of a bound that is an eighth too large, or a
// finite number may become an infinity beside one.
//
// cudaErrorNotSupported on other GPUs than Hopper's. Likewise where the depth, the rows or the
// columns are no positive multiples of 16, where the depth is above kWholeDepthOfFloat8, and where
// a pointer is not a multiple of 16 bytes.
template <typename T>
struct Float8Derivative {
  const __nv_fp8_e5m2* a;
  const __nv_fp8_e4m3* b;
  const float* scale_a;
  const float* scale_b;
  const T* h;
  const float* scale_out;
};

// dout is the gradient of gelu(h), h (rows, columns). The gradient of h: values (rows, columns) and
// transposed (columns, rows).
//
// dbias gets the sum of the rows before they are rounded. `partial` is a workspace for it: a row of
// `columns` floats for every kFloat8DgeluRows rows. dbias is nullptr where it is not wanted.
template <typename T>
struct Float8Dgelu : Float8Derivative<T> {
  cudaError_t launch(cudaStream_t stream, const GemmShape& shape, __nv_fp8_e5m2* values,
                     __nv_fp8_e5m2* transposed, T* dbias, float* partial) const;
};

// dout is the gradient of silu(g) u, h (rows, 2 columns): g, then u. Their gradients: values (rows,
// 2 columns) and transposed (2 columns, rows).
template <typename T>
struct Float8Dswiglu : Float8Derivative<T> {
  cudaError_t launch(cudaStream_t stream, const GemmShape& shape, __nv_fp8_e5m2* values,
                     __nv_fp8_e5m2* transposed) const;
};

}  // namespace jaxllm
