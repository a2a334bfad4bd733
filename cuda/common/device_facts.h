// What Python's predicates know of a GPU, so that they reject the calls that a launcher rejects.
#pragma once

#include <cuda_runtime_api.h>

#include "common/launch.h"

namespace jaxllm {

struct DeviceFacts {
  DeviceLimits limits;
  // The architecture that this extension's code for the GPU was compiled for; 0 where there is
  // none.
  int image = 0;
  bool has_sm90a = false;  // whether that code has the instructions of sm_90a
  // Clusters of two CTAs of the row-at-once GEMM that run at once; 0 without sm_90a.
  int clusters = 0;
};

// The facts of the device with this ordinal of the CUDA runtime.
cudaError_t find_device_facts(int ordinal, DeviceFacts* facts);

}  // namespace jaxllm
