// Kernels of one call that follow each other closely: one starts while the one before it still
// runs, fetches what that one does not write, and waits for it only then.
#pragma once

#include <cuda_runtime.h>

namespace jaxllm {

// Lets the next kernel start; that does not depend on what this one has done so far.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and its results are seen. Each thread must call it: the
// next kernel takes this one's end for that of all before it.
__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel, in clusters of `cluster` blocks along x. With `overlap` it may start before
// the kernel before it on the stream has ended; it must then call wait_for_last_kernel.
template <class Kernel, class... Arguments>
cudaError_t launch_kernel(cudaStream_t stream, Kernel kernel, dim3 grid, dim3 block, size_t shared,
                          int cluster, bool overlap, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jaxllm
