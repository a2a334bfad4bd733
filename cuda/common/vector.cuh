// Packs: the 16 bytes that one thread moves in one memory instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxllm {

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

// Elements of T in 16 bytes.
template <typename T>
inline constexpr int kPackSize = 16 / sizeof(T);

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// Reads kSize elements that are used once: they need not push other data out of the caches.
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_streaming(const T* source) {
  Pack<T, kSize> pack;
  static_assert(sizeof(pack) % 16 == 0);
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(&pack)[i] = __ldcs(reinterpret_cast<const int4*>(source) + i);
  }
  return pack;
}

// Reads kSize elements that other threads will read too.
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_cached(const T* source) {
  Pack<T, kSize> pack;
  static_assert(sizeof(pack) % 16 == 0);
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(&pack)[i] = __ldg(reinterpret_cast<const int4*>(source) + i);
  }
  return pack;
}

template <int kSize, typename T>
__device__ __forceinline__ void store(T* target, const Pack<T, kSize>& pack) {
  static_assert(sizeof(pack) == 16);
  *reinterpret_cast<int4*>(target) = reinterpret_cast<const int4&>(pack);
}

// Whether 16-byte loads may start at every one of these pointers.
template <typename... Pointers>
bool aligned_16(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace jaxllm
