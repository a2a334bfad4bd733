// Packs: the elements that a thread loads or stores at once, 16 bytes or a multiple (vectorized
// access, float4 or llm.c's Packed128), or one element where rows are not aligned.
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

// kSize elements of T, kept as the 32-bit words that a load fills. One instruction takes a bfloat16
// out of its word; 16-bit variables would cost two.
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

// One element, of any alignment: a kernel that takes kSize as a parameter serves rows of any width.
template <typename T>
struct Pack<T, 1> {
  T value;

  __device__ __forceinline__ float operator[](int) const { return to_float(value); }
  __device__ __forceinline__ static Pack of(const float (&values)[1]) {
    return {from_float<T>(values[0])};
  }
};

// A compiler fence: from here on the compiler unpacks the words anew. It would rather keep the
// floats in twice the registers, and half as many warps would fit.
template <typename T, int kVector, int kPacks>
__device__ __forceinline__ void fence_packs(Pack<T, kVector> (&packs)[kPacks]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (uint32_t& word : packs[p].words) asm volatile("" : "+r"(word));
  }
}

// What one instruction loads or stores of a pack.
template <typename T, int kSize>
using PackAccess = std::conditional_t<kSize == 1, T, int4>;

template <int kSize, typename T, class Load>
__device__ __forceinline__ Pack<T, kSize> load_with(Load load, const T* source) {
  using Access = PackAccess<T, kSize>;
  Pack<T, kSize> pack;
#pragma unroll
  for (int i = 0; i < int{sizeof(pack) / sizeof(Access)}; ++i) {
    reinterpret_cast<Access*>(&pack)[i] = load(reinterpret_cast<const Access*>(source) + i);
  }
  return pack;
}

template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load(const T* source) {
  return load_with<kSize>([](const auto* from) { return *from; }, source);
}

// Loads elements that are used once (ld.global.cs): they need not evict other data.
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_streaming(const T* source) {
  return load_with<kSize>([](const auto* from) { return __ldcs(from); }, source);
}

// Loads elements that other threads load too, and that nobody writes (ld.global.nc).
template <int kSize, typename T>
__device__ __forceinline__ Pack<T, kSize> load_cached(const T* source) {
  return load_with<kSize>([](const auto* from) { return __ldg(from); }, source);
}

template <int kSize, typename T, class Store>
__device__ __forceinline__ void store_with(Store store, T* target, const Pack<T, kSize>& pack) {
  using Access = PackAccess<T, kSize>;
#pragma unroll
  for (int i = 0; i < int{sizeof(pack) / sizeof(Access)}; ++i) {
    store(reinterpret_cast<Access*>(target) + i, reinterpret_cast<const Access*>(&pack)[i]);
  }
}

template <int kSize, typename T>
__device__ __forceinline__ void store(T* target, const Pack<T, kSize>& pack) {
  store_with([](auto* to, const auto& value) { *to = value; }, target, pack);
}

// Stores elements that this kernel does not read again (st.global.cs).
template <int kSize, typename T>
__device__ __forceinline__ void store_streaming(T* target, const Pack<T, kSize>& pack) {
  store_with([](auto* to, const auto& value) { __stcs(to, value); }, target, pack);
}

// Whether loads and stores of so many bytes may start at every one of these pointers.
template <int kBytes, typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % kBytes == 0) && ...);
}
template <typename... Pointers>
bool aligned_16(Pointers... pointers) {
  return aligned<16>(pointers...);
}

}  // namespace jaxllm
