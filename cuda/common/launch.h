// What launchers share: the early return on an error, a device's limits, sizes of grids.
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

// What the current device has: multiprocessors, and the shared memory that a block may take.
struct DeviceLimits {
  int multiprocessors = 0, shared_bytes = 0;

  cudaError_t read() {
    int device;
    JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
    JAXLLM_RETURN_IF_ERROR(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    JAXLLM_RETURN_IF_ERROR(
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return cudaSuccess;
  }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxllm
