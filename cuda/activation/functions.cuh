// The activations and their derivatives, for one float.
//
// All use the logistic function s(z) = 1 / (1 + exp(-z)): tanh(u) = 2 s(2u) - 1, so that GELU's
// (1 + tanh(u)) / 2 is s(2u). In this form nothing cancels where tanh is near -1, and an exp that
// overflows gives the limit 0.
#pragma once

#include <cuda_runtime.h>

namespace jaxllm {

__device__ __forceinline__ float logistic(float z) {
  // Two instructions; __expf and __fdividef would also handle denormals.
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

__device__ __forceinline__ float silu(float x) { return x * logistic(x); }

// GELU's 2u = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline constexpr float kGeluLinear = 1.5957691216057308f;
inline constexpr float kGeluCubic = 0.044715f * kGeluLinear;

__device__ __forceinline__ float gelu(float x) {
  return x * logistic(x * (kGeluLinear + kGeluCubic * x * x));
}

// Beyond 30 the derivative of GELU is exactly 0 or 1, and the square of a huge x would be infinite.
// NaN compares false and stays. In two statements: each is one instruction.
__device__ __forceinline__ float clamped_for_dgelu(float x) {
  x = x > 30.0f ? 30.0f : x;
  return x < -30.0f ? -30.0f : x;
}

// d gelu / dx = s + x s (1 - s) d(2u)/dx.
__device__ __forceinline__ float dgelu(float x) {
  x = clamped_for_dgelu(x);
  const float square = x * x;
  const float s = logistic(x * (kGeluLinear + kGeluCubic * square));
  return s + x * s * (1.0f - s) * (kGeluLinear + 3.0f * kGeluCubic * square);
}

// The sum of two elements, as elementwise.cuh calls it.
struct Sum {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = in[0] + in[1];
  }
};

// GELU of an element, and its gradient from that and the gradient of the result, likewise.
struct GeluForward {
  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1]) const {
    out[0] = gelu(in[0]);
  }
};
struct GeluBackward {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = in[1] * dgelu(in[0]);
  }
};

}  // namespace jaxllm
