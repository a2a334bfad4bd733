// Packs: the 16 bytes that one thread moves in one memory instruction, or a few of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxllm {

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

// Elements of T in 16 bytes.
template <typename T>
inline constexpr int kPackSize = 16 / sizeof(T);

// kSize elements of T. They are kept as 32-bit words, the registers that a load fills: to take a
// bfloat16 out of its word is then one instruction, where 16-bit variables would cost two.
template <typename T, int kSize = kPackSize<T>>
struct alignas(16) Pack {
  static_assert(kSize * sizeof(T) % 16 == 0);
  uint32_t words[kSize * sizeof(T) / 4];

  // Element i as a float; i is a compile-time constant once its loop is unrolled.
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // A bfloat16 is the upper half of a float.
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      const __half2 pair = reinterpret_cast<const __half2&>(words[i / 2]);
      return i % 2 ? __high2float(pair) : __low2float(pair);
    }
  }

  // Rounds floats to T.
  __device__ __forceinline__ static Pack of(const float (&values)[kSize]) {
    Pack pack;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) pack.words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
          pack.words[i / 2] = reinterpret_cast<const uint32_t&>(pair);
        } else {
          const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
          pack.words[i / 2] = reinterpret_cast<const uint32_t&>(pair);
        }
      }
    }
    return pack;
  }
};

// Makes the compiler take packs apart anew from here on. It would rather keep the floats that it
// has once unpacked, in twice the registers, and half as many warps would fit.
template <typename T, int kVector, int kPacks>
__device__ __forceinline__ void forget_unpacked(Pack<T, kVector> (&packs)[kPacks]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (uint32_t& word : packs[p].words) asm volatile("" : "+r"(word));
  }
}

template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load(const T* source) {
  Pack<T, kSize> pack;
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(&pack)[i] = reinterpret_cast<const int4*>(source)[i];
  }
  return pack;
}

// Reads elements that are used once: they need not push other data out of the caches.
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_streaming(const T* source) {
  Pack<T, kSize> pack;
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(&pack)[i] = __ldcs(reinterpret_cast<const int4*>(source) + i);
  }
  return pack;
}

// Reads elements that other threads will read too.
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_cached(const T* source) {
  Pack<T, kSize> pack;
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(&pack)[i] = __ldg(reinterpret_cast<const int4*>(source) + i);
  }
  return pack;
}

template <int kSize, typename T>
__device__ __forceinline__ void store(T* target, const Pack<T, kSize>& pack) {
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    reinterpret_cast<int4*>(target)[i] = reinterpret_cast<const int4*>(&pack)[i];
  }
}

// Writes elements that this kernel is done with.
template <int kSize, typename T>
__device__ __forceinline__ void store_streaming(T* target, const Pack<T, kSize>& pack) {
#pragma unroll
  for (int i = 0; i < int{sizeof(pack)} / 16; ++i) {
    __stcs(reinterpret_cast<int4*>(target) + i, reinterpret_cast<const int4*>(&pack)[i]);
  }
}

// Whether 16-byte loads may start at every one of these pointers.
template <typename... Pointers>
bool aligned_16(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace jaxllm
