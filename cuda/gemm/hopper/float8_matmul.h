// GEMMs of 8-bit floats on Hopper's tensor cores.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// out[i][j] = scale_a[i] scale_b[j] sum over k of a[i][k] b[j][k] + bias[j], rounded once: a (rows,
// depth), b (columns, depth), e4m3 or e5m2 each; out bfloat16, float16 or float32. A scale may be
// one for all, and the bias nullptr.
//
// amax, where it is no nullptr, gets the largest finite |out| of each of `parts` equal parts of the
// columns, one or two.
//
// cudaErrorNotSupported on other GPUs than Hopper's, where the depth is not a positive multiple of
// 16 or the columns of 8, where two parts have not a multiple of 64 columns, and where a pointer is
// not a multiple of 16 bytes.
template <typename A, typename B, typename Out>
struct Float8Gemm {
  const A* a;
  const B* b;
  const float* scale_a;
  const float* scale_b;
  bool has_one_scale_a, has_one_scale_b;
  const Out* bias;

  cudaError_t launch(cudaStream_t stream, const GemmShape& shape, Out* out, float* amax = nullptr,
                     int parts = 1) const;
};

}  // namespace jaxllm
