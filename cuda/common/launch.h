// What launchers share: sizes of grids, and the early return on an error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Returns from the enclosing function where a CUDA call failed.
#define JAXLLM_RETURN_IF_ERROR(expression)                  \
  do {                                                      \
    const cudaError_t jaxllm_status = (expression);         \
    if (jaxllm_status != cudaSuccess) return jaxllm_status; \
  } while (false)

namespace jaxllm {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxllm
