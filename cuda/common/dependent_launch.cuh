// Kernels of one call that follow each other closely: one starts while the one before it still
// runs, fetches what that one does not write, and waits for it only then.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"

namespace jaxllm {

// Lets the next kernel start; that does not depend on what this one has done so far.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and its results are seen. Each thread must call it: the
// next kernel takes this one's end for that of all before it.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How a kernel is launched.
struct Launch {
  dim3 grid, block;
  size_t shared = 0;  // dynamic shared memory of a CTA, in bytes
  int cluster = 1;    // CTAs of a cluster, along x
  // May start before the kernel before it on the stream has ended; it must call
  // wait_on_dependent_grids. Of no account where the kernel's image has no such instruction.
  bool overlap = false;
  // All CTAs run at once, or the launch fails: for kernels whose CTAs wait for one another.
  bool cooperative = false;
};

template <class Kernel, class... Arguments>
cudaError_t launch_kernel(cudaStream_t stream, Kernel kernel, const Launch& launch,
                          const Arguments&... arguments) {
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  if (launch.cluster > 1 && !image.has_clusters()) return cudaErrorNotSupported;
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.overlap && image.architecture >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (status != cudaSuccess) cudaGetLastError();  // else somebody else would find the error
  return status;
}

}  // namespace jaxllm
