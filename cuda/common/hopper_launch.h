// What every launcher of a Hopper kernel asks first.
#pragma once

#include "common/launch.h"

namespace jaxllm {

// Whether the image of a kernel with instructions of sm_90a has them. Compiled for any other
// architecture such a kernel has an empty body, which needs next to no registers.
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
