// The formulas of RMS normalization, of an element and of a row.
#pragma once

#include "norm/rows.cuh"

namespace jaxllm {

// See LayerNormFormula for what the members are. The mean of `row` counts as 0 and is not used.
struct RmsNormFormula {
  static constexpr bool kCenters = false;
  static constexpr int kSums = 1;

  __device__ __forceinline__ static float out(float x, float rstd, float scale, float) {
    return x * rstd * scale;
  }

  __device__ __forceinline__ static float g(float dout, float scale) { return dout * scale; }

  // Adds an element to the row's sum, of g * n, and to the gradient of its column.
  __device__ __forceinline__ static void accumulate(float x, float dout, float scale,
                                                    RowStatistics row, float* sums, float& dscale,
                                                    float&) {
    const float dn = dout * (x * row.rstd);
    sums[0] += dn * scale;
    dscale += dn;
  }

  // dx = rstd * (g - n * mean(g * n)), and n * mean(g * n) = x * of_x.
  __device__ __forceinline__ static float row_terms(const float* sums, float rstd,
                                                    float per_column) {
    return rstd * sums[0] * per_column;
  }
  __device__ __forceinline__ static float dx(float x, float dout, float scale, RowStatistics row,
                                             float of_x) {
    return row.rstd * (g(dout, scale) - x * of_x);
  }
};

}  // namespace jaxllm
