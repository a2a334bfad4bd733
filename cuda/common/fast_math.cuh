// Exponentials and logarithms to base 2, of the special function units (MUFU).
#pragma once

#include <cuda_runtime.h>

namespace jaxllm {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

// 2^x with an error of 2 ulp, and zero below the smallest normal float. The special function units
// of an SM compute 16 a clock.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Absolute error: a few 2^-24, where tanh.approx has 2^-11.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.0f - __fdividef(2.0f, exp2_fast(2.0f * kLog2E * x) + 1.0f);
}

}  // namespace jaxllm
