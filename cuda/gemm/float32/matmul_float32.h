// GEMM in float32 on CUDA cores (SIMT), for any M, N, K and alignment.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/matmul_call.h"

namespace jaxllm {

cudaError_t matmul_float32(cudaStream_t stream, const MatmulCall<float>& call);

}  // namespace jaxllm
