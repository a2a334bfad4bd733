// Rounding of a whole matrix to 8-bit floats with its current scale.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// scale = max |x| / max(Float8) over the finite elements of a matrix x of `rows` by `columns`, and
// what Float8Rounding computes with that one scale. The scale of zeros is 1, and any other at least
// the smallest normal float.
//
// values, transposed, sums: nullptr where it is not wanted; sums only with both layouts.
// partial: a workspace, as Float8Rounding's. maxima: one of kFloat8Maxima floats.
//
// cudaErrorNotSupported as Float8Rounding.
template <typename Float8, typename T>
struct Float8ScalingAndRounding {
  const T* x;
  float* scale;
  float* maxima;

  cudaError_t launch(cudaStream_t stream, int64_t rows, int64_t columns, Float8* values,
                     Float8* transposed, T* sums, float* partial) const;
};

inline constexpr int64_t kFloat8Maxima = 256;  // of CTAs

}  // namespace jaxllm
