// Matrix products on tensor cores from Ampere on, of any sizes.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

// Factors of float32 are rounded to TF32.
template <typename T>
struct MatmulMma {
  static cudaError_t run(cudaStream_t stream, const MatmulCall<T>& call);
};

}  // namespace jaxllm
