// A counter that a kernel begins with, set to zero beforehand.
#pragma once

#include "common/dependent_launch.cuh"

namespace jaxllm {

template <typename T>
__global__ void zero_counter_kernel(T* counter) {
  launch_dependent_grids();
  *counter = 0;
}

// A kernel and no memset: the next one starts meanwhile. It must call wait_on_dependent_grids
// before it counts. A memset of four bytes would hold up the stream for another five microseconds.
template <typename T>
cudaError_t zero_counter(cudaStream_t stream, T* counter) {
  return launch_kernel(stream, zero_counter_kernel<T>, {dim3(1), dim3(1)}, counter);
}

}  // namespace jaxllm
