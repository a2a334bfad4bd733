// How a warp makes weights of the scores of 16 keys a product, for up to eight heads.
#pragma once

#include "common/fast_math.cuh"
#include "common/reduce.cuh"

namespace jaxllm {

// Makes weights of scores: of each product lane 4 r + c has those of heads 2c and 2c + 1, of one of
// its two keys first. Adds the weights to the lane's `total`; `factors` is what sums of values so
// far are to be multiplied with, as `total` is, where `largest` grows. `told_from` gives what
// scores are told from beside the largest of them, which is -infinity in a warp that has seen no
// key.
template <int kProducts, class ToldFrom>
__device__ __forceinline__ void weigh_scores(float (&scores)[kProducts][4], float (&largest)[2],
                                             float (&total)[2], float (&factors)[2],
                                             ToldFrom told_from) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = largest[h];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) most = fmaxf(most, fmaxf(scores[n][h], scores[n][2 + h]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
    }
    const float reference = told_from(most);
    factors[h] = exp2_fast(largest[h] - reference);
    largest[h] = most;
    total[h] *= factors[h];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        scores[n][2 * t + h] = exp2_fast(scores[n][2 * t + h] - reference);
        total[h] += scores[n][2 * t + h];
      }
    }
  }
}

}  // namespace jaxllm
