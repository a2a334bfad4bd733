// Rounding to 8-bit floats.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace jaxllm::float8 {

template <typename Float8>
inline constexpr bool kHasInfinity = std::is_same_v<Float8, __nv_fp8_e5m2>;

// Four floats as the e5m2 bytes of a word, the first one lowest. An infinity becomes the largest
// number.
__device__ __forceinline__ uint32_t round_four_saturated(float2 low, float2 high) {
  uint32_t word;
  // In one statement: as values of 16 bits the halves would be masked before they are joined.
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(word)
      : "f"(low.x), "f"(low.y), "f"(high.x), "f"(high.y));
  return word;
}

// Two floats as bytes, the first one lower. An infinity stays one, or becomes NaN in a format that
// has none.
template <typename Float8>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (!kHasInfinity<Float8>) {
    // Zero times an infinity is NaN, and times another number it is a zero of that number's sign.
    low = fmaf(low, 0.0f, low);
    high = fmaf(high, 0.0f, high);
  }
  constexpr auto kFormat = kHasInfinity<Float8> ? __NV_E5M2 : __NV_E4M3;
  uint32_t pair = __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, kFormat);
  if constexpr (kHasInfinity<Float8>) {
    // One more than the largest number is the infinity.
    pair += (isinf(low) ? 0x0001u : 0u) + (isinf(high) ? 0x0100u : 0u);
  }
  return pair;
}

}  // namespace jaxllm::float8
