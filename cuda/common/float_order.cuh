// Floats as integers in the same order, for an atomic maximum.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace jaxllm {

inline constexpr int32_t kLeastFloat = INT_MIN;  // below what any float becomes

__device__ __forceinline__ int32_t turn_negative(int32_t bits) {
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

// An integer that is greater where `x` is.
__device__ __forceinline__ int32_t to_ordered(float x) { return turn_negative(__float_as_int(x)); }
__device__ __forceinline__ float from_ordered(int32_t x) {
  return __int_as_float(turn_negative(x));
}

}  // namespace jaxllm
