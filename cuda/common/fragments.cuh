// What decoding feeds the tensor cores with: words of two 16-bit numbers, straight from memory or
// made of int8, and the product of 16 x 16 and 16 x 8 fragments.
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

// c += a b. Of the fragments lane 4 r + c holds: of a, rows r and r + 8, columns 2c, 2c + 1 and
// 2c + 8, 2c + 9; of b, the same columns as rows, of column r; of c, rows r and r + 8, columns 2c
// and 2c + 1.
template <typename T>
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t a2, uint32_t a3, uint32_t b0,
                                                 uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Rounds two floats into a word; `low` is the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Turns an 8 x 8 matrix of 16-bit numbers that lies across the warp, a row of it four lanes.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
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
