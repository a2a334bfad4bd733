// GEMM on tensor cores with mma.sync, from sm_80 on, for any M, N, K and alignment.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// Operands of float32 are rounded to TF32.
template <typename T>
struct MatmulMma {
  static cudaError_t run(cudaStream_t stream, const MatmulCall<T>& call);
};

}  // namespace jaxllm
