// GELU and its derivative for several elements at once, for an epilogue with one warp on a
// scheduler. Each stage is done for all elements before the next, so that the latencies of the
// special function unit overlap.
//
// Both use the logistic function s = 1 / (1 + exp(-2u)) of GELU's 2u, as in functions.cuh. It takes
// two special functions for each element, where tanh.approx takes one. But that has an absolute
// error of 2^-11, which leaves few correct bits for a negative x, where s is small.
#pragma once

#include <cuda_runtime.h>

#include "activation/functions.cuh"

namespace jaxllm {

// `volatile` keeps the order of the stages: the compiler would compute one element after the other.
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

// Replaces each x by gelu(x), and sets `dgelu` to the derivative, s + gelu(x) (1 - s) d(2u)/dx.
template <int kCount>
__device__ __forceinline__ void gelu_and_dgelu_each(float (&x)[kCount], float (&dgelu)[kCount]) {
  // Where |x| is above 10.1, s is 0 or 1 and d(2u)/dx is multiplied by zero. The square of x may
  // overflow there. This limit, above the value at 10.1, keeps d(2u)/dx finite.
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

// Replaces each x by the derivative, as dgelu() does: s + (s - s^2) x d(2u)/dx. Two registers for
// each element, for an epilogue that has few.
template <int kCount>
__device__ __forceinline__ void dgelu_each(float (&x)[kCount]) {
  float values[kCount], slopes[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = clamped_for_dgelu(x[i]);
    values[i] = x[i] * x[i];
    slopes[i] = x[i] * (kGeluLinear + 3.0f * kGeluCubic * values[i]);
  }
  gelu_logistic_each(x, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float s = values[i];
    x[i] = s + (s - s * s) * slopes[i];
  }
}

}  // namespace jaxllm
