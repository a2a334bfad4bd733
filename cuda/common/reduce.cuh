// Sums and maxima over the lanes of a warp (warp reduce) and the threads of a CTA (block reduce),
// in a fixed order. Maxima are NaN where a value is, as those of jax.numpy are.
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
    for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(kFullWarp, values[i], offset);
  }
}

// Adds each of kCount values over the lanes whose index is equal modulo kLanes; every lane gets the
// sums. All 32 lanes of the warp must call.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_over_groups(float (&values)[kCount]) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(kFullWarp, values[i], offset);
  }
}

// Adds each of kCount values over the CTA; every thread gets the sums. blockDim.x is a multiple of
// 32. The caller alternates between two `scratch` arrays of kCount * 32 floats from one call to the
// next. Then one barrier a call is enough: a thread that writes an array again has passed the
// barrier of the call between, and so all threads have left the call that read the array.
template <int kCount>
__device__ __forceinline__ void sum_over_cta(float (&values)[kCount], float* scratch) {
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

// fmaxf and fminf skip NaN; these do not, and cost the same.
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

// The maximum over groups of kLanes neighbouring lanes, in every lane. All 32 lanes must call.
template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// The maximum over the CTA, in every thread. blockDim.x and `scratch`, of 32 floats, are as for
// sum_over_cta.
__device__ __forceinline__ float max_over_cta(float value, float* scratch) {
  value = max_over_lanes<32>(value);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  const int warps = blockDim.x / 32;
  return max_over_lanes<32>(scratch[lane < warps ? lane : 0]);
}

}  // namespace jaxllm
