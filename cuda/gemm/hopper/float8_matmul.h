// GEMMs of 8-bit floats on Hopper's tensor cores.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// out[i][j] = scale_a[i] scale_b[j] sum over k of a[i][k] b[j][k] + bias[j], rounded once: a (rows,
// depth), b (columns, depth), e4m3 or e5m2 each; out bfloat16, float16 or float32. A scale may be
// one for all, and the bias nullptr.
template <typename A, typename B, typename Out>
struct Float8Gemm {
  const A* a;
  const B* b;
  const float* scale_a;
  const float* scale_b;
  bool has_one_scale_a, has_one_scale_b;
  const Out* bias;
};

// cudaErrorNotSupported on other GPUs than Hopper's, where the depth is not a positive multiple of
// 16 or the columns of 8, and where a pointer is not a multiple of 16 bytes.
template <typename A, typename B, typename Out>
cudaError_t float8_matmul(cudaStream_t stream, const Float8Gemm<A, B, Out>& gemm,
                          const GemmShape& shape, Out* out);

// The same, and into amax the largest finite |out| of each of `parts` equal parts of the columns,
// one or two. Also cudaErrorNotSupported where an operand has more than one scale, and where two
// parts have not a multiple of 64 columns.
template <typename Out>
cudaError_t float8_matmul_amax(cudaStream_t stream,
                               const Float8Gemm<__nv_fp8_e4m3, __nv_fp8_e4m3, Out>& gemm,
                               const GemmShape& shape, Out* out, float* amax, int parts);

}  // namespace jaxllm
