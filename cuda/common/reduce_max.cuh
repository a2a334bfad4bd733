// Maxima over the lanes of a warp and the threads of a block. They are NaN where a value is, as
// those of jax.numpy are.
#pragma once

#include "common/reduce.cuh"

namespace jaxllm {

// fmaxf and fminf pass over NaN; these do not, and cost the same.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

// The largest value of kLanes neighbouring lanes, for every lane. All 32 lanes must call.
template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// The largest value of the block, for every thread; blockDim.x and `scratch`, of 32 floats, are as
// for sum_over_block.
__device__ __forceinline__ float max_over_block(float value, float* scratch) {
  value = max_over_lanes<32>(value);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  const int warps = blockDim.x / 32;
  return max_over_lanes<32>(scratch[lane < warps ? lane : 0]);
}

}  // namespace jaxllm
