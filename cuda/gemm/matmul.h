// Matrix products of any sizes, with the bias and the activation that may follow.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

template <typename T>
struct MatrixProduct {
  static cudaError_t run(cudaStream_t stream, const MatmulCall<T>& call);
};

}  // namespace jaxllm
