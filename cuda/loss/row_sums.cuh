// Online softmax: the sums of a row of logits that the threads of a CTA make in one pass.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <type_traits>

#include "common/fast_math.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

template <typename T>
__device__ __forceinline__ float largest_of(const Pack<T>& pack) {
  if constexpr (sizeof(T) == 4) {
    return fmaxf(fmaxf(pack[0], pack[1]), fmaxf(pack[2], pack[3]));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair* pairs = reinterpret_cast<const Pair*>(pack.words);
    const Pair two = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return to_float(__hmax(two.x, two.y));
  }
}

// The sum of the exponentials of logits, and the sum of the logits themselves.
//
// The exponentials are powers of two, e^z = 2^(z log2(e)), relative to 2^offset, where the offset
// is the largest exponent so far. One instruction (an fma) makes the exponent and rounds it once.
// The rounding of the offset is the same for all elements, and cancels in every quotient.
struct RowSums {
  float offset = -FLT_MAX;  // finite, so that no difference of two is NaN
  float exponentials = 0.0f;
  float logits = 0.0f;

  // The exponent of e^logit, relative to the offset.
  __device__ __forceinline__ float exponent(float logit) const {
    return fmaf(logit, kLog2E, -offset);
  }

  __device__ __forceinline__ void raise_offset(float other) {
    const float higher = fmaxf(offset, other);
    exponentials *= exp2_fast(offset - higher);
    offset = higher;
  }

  __device__ __forceinline__ void add(float logit) {
    raise_offset(logit * kLog2E);
    exponentials += exp2_fast(exponent(logit));
    logits += logit;
  }

  // Only label smoothing needs the sum of the logits.
  template <typename T, int kPacks>
  __device__ __forceinline__ void add(const Pack<T> (&packs)[kPacks], bool sums_logits) {
    float largest = largest_of(packs[0]);
#pragma unroll
    for (int p = 1; p < kPacks; ++p) largest = fmaxf(largest, largest_of(packs[p]));
    raise_offset(largest * kLog2E);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float of_pack =
          0.0f;  // a separate sum: the additions of the packs do not depend on each other
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) {
        of_pack += exp2_fast(exponent(packs[p][i]));
      }
      exponentials += of_pack;
    }
    if (!sums_logits) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) logits += packs[p][i];
    }
  }

  __device__ __forceinline__ void merge(RowSums other) {
    raise_offset(other.offset);
    other.raise_offset(offset);
    exponentials += other.exponentials;
    logits += other.logits;
  }

  __device__ __forceinline__ void merge_lanes() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      RowSums other;
      other.offset = __shfl_xor_sync(kFullWarp, offset, distance);
      other.exponentials = __shfl_xor_sync(kFullWarp, exponentials, distance);
      other.logits = __shfl_xor_sync(kFullWarp, logits, distance);
      merge(other);
    }
  }

  // Merges the sums of all threads of the CTA, in a fixed order; every thread gets the result. To
  // be called once in a kernel.
  __device__ __forceinline__ void merge_cta() {
    __shared__ float of_warps[3][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    merge_lanes();
    if (lane == 0) {
      of_warps[0][warp] = offset;
      of_warps[1][warp] = exponentials;
      of_warps[2][warp] = logits;
    }
    __syncthreads();
    *this = RowSums();
    if (lane < blockDim.x / 32) {
      offset = of_warps[0][lane];
      exponentials = of_warps[1][lane];
      logits = of_warps[2][lane];
    }
    merge_lanes();
  }
};

}  // namespace jaxllm
