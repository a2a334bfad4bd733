// The gradient of a rotated projection, rotated back and rounded to 8-bit floats.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// The rotation of the first `heads` heads of each row, as in rotary/rope.h. Row r has position
// r % length, and reads table r / rows_of_table of tables (length, pairs).
struct RowRotation {
  const float *cos, *sin;
  int64_t length, rows_of_table;
  int heads, width, pairs;
  bool interleaved;
};

// x of `rows` by `columns`, rotated by the negative angles and rounded to T, is then scaled and
// rounded in both layouts as by Float8ScalingAndRounding. A pass for the largest magnitude and one
// for the results rotate on load, so the rotated gradient is never in memory.
//
// sums: nullptr where they are not wanted. partial: a workspace as Float8Rounding's. maxima: one of
// kFloat8RopeMaxima floats.
//
// cudaErrorNotSupported as Float8Rounding, for heads that are not 16, 32, 64, 128 or 256 columns of
// pairs; interleaved, for heads that are no multiple of 8, or pairs of 4.
template <typename T>
struct Float8RopeRounding {
  using Float8 = __nv_fp8_e5m2;

  const T* x;
  float* scale;
  float* maxima;

  cudaError_t launch(cudaStream_t stream, int64_t rows, int64_t columns,
                     const RowRotation& rotation, Float8* values, Float8* transposed, T* sums,
                     float* partial) const;
};

inline constexpr int64_t kFloat8RopeMaxima = 1024;  // of CTAs

}  // namespace jaxllm
