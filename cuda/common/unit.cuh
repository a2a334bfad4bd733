// Units: what a thread moves at once, a pack of 16 bytes, or one element where rows are not
// aligned. One kernel, written with units, then serves rows of any width.
#pragma once

#include <type_traits>

#include "common/vector.cuh"

namespace jaxllm {

// One element, with the interface of a pack.
template <typename T>
struct Element {
  T value;

  __device__ __forceinline__ float operator[](int) const { return to_float(value); }
  __device__ __forceinline__ static Element of(const float (&values)[1]) {
    return {from_float<T>(values[0])};
  }
};

template <typename T, int kSize>
using Unit = std::conditional_t<kSize == 1, Element<T>, Pack<T, kSize == 1 ? kPackSize<T> : kSize>>;

// As load_streaming, load_cached and store_streaming of packs.
template <int kSize, typename T>
__device__ __forceinline__ Unit<T, kSize> load_unit_streaming(const T* source) {
  if constexpr (kSize == 1) {
    return {__ldcs(source)};
  } else {
    return load_streaming<kSize>(source);
  }
}

template <int kSize, typename T>
__device__ __forceinline__ Unit<T, kSize> load_unit_cached(const T* source) {
  if constexpr (kSize == 1) {
    return {__ldg(source)};
  } else {
    return load_cached<kSize>(source);
  }
}

template <int kSize, typename T>
__device__ __forceinline__ void store_unit_streaming(T* target, const Unit<T, kSize>& unit) {
  if constexpr (kSize == 1) {
    __stcs(target, unit.value);
  } else {
    store_streaming(target, unit);
  }
}

}  // namespace jaxllm
