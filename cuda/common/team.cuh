// Teams: the threads that share a row. Thread t of a team holds packs t, t + threads, ... of it.
#pragma once

#include <cuda_runtime.h>

#include "common/reduce.cuh"
#include "common/reduce_max.cuh"

namespace jaxllm {

// kLanes neighbouring lanes of a warp share a row: their sums need shuffles alone.
template <int kLanes, int kThreads>
struct LanesPerRow {
  static constexpr int kMaxThreads = kThreads;
  static constexpr int kRowsPerBlock = kThreads / kLanes;

  __device__ int thread() const { return threadIdx.x % kLanes; }
  __device__ int threads() const { return kLanes; }
  __device__ int row() const { return threadIdx.x / kLanes; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    sum_over_lanes<kLanes>(values);
  }
  __device__ float max(float value) { return max_over_lanes<kLanes>(value); }
};

// A block of at most kThreads shares a row: its sums meet in shared memory.
template <int kThreads>
struct BlockPerRow {
  static constexpr int kMaxThreads = kThreads;
  static constexpr int kRowsPerBlock = 1;

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int row() const { return 0; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    __shared__ float scratch[2][kCount * 32];
    sum_over_block(values, scratch[turn]);
    turn ^= 1;
  }
  __device__ float max(float value) {
    __shared__ float scratch[2][32];
    value = max_over_block(value, scratch[turn]);
    turn ^= 1;
    return value;
  }

  int turn = 0;  // of the scratch arrays, as the reductions ask
};

}  // namespace jaxllm
