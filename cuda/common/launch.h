// What launchers share: sizes of grids, and the early return on an error.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

// Returns from the enclosing function where a CUDA call failed.
#define JAXLLM_RETURN_IF_ERROR(expression)    \
  do {                                        \
    const cudaError_t status = (expression);  \
    if (status != cudaSuccess) return status; \
  } while (false)

namespace jaxllm {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The blocks of a kernel that the current device holds at once: the grid of a persistent kernel,
// whose blocks stay and loop over the work.
template <typename Kernel>
cudaError_t resident_blocks(Kernel kernel, int threads, int64_t* blocks) {
  int device = 0, processors = 0, blocks_each = 0;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  JAXLLM_RETURN_IF_ERROR(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, threads, 0));
  *blocks = int64_t{processors} * std::max(blocks_each, 1);
  return cudaSuccess;
}

}  // namespace jaxllm
