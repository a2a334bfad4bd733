// Reductions of whole arrays to a scalar: the sum, the maximum, the dot product.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// An array holds `groups` independent problems of `size` elements (the axis that jax.vmap adds),
// and `out` has one element for each. CTAs reduce chunks of a problem to `partial`, a workspace of
// (groups, partials) floats, and one CTA reduces these. The order of the operations depends on
// `size`, `partials`, T, and whether the problem's arrays are aligned to 16 bytes.
struct ReduceShape {
  int64_t groups, size, partials;
};

template <typename T>
struct Reduce {
  static cudaError_t sum(cudaStream_t stream, const T* x, float* out, float* partial,
                         const ReduceShape& shape);
  // NaN where an element is, minus infinity where there are none.
  static cudaError_t max(cudaStream_t stream, const T* x, T* out, float* partial,
                         const ReduceShape& shape);
  static cudaError_t dot(cudaStream_t stream, const T* a, const T* b, float* out, float* partial,
                         const ReduceShape& shape);
};

}  // namespace jaxllm
