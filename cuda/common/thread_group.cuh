// Thread groups: the threads that share a row. Thread r of a group of n holds packs r, r + n, ...
// of the row.
#pragma once

#include <cuda_runtime.h>

#include "common/reduce.cuh"

namespace jaxllm {

// kLanes neighbouring lanes of a warp share a row: shuffles alone make its sums.
template <int kLanes, int kThreads>
struct LanesPerRow {
  static constexpr int kMaxThreads = kThreads;  // of a CTA
  static constexpr int kRowsPerCta = kThreads / kLanes;

  __device__ int rank() const { return threadIdx.x % kLanes; }
  __device__ int size() const { return kLanes; }
  __device__ int row() const { return threadIdx.x / kLanes; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    sum_over_lanes<kLanes>(values);
  }
  __device__ float max(float value) { return max_over_lanes<kLanes>(value); }
};

// A CTA of at most kThreads threads shares a row: its sums meet in shared memory.
template <int kThreads>
struct CtaPerRow {
  static constexpr int kMaxThreads = kThreads;
  static constexpr int kRowsPerCta = 1;

  __device__ int rank() const { return threadIdx.x; }
  __device__ int size() const { return blockDim.x; }
  __device__ int row() const { return 0; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    __shared__ float scratch[2][kCount * 32];
    sum_over_cta(values, scratch[parity]);
    parity ^= 1;
  }
  __device__ float max(float value) {
    __shared__ float scratch[2][32];
    value = max_over_cta(value, scratch[parity]);
    parity ^= 1;
    return value;
  }

  int parity = 0;  // of the reductions so far: which scratch array is next
};

}  // namespace jaxllm
