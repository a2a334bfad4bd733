// Register fragments of tensor-core instructions: pairs of 16-bit elements, and what moves 8 x 8
// matrices of them between shared memory and the registers of a warp.
//
// A lane holds of an 8 x 8 matrix one 32-bit word, two neighbouring elements of a row:
//
//   row 0   lane 0  lane 1  lane 2  lane 3      lane 4 r + c has row r, columns 2 c and 2 c + 1
//   row 1   lane 4  lane 5  ...
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxllm {

template <typename T>
__device__ __forceinline__ uint32_t smem_address(const T* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides from the compiler what it knows of a value. It then computes again what follows from the
// value, rather than keep that in registers.
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }

// Rounds two floats to T; `low` is in the lower half of the word.
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

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
}

// Loads four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8, 16-byte
// aligned.
__device__ __forceinline__ void ldmatrix(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// The reverse of ldmatrix, from sm_90 on.
__device__ __forceinline__ void stmatrix(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// The same, each matrix transposed: a lane's word goes to column lane / 4 of two rows.
__device__ __forceinline__ void stmatrix_transposed(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Transposes an 8 x 8 matrix that lies across the warp.
__device__ __forceinline__ uint32_t movmatrix_transposed(uint32_t word) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace jaxllm
