// Conversion of int8 weights and caches to floats and to the 16-bit operands of tensor cores.
//
// An operand word has two elements of T. They are neighbours of a row, or one column of two rows:
//
//   row a   | a0 a1 | a2 a3 | ...     row_pair(a, 2)        = a2 a3
//   row b   | b0 b1 | b2 b3 | ...     column_pair(a, b, 2)  = a2 b2
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/vector.cuh"

namespace jaxllm {

__device__ __forceinline__ float to_float(int8_t x) { return x; }

// Four int8 to floats, exactly: with 128 added they are the last bits of a float from 2^23 on.
__device__ __forceinline__ void convert_int8x4(uint32_t bytes, float (&floats)[4]) {
  bytes ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    floats[i] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
  }
}

// Bytes 0 and 1 of a word, or 2 and 3 where `upper`, as two elements of T, exactly. Behind the
// exponent of `base` the low seven bits of an int8 read as base + bits, and its sign bit as base or
// base + 128. The difference is the int8.
template <typename T>
__device__ __forceinline__ uint32_t convert_int8x2(uint32_t bytes, bool upper) {
  constexpr uint32_t base = std::is_same_v<T, __nv_bfloat16> ? 0x43434343u : 0x64646464u;
  const uint32_t selector = upper ? 0x4342 : 0x4140;
  const uint32_t magnitude = __byte_perm(bytes & 0x7f7f7f7fu, base, selector);
  const uint32_t sign = __byte_perm(bytes & 0x80808080u, base, selector);
  using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
  const Pair pair =
      __hsub2(reinterpret_cast<const Pair&>(magnitude), reinterpret_cast<const Pair&>(sign));
  return reinterpret_cast<const uint32_t&>(pair);
}

// Elements i and i + 1 of a row of C, T itself or int8; i is even.
template <typename T, typename C>
__device__ __forceinline__ uint32_t row_pair(const uint32_t* row, int i) {
  if constexpr (sizeof(C) == 2) {
    return row[i / 2];
  } else {
    return convert_int8x2<T>(row[i / 4], i % 4 != 0);
  }
}

// Element i of two rows.
template <typename T, typename C>
__device__ __forceinline__ uint32_t column_pair(const uint32_t* low, const uint32_t* high, int i) {
  if constexpr (sizeof(C) == 2) {
    return __byte_perm(low[i / 2], high[i / 2], i % 2 ? 0x7632 : 0x5410);
  } else {
    // The permuted word has columns i and i + 1 of both rows for even i, and serves both calls.
    return convert_int8x2<T>(__byte_perm(low[i / 4], high[i / 4], i % 4 < 2 ? 0x5140 : 0x7362),
                             i % 2 != 0);
  }
}

}  // namespace jaxllm
