// Operands of decoding's tensor-core products: words of two 16-bit elements, as memory has them or
// widened from int8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/vector.cuh"

namespace jaxllm {

// An element of a weight or a cache: a floating one, or int8.
template <typename W>
__device__ __forceinline__ float number(W x) {
  if constexpr (sizeof(W) == 1) {
    return x;
  } else {
    return to_float(x);
  }
}

// Two neighbouring int8 numbers of a word, the first or the last two, as two of T, exactly. With
// the exponent of `base` in front, the lower seven bits of a number read as base + bits and its
// sign bit as base or base + 128; the difference is the number.
template <typename T>
__device__ __forceinline__ uint32_t widen_two(uint32_t bytes, bool last) {
  constexpr uint32_t base = std::is_same_v<T, __nv_bfloat16> ? 0x43434343u : 0x64646464u;
  const uint32_t pick = last ? 0x4342 : 0x4140;
  const uint32_t magnitude = __byte_perm(bytes & 0x7f7f7f7fu, base, pick);
  const uint32_t sign = __byte_perm(bytes & 0x80808080u, base, pick);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __hsub2(reinterpret_cast<const __nv_bfloat162&>(magnitude),
                                        reinterpret_cast<const __nv_bfloat162&>(sign));
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(magnitude),
                                 reinterpret_cast<const __half2&>(sign));
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Elements i and i + 1 of a row's words, as a word of T; i is even.
template <typename T, typename C>
__device__ __forceinline__ uint32_t neighbours(const uint32_t* words, int i) {
  if constexpr (sizeof(C) == 2) {
    return words[i / 2];
  } else {
    return widen_two<T>(words[i / 4], i % 4 != 0);
  }
}

// Element i of two rows' words, as a word of T.
template <typename T, typename C>
__device__ __forceinline__ uint32_t across(const uint32_t* low, const uint32_t* high, int i) {
  if constexpr (sizeof(C) == 2) {
    return __byte_perm(low[i / 2], high[i / 2], i % 2 ? 0x7632 : 0x5410);
  } else {
    // Columns i and i + 1 of both rows, where i is even; each is asked for in turn.
    return widen_two<T>(__byte_perm(low[i / 4], high[i / 4], i % 4 < 2 ? 0x5140 : 0x7362),
                        i % 2 != 0);
  }
}

}  // namespace jaxllm
