// Kernel launches, and programmatic dependent launch (PDL): a kernel starts while the kernel before
// it still runs, loads what that kernel does not write, and then waits for its end.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"

namespace jaxllm {

// Lets the next kernel start, whatever this one has stored so far.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and its stores are visible. Each thread must call it: to
// the next kernel the end of this one means the end of all kernels before.
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
  // Programmatic dependent launch: may start before the kernel before it on the stream has ended,
  // and must call wait_on_dependent_grids. Ignored for images before sm_90.
  bool pdl = false;
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
  if (launch.pdl && image.architecture >= 90) {
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
  if (status != cudaSuccess) cudaGetLastError();  // else a later call would report the error
  return status;
}

}  // namespace jaxllm
