// What every launcher of a Hopper kernel checks first.
#pragma once

#include "common/launch.h"

namespace jaxllm {

// Whether the image of a kernel for sm_90a has its instructions. Compiled for any other
// architecture the kernel has an empty body, which needs few registers.
inline bool has_hopper_body(const KernelImage& image) { return image.registers >= 64; }

// Whether this GPU runs a kernel for Hopper; cudaErrorNotSupported if not.
template <class Kernel>
cudaError_t find_hopper_kernel(Kernel* kernel, DeviceLimits* limits) {
  JAXLLM_RETURN_IF_ERROR(limits->read());
  if (limits->capability != 90) return cudaErrorNotSupported;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  return has_hopper_body(image) ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace jaxllm
