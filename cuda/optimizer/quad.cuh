// Quads: four neighbouring elements, 16 bytes of float32 or 8 bytes of a 16-bit type. A thread that
// loads arrays of both kinds has the same elements of each, and the loads of a warp coalesce.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/vector.cuh"

namespace jaxllm {

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T elements[4];
};

// What one instruction loads or stores.
template <typename T>
using QuadBits = std::conditional_t<sizeof(T) == 4, int4, int2>;

template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* source) {
  const QuadBits<T> bits = __ldcs(reinterpret_cast<const QuadBits<T>*>(source));
  return reinterpret_cast<const Quad<T>&>(bits);
}

template <typename T>
__device__ __forceinline__ void store_quad(T* target, const Quad<T>& quad) {
  __stcs(reinterpret_cast<QuadBits<T>*>(target), reinterpret_cast<const QuadBits<T>&>(quad));
}

// Whether quads can be loaded from all of these pointers.
template <typename... Pointers>
__device__ __forceinline__ bool quads_are_aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) %
               alignof(Quad<std::remove_cv_t<std::remove_pointer_t<Pointers>>>) ==
           0) &&
          ...);
}

}  // namespace jaxllm
