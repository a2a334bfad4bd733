// GELU's slope in few bits, as one product keeps it for another.
//
// The slope lies between -0.129 and 1.129. For bfloat16 it is kept in a byte, in steps of 1/200: it
// is at most 0.0025 off then, where a bfloat16 near 1 is up to 0.002 below and 0.004 above it, and
// 0 and 1, what it is for most x far from 0, are among the steps. Float16 is eight times as
// fine, and keeps its own 16 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/hopper.cuh"

namespace jaxllm {

// So many bytes for a slope beside numbers of type T.
template <typename T>
inline constexpr int kSlopeBytes = 2;
template <>
inline constexpr int kSlopeBytes<__nv_bfloat16> = 1;

inline constexpr float kSlopeSteps = 200.0f;  // to 1
inline constexpr int kSlopeZero = 27;

// What is encoded is kSlopeScale * slope + kSlopeOffset. For bfloat16 the second byte of it is the
// code: of a float from 16 to 32 the lowest place of that byte is 1/2048. One half is added to
// round.
inline constexpr float kSlopeUnit = 1.0f / 2048;
template <typename T>
inline constexpr float kSlopeScale = kSlopeSteps * kSlopeUnit;
template <typename T>
inline constexpr float kSlopeOffset = 16.0f + (kSlopeZero + 0.5f) * kSlopeUnit;
template <>
inline constexpr float kSlopeScale<__half> = 1.0f / 16;
template <>
inline constexpr float kSlopeOffset<__half> = 0.0f;

// Four of those as the words that hold them.
__device__ __forceinline__ void encode_slopes(const float* scaled, uint32_t* words, __nv_bfloat16) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(scaled[i]);
  words[0] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0051),
                         __byte_perm(bits[2], bits[3], 0x0051), 0x5410);
}
__device__ __forceinline__ void encode_slopes(const float* scaled, uint32_t* words, __half) {
  constexpr float kUndo = 1.0f / kSlopeScale<__half>;
  words[0] = hopper::pack<__half>(scaled[0] * kUndo, scaled[1] * kUndo);
  words[1] = hopper::pack<__half>(scaled[2] * kUndo, scaled[3] * kUndo);
}

__device__ __forceinline__ void decode_slopes(const uint32_t* words, float* slopes, __nv_bfloat16) {
  // 0x47000000 is 2^15, and the first place of its second byte is 1.
  constexpr float kBegin = 32768.0f;
  constexpr float kStep = 1.0f / kSlopeSteps;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __byte_perm(words[0], 0x47000000, 0x7604 | i << 4);
    slopes[i] = fmaf(__uint_as_float(bits), kStep, -(kBegin + kSlopeZero) * kStep);
  }
}
__device__ __forceinline__ void decode_slopes(const uint32_t* words, float* slopes, __half) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = hopper::unpack<__half>(words[i]);
    slopes[2 * i] = pair.x;
    slopes[2 * i + 1] = pair.y;
  }
}

}  // namespace jaxllm
