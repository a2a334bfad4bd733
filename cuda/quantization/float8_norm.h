// Layer norm and RMS norm, alone or after a residual addition, rounded to 8-bit floats with one
// given scale, in the layouts that a GEMM on Hopper reads.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// T is the dtype of the rows, W that of the weights: T or float. Every array is dense.
//
// values = round(norm(h) / float8_scale), where h = x + x_bias + residual is rounded to T and
// stored. Without a residual x is normalized, and h is not used. What is finite does not overflow.
//
// cudaErrorNotSupported where the width is no multiple of 8 or above 8192, where a transposed
// matrix is wanted and the rows are no multiple of 16, and where a pointer is not aligned: `values`
// to 8 bytes, the others to 16.
template <typename T, typename W>
struct Float8Norm {
  const T *x, *residual;           // (rows, width); residual may be null
  const W *x_bias, *scale, *bias;  // (width,); null: x_bias adds nothing, bias makes an RMS norm
  const float* float8_scale;
  float eps;
  __nv_fp8_e4m3 *values, *transposed;  // (rows, width) and (width, rows); transposed may be null
  T* h;                                // (rows, width)
  float *mean, *rstd;                  // (rows,); may be null
  int64_t rows, width;

  cudaError_t forward(cudaStream_t stream) const;
};

}  // namespace jaxllm
