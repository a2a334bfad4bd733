// The current scale of 8-bit floats, from the largest finite magnitude.
#pragma once

#include <cfloat>

#include "quantization/float8_tile.cuh"

namespace jaxllm::float8 {

template <typename Float8>
constexpr float kLargest = std::is_same_v<Float8, __nv_fp8_e5m2> ? 57344.0f : 448.0f;

template <typename T, int kCount>
__device__ __forceinline__ float largest_finite(const Pack<T, kPack> (&packs)[kCount]) {
  float largest = 0.0f;  // fmaxf skips NaN
#pragma unroll
  for (const auto& pack : packs) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) largest = fmaxf(largest, fabsf(pack[j]));
  }
  if (!isinf(largest)) return largest;
  largest = 0.0f;
#pragma unroll
  for (const auto& pack : packs) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (isfinite(pack[j])) largest = fmaxf(largest, fabsf(pack[j]));
    }
  }
  return largest;
}

// As scale_of() of ops/rounding.py: XLA divides by a constant so too.
template <typename Float8>
__device__ __forceinline__ float scale_of(float largest) {
  constexpr float kInverse = 1.0f / kLargest<Float8>;
  return largest == 0.0f ? 1.0f : fmaxf(largest * kInverse, FLT_MIN);
}

// That of the maxima which CTAs before have written. All threads of a CTA call it.
template <typename Float8>
__device__ __forceinline__ float scale_of_maxima(const float* maxima, int count,
                                                 float (&scratch)[32]) {
  float largest = 0.0f;
  for (int i = threadIdx.x; i < count; i += kThreads) largest = fmaxf(largest, maxima[i]);
  return scale_of<Float8>(max_over_cta(largest, scratch));
}

}  // namespace jaxllm::float8
