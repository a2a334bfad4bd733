// Sets a counter to zero before the kernel that counts with it.
#pragma once

#include "common/dependent_launch.cuh"

namespace jaxllm {

template <typename T>
__global__ void zero_counter_kernel(T* counter) {
  launch_dependent_grids();
  *counter = 0;
}

// A kernel instead of a memset, which would delay the stream by five microseconds: the next kernel
// may start meanwhile (Launch::pdl). It must call wait_on_dependent_grids before it counts.
template <typename T>
cudaError_t zero_counter(cudaStream_t stream, T* counter) {
  return launch_kernel(stream, zero_counter_kernel<T>, {dim3(1), dim3(1)}, counter);
}

}  // namespace jaxllm
