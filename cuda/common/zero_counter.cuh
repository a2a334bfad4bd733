// Sets counters to zero before the kernel that counts with them.
#pragma once

#include "common/dependent_launch.cuh"

namespace jaxllm {

template <typename T>
__global__ void zero_counter_kernel(T* counters) {
  launch_dependent_grids();
  counters[threadIdx.x] = 0;
}

// A kernel instead of a memset, which would delay the stream by five microseconds: the next kernel
// may start meanwhile (Launch::pdl). It must call wait_on_dependent_grids before it counts.
template <typename T>
cudaError_t zero_counter(cudaStream_t stream, T* counters, int count = 1) {
  return launch_kernel(stream, zero_counter_kernel<T>, {dim3(1), dim3(count)}, counters);
}

}  // namespace jaxllm
