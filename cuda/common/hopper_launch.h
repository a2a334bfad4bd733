// What every launcher of a Hopper kernel asks first.
#pragma once

#include <cuda_runtime_api.h>

#include "common/launch.h"

namespace jaxllm {

// Whether this GPU runs the kernel; cudaErrorNotSupported if not.
inline cudaError_t find_hopper_kernel(const void* kernel, int* device) {
  int major = 0;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(device));
  JAXLLM_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *device));
  if (major != 9) return cudaErrorNotSupported;
  // Built for sm_90 or less the kernel has an empty body, which needs next to no registers.
  cudaFuncAttributes attributes;
  JAXLLM_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.numRegs < 64 ? cudaErrorNotSupported : cudaSuccess;
}

// And lets it have its shared memory; it has one block a multiprocessor at a time.
inline cudaError_t prepare_hopper_kernel(const void* kernel, int bytes, int* multiprocessors) {
  int device = 0;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &device));
  JAXLLM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace jaxllm
