// A pipeline of kStages buffers in shared memory between a producer and its consumers, as CUTLASS
// has it:
//
//   producer   acquire(s): wait for empty[s]     load into buffer s     full[s] completes
//   consumer   wait(s):    wait for full[s]      read buffer s          release(s): arrive at
//   empty[s]
//
// Both visit the stages in the same order, and each keeps its own PipelineState. The producer's
// first pass finds every stage empty, because a fresh barrier counts as having completed the phase
// before its first.
#pragma once

#include "common/barrier.cuh"

namespace jaxllm::hopper {

// The stage that a producer or consumer is at, and the parity of that stage's phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  // Skips `steps` stages, those that another consumer takes.
  __device__ __forceinline__ void advance(int steps) {
    const int position = stage + steps;
    phase ^= position / kStages & 1;
    stage = position % kStages;
  }
  __device__ __forceinline__ int previous_stage() const {
    return (stage == 0 ? kStages : stage) - 1;
  }
};

// The barriers, in shared memory.
template <int kStages>
struct Pipeline {
  Barrier full[kStages], empty[kStages];

  // One thread's task. A stage is full after `producers` arrivals and the bytes that they announce,
  // and empty after `consumers` arrivals.
  __device__ __forceinline__ void init(uint32_t producers, uint32_t consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }

  // Waits until the consumers have released the state's stage.
  __device__ __forceinline__ void producer_acquire(const PipelineState<kStages>& state) {
    empty[state.stage].wait(state.phase ^ 1);
  }
  // The same, and announces `bytes` that TMA will bring. Returns the barrier at which they arrive.
  __device__ __forceinline__ Barrier& producer_acquire(const PipelineState<kStages>& state,
                                                       uint32_t bytes) {
    producer_acquire(state);
    full[state.stage].arrive_and_expect(bytes);
    return full[state.stage];
  }

  // Waits until the state's stage is full.
  __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& state) {
    full[state.stage].wait(state.phase);
  }

  // Releases a stage for a whole warp.
  __device__ __forceinline__ void consumer_release(int stage) { arrive_as_warp(empty[stage]); }
  // The same in every CTA of a cluster of kCluster, each of which has loaded a part of the stage.
  template <int kCluster>
  __device__ __forceinline__ void consumer_release_cluster(int stage, int lane) {
    __syncwarp();
    if constexpr (kCluster == 1) {
      if (lane == 0) empty[stage].arrive();
    } else {
      if (lane < kCluster) arrive_remote(empty[stage], lane);
    }
  }
};

}  // namespace jaxllm::hopper
