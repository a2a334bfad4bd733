// GELU and its slope for several numbers at once, where one warp must keep its multiprocessor's
// units busy by itself: each stage is done for all numbers before the next, so that what the units
// for special functions take long over overlaps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "activation/functions.cuh"

namespace jaxllm {

// `volatile` holds the stages in place: the compiler would take one number after the other.
__device__ __forceinline__ void tanh_in_place(float& x) {
  asm volatile("tanh.approx.f32 %0, %0;" : "+f"(x));
}
__device__ __forceinline__ void exp2_in_place(float& x) {
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
}
__device__ __forceinline__ void reciprocal_in_place(float& x) {
  asm volatile("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
}

// Replaces the squares of x by the logistic function s of GELU's 2u, 1 / (1 + exp(-2u)). For
// results that are rounded to bfloat16 the hardware's tanh does: to an absolute 2^-12, it is one
// instruction of the special functions' unit instead of two.
template <typename T, int kCount>
__device__ __forceinline__ void gelu_logistic_each(const float (&x)[kCount],
                                                   float (&squares)[kCount]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      squares[i] = x[i] * (0.5f * kGeluLinear + 0.5f * kGeluCubic * squares[i]);
    }
#pragma unroll
    for (float& value : squares) tanh_in_place(value);
#pragma unroll
    for (float& value : squares) value = 0.5f + 0.5f * value;
  } else {
    constexpr float kMinusLog2E = -1.4426950408889634f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      squares[i] = x[i] * (kMinusLog2E * kGeluLinear + kMinusLog2E * kGeluCubic * squares[i]);
    }
#pragma unroll
    for (float& value : squares) exp2_in_place(value);
#pragma unroll
    for (float& value : squares) value = 1.0f + value;
#pragma unroll
    for (float& value : squares) reciprocal_in_place(value);
  }
}

// Replaces each x by gelu(x), which will be rounded to T.
template <typename T, int kCount>
__device__ __forceinline__ void gelu_each(float (&x)[kCount]) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = x[i] * x[i];
  gelu_logistic_each<T>(x, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= values[i];
}

// Replaces each x by gelu(x), which will be rounded to T, and puts scale * slope + offset into
// `slopes`, with the slope of GELU there. `scale` is at most 0.1: what is saturated, and might be
// infinite, then belongs to an x whose slope is 0 or 1 to the last digit.
template <typename T, int kCount>
__device__ __forceinline__ void gelu_and_slope_each(float (&x)[kCount], float (&slopes)[kCount],
                                                    float scale, float offset) {
  float outer[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    slopes[i] = x[i] * x[i];
    outer[i] = __saturatef(kGeluLinear * scale + 3.0f * kGeluCubic * scale * slopes[i]);
  }
  gelu_logistic_each<T>(x, slopes);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float s = slopes[i];
    x[i] *= s;
    slopes[i] = (scale * s + offset) + (x[i] - x[i] * s) * outer[i];
  }
}

}  // namespace jaxllm
