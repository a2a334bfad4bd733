// The formulas of layer normalization, of an element and of a row.
#pragma once

#include "norm/rows.cuh"

namespace jaxllm {

// With c = x - mean, so that n = c * rstd. See RmsNormFormula for the same without the mean.
struct LayerNormFormula {
  static constexpr bool kCenters = true;  // has a mean and biases
  static constexpr int kSums = 2;         // over a row, in each direction

  __device__ __forceinline__ static float out(float c, float rstd, float scale, float bias) {
    return c * rstd * scale + bias;
  }

  // Rounded as in `accumulate`, not fused with the subtraction: else a row of one column would have
  // a gradient.
  __device__ __forceinline__ static float g(float dout, float scale) {
    return __fmul_rn(dout, scale);
  }

  // Adds an element to the row's sums, of g and of g * c, and to the gradients of its column. The
  // product here is not __fmul_rn: the compiler would keep it in a register for dx.
  __device__ __forceinline__ static void accumulate(float x, float dout, float scale,
                                                    RowStatistics row, float* sums, float& dscale,
                                                    float& dbias) {
    const float c = x - row.mean;
    const float g = dout * scale;
    sums[0] += g;
    sums[1] += g * c;
    dscale += dout * row.rstd * c;
    dbias += dout;
  }

  // dx = rstd * (g - mean(g) - n * mean(g * n)), and n * mean(g * n) = c * of_c.
  struct RowTerms {
    float mean_g, of_c;
  };
  __device__ __forceinline__ static RowTerms row_terms(const float* sums, float rstd,
                                                       float per_column) {
    return {sums[0] * per_column, rstd * rstd * sums[1] * per_column};
  }
  __device__ __forceinline__ static float dx(float x, float dout, float scale, RowStatistics row,
                                             RowTerms terms) {
    return row.rstd * (g(dout, scale) - terms.mean_g - (x - row.mean) * terms.of_c);
  }
};

}  // namespace jaxllm
