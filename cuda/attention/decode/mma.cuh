// The tensor-core products of decode_attention: the tokens are the rows of q k^T, and up to eight
// query heads its columns. And the online softmax of a warp, on the scores of 16 tokens per MMA.
//
// A dot product may be summed in any order. So the lanes of a quad multiply the columns of a key in
// the order of their loads, 16 bytes each, and not in the order of the MMA:
//
//   columns of the MMA    2c, 2c + 1, 2c + 8, 2c + 9 in lane c of a quad
//   columns of the head   kPerLoad neighbours from (c + 4 j) kPerLoad on, in load j of lane c
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/convert_int8.cuh"
#include "common/fast_math.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

namespace jaxllm::decode {

// Loads 8 or 16 bytes of shared memory.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const char* source) {
  using Words = std::conditional_t<kWords == 4, uint4, uint2>;
  reinterpret_cast<Words&>(words) = *reinterpret_cast<const Words*>(source);
}

// Loads a lane's columns of a query, kLoads times 2 * kWords of them, from its first one on.
template <typename T, int kLoads, int kWords>
__device__ __forceinline__ void load_query(uint32_t (&q)[kLoads][kWords], const T* first) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      reinterpret_cast<uint4&>(q[j][4 * i]) =
          *reinterpret_cast<const uint4*>(first + j * 8 * kWords + i * 8);
    }
  }
}

// Adds one load's part of q k^T: `low` is the lane's chunk of its first key, `high` that of the key
// eight rows further. Two accumulators, since an MMA waits for the one before it that adds to the
// same.
template <typename T, typename C, int kWords>
__device__ __forceinline__ void multiply_keys(float (&acc)[2][4], const uint32_t (&low)[4],
                                              const uint32_t (&high)[4],
                                              const uint32_t (&q)[kWords]) {
#pragma unroll
  for (int i = 0; i < 2 * kWords; i += 4) {
    mma_m16n8k16<T>(acc[i / 4 % 2],
                    {row_pair<T, C>(low, i), row_pair<T, C>(high, i), row_pair<T, C>(low, i + 2),
                     row_pair<T, C>(high, i + 2)},
                    q[i / 2], q[i / 2 + 1]);
  }
}

// Scales an output accumulator, whose columns are heads 2c and 2c + 1, to new maxima of the
// softmax.
template <int kTiles>
__device__ __forceinline__ void rescale(float (&acc)[kTiles][4], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < 4; ++s) acc[i][s] *= factors[s % 2];
  }
}

// Makes weights of scores. Lane 4 r + c has of each MMA the scores of heads 2c and 2c + 1, for two
// tokens. Adds the weights to the lane's `total`. `factors` is what the caller multiplies the
// output accumulator by, as `total` is here, since `largest` may grow. Weights are relative to
// reference_of(largest); `largest` is -infinity in a warp that has seen no key.
template <int kProducts, class Reference>
__device__ __forceinline__ void online_softmax(float (&scores)[kProducts][4], float (&largest)[2],
                                               float (&total)[2], float (&factors)[2],
                                               Reference reference_of) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = largest[h];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) most = fmaxf(most, fmaxf(scores[n][h], scores[n][2 + h]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
    }
    const float reference = reference_of(most);
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

// A reference that is finite, where a part of the softmax may be without keys.
__device__ __forceinline__ float finite_or_zero(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

}  // namespace jaxllm::decode
