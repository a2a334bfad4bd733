// Scores and their softmax on accumulators. Scores are in base 2, so that exp2 needs no scaling.
#pragma once

#include <cmath>

#include "attention/mma/tile.cuh"
#include "common/fast_math.cuh"

namespace jaxllm::attention {

// From q k^T to a score: scale * product, or softcap * tanh(scale * product) where softcap is not
// 0.
struct ScoreParams {
  float scale, softcap;
};

inline ScoreParams make_score_params(const FlashOptions& options) {
  if (options.softcap == 0.0f) return {options.scale * kLog2E, 0.0f};
  return {options.scale / options.softcap, options.softcap * kLog2E};
}

// ---- Of the forward.

// A row lies in four neighbouring lanes, a quad.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// Makes scores of products.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_scores(float (&s)[kMTiles][kNTiles][4],
                                             const ScoreParams& params) {
  if (params.scale == 1.0f && params.softcap == 0.0f) return;
  for_each_element(s, [&](float& x) { x *= params.scale; });
  if (params.softcap == 0.0f) return;
  for_each_element(s, [&](float& x) { x = params.softcap * tanh_fast(x); });
}

// A step of the online softmax: turns scores into weights, 2^(exp2_scale * (score - maximum)), and
// rescales the running sum and the output accumulator to the new maximum.
template <int kMTiles, int kNTiles, int kOutTiles>
__device__ __forceinline__ void online_softmax(float (&s)[kMTiles][kNTiles][4], float exp2_scale,
                                               float (&maximum)[kMTiles][2],
                                               float (&sum)[kMTiles][2],
                                               float (&out)[kMTiles][kOutTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = maximum[m][h];
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        largest = fmaxf(largest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      largest = quad_max(largest);
      // The maximum of a row that has seen no key is -infinity: with 0 its weights are 0, not NaN.
      const float finite = largest == -INFINITY ? 0.0f : largest;
      const float correction = exp2_fast(exp2_scale * (maximum[m][h] - finite));
      const float minus = -exp2_scale * finite;
      maximum[m][h] = largest;
      float added = 0.0f;  // by this lane alone: the epilogue adds up the quad
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& value = s[m][n][2 * h + c];
          value = exp2_fast(fmaf(exp2_scale, value, minus));
          added += value;
        }
      }
      sum[m][h] = sum[m][h] * correction + added;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[m][n][2 * h] *= correction;
        out[m][n][2 * h + 1] *= correction;
      }
    }
  }
}

// ---- Of the backward, which recomputes the weights from lse.

// -lse in base 2. A query that sees no key has an lse of -infinity, which stays: its weights are 0.
// The functions below take with it the bias of the score, in base 2 too, if there is one.
__device__ __forceinline__ float negative_lse(float lse) {
  return lse == -INFINITY ? -INFINITY : -lse * kLog2E;
}

__device__ __forceinline__ float weight_of(float product, const ScoreParams& params,
                                           float minus_lse) {
  if (params.softcap == 0.0f) return exp2_fast(fmaf(product, params.scale, minus_lse));
  return exp2_fast(fmaf(tanh_fast(product * params.scale), params.softcap, minus_lse));
}

// 1 - tanh^2, the derivative of the softcap, from the weight. A weight of 0, of a hidden key too,
// has no gradient.
__device__ __forceinline__ float softcap_derivative(float weight, const ScoreParams& params,
                                                    float minus_lse) {
  if (weight == 0.0f) return 0.0f;
  const float tanh = (log2_fast(weight) - minus_lse) / params.softcap;
  return 1.0f - tanh * tanh;
}

}  // namespace jaxllm::attention
