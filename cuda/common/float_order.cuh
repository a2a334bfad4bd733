// Floats as integers in the same order, for an atomic maximum.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace jaxllm {

inline constexpr int32_t kLeastFloat = INT_MIN;  // below any float

__device__ __forceinline__ int32_t flip_negative(int32_t bits) {
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

// Order-preserving: an integer that is greater where `x` is greater.
__device__ __forceinline__ int32_t to_ordered(float x) { return flip_negative(__float_as_int(x)); }
__device__ __forceinline__ float from_ordered(int32_t x) {
  return __int_as_float(flip_negative(x));
}

}  // namespace jaxllm
