// Sums over the lanes of a warp and the threads of a block, in a fixed order.
#pragma once

namespace jaxllm {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// Adds each of kCount values over groups of kLanes neighbouring lanes; every lane gets the sums.
// All 32 lanes of the warp must call.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_over_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] += __shfl_xor_sync(kFullWarp, values[i], offset);
    }
  }
}

// Adds each of kCount values over the lanes that have one place in groups of kLanes neighbours;
// every lane gets the sums. All 32 lanes of the warp must call.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_over_groups(float (&values)[kCount]) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] += __shfl_xor_sync(kFullWarp, values[i], offset);
    }
  }
}

// Adds each of kCount values over the block; every thread gets the sums. blockDim.x is a multiple
// of 32. The caller alternates between two `scratch` arrays of kCount * 32 floats from one call to
// the next: then one barrier a call is enough, since nobody can write an array again before
// everybody has left the call that read it.
template <int kCount>
__device__ __forceinline__ void sum_over_block(float (&values)[kCount], float* scratch) {
  sum_over_lanes<32>(values);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[i * 32 + warp] = values[i];
  }
  __syncthreads();
  const int warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = lane < warps ? scratch[i * 32 + lane] : 0.0f;
  sum_over_lanes<32>(values);
}

}  // namespace jaxllm
