// GELU and its derivative for several elements at once, for an epilogue whose one warp must keep
// its scheduler's units busy by itself: each stage is done for all elements before the next, so
// that the latencies of the special function unit overlap.
//
// Both rest on the logistic function s of GELU's 2u, 1 / (1 + exp(-2u)), as in functions.cuh. It
// takes two special functions an element, where the hardware's tanh would take one. But that is
// right to an absolute 2^-11, and of a negative x, where s is small, it would leave few bits.
#pragma once

#include <cuda_runtime.h>

#include "activation/functions.cuh"

namespace jaxllm {

// `volatile` holds the stages in place: the compiler would take one element after the other.
__device__ __forceinline__ void exp2_in_place(float& x) {
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
}
__device__ __forceinline__ void reciprocal_in_place(float& x) {
  asm volatile("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
}

// Replaces the squares of x by s. Where exp(-2u) overflows, s is 0.
template <int kCount>
__device__ __forceinline__ void gelu_logistic_each(const float (&x)[kCount],
                                                   float (&squares)[kCount]) {
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

// Replaces each x by gelu(x).
template <int kCount>
__device__ __forceinline__ void gelu_each(float (&x)[kCount]) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = x[i] * x[i];
  gelu_logistic_each(x, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= values[i];
}

// Replaces each x by gelu(x), and puts the derivative of GELU there into `dgelu`:
// s + gelu(x) (1 - s) d(2u)/dx.
template <int kCount>
__device__ __forceinline__ void gelu_and_dgelu_each(float (&x)[kCount], float (&dgelu)[kCount]) {
  // Where |x| is above 10.1, s is 0 or 1 and d(2u)/dx is multiplied by zero. With this limit, which
  // lies above its value at 10.1, it stays finite there: the square of x may overflow.
  constexpr float kMost = 32.0f;
  float outer[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dgelu[i] = x[i] * x[i];
    outer[i] = fminf(kGeluLinear + 3.0f * kGeluCubic * dgelu[i], kMost);
  }
  gelu_logistic_each(x, dgelu);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float s = dgelu[i];
    x[i] *= s;
    dgelu[i] = s + (x[i] - x[i] * s) * outer[i];
  }
}

}  // namespace jaxllm
