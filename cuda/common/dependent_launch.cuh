// The device's part of programmatic dependent launch (PDL): a kernel starts while the kernel before
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

}  // namespace jaxllm
