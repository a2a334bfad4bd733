// Tile sizes, shared memory and parameters of the kernel that computes dq alone.
#pragma once

#include "attention/hopper/backward_traits.cuh"
#include "attention/hopper/forward_traits.cuh"

namespace jaxllm::hopper {

// As in the forward a CTA has a producer warpgroup, and two consumer warpgroups of 64 queries each.
// Q and dout of the query tile stay in shared memory. kHeadDim, kColumns, kValueDim and
// kValueColumns are as in the forward.
template <int kHeadDim_, int kValueDim_ = kHeadDim_>
struct DqTraits {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = kConsumers * 64;
  static constexpr int kBlockN = 64;
  static constexpr int kColumnBlocks = divide_up(kHeadDim, kSwizzleColumns);
  static constexpr int kColumns = kColumnBlocks * kSwizzleColumns;
  static constexpr int kValueColumns = divide_up(kValueDim, kSwizzleColumns) * kSwizzleColumns;
  // K is read twice, and for longer: by s, and by dq of which the next s is ahead. With two stages
  // the next K is loaded no sooner than its s begins: with three the backward of queries and keys
  // of 192 columns and values of 128 took 0.82 to 0.90 of the time on an H200.
  static constexpr int kKStages = kHeadDim > 192 ? 2 : 3, kVStages = kHeadDim > 192 ? 1 : 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kProducerRegisters = kValueDim < kHeadDim ? 40 : 24;
  static constexpr int kConsumerRegisters = kValueDim < kHeadDim ? 232 : 240;
  // Who releases what: see ForwardTraits.
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
};

template <typename T, class Traits>
struct DqSmem {
  static constexpr int kColumns = Traits::kColumns;
  T q[Traits::kConsumers][64 * kColumns];  // and then dq
  T dout[Traits::kConsumers][64 * Traits::kValueColumns];
  T k[Traits::kKStages][Traits::kBlockN * kColumns];
  T v[Traits::kVStages][Traits::kBlockN * Traits::kValueColumns];
  Pipeline<1> q_pipeline, dout_pipeline;
  Pipeline<Traits::kKStages> k_pipeline;
  Pipeline<Traits::kVStages> v_pipeline;
  // These come with Q. The work tile after the last is not valid.
  ForwardWorkTile work;
  TileRange key_tiles;
};

struct DqParams {
  LocalMask mask;
  int batch, heads, kv_heads, query_tiles, tiles, heads_at_a_time;
  HeadOrder q_order;   // of q and dq
  int padded_queries;  // of lse and delta
  // As in BackwardParams.
  float scale, score_scale;
  Softcap softcap;
  const float *lse, *delta;
  int* tile_counter;
  SegmentParams segments;
};

// Named barriers of a CTA; 0 is __syncthreads.
struct DqNamedBarriers {
  static constexpr int kEpilogue = 1;  // + consumer: its dq is in shared memory
};

}  // namespace jaxllm::hopper
