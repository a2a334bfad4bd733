// What Python's predicates ask of a GPU, so that they decline what a launcher would.
#pragma once

#include <cuda_runtime_api.h>

#include "common/launch.h"

namespace jaxllm {

struct DeviceFacts {
  DeviceLimits limits;
  // The architecture that the code of this extension which runs there was compiled for; 0 where no
  // code runs there.
  int image = 0;
  bool has_sm90a = false;  // whether that code has the instructions of sm_90a
  // Clusters of two CTAs of the row-at-once GEMM that run at once; 0 without sm_90a.
  int clusters = 0;
};

// The facts of the device with this ordinal of the CUDA runtime.
cudaError_t find_device_facts(int ordinal, DeviceFacts* facts);

}  // namespace jaxllm
