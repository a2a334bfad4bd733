// Tile sizes, shared memory and parameters of the forward kernel.
#pragma once

#include "attention/hopper/segments.cuh"
#include "attention/hopper/softmax.cuh"
#include "attention/sinks.cuh"
#include "common/head_order.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace jaxllm::hopper {

// A CTA has a producer warpgroup and kConsumers consumer warpgroups of 64 queries each. Of a head
// of Q or K the wgmma take kHeadDim columns, and shared memory has kColumns, whole blocks of the
// swizzle. Of V and the output they take and have kValueDim and kValueColumns. TMA fills with zeros
// what a head lacks of them, and leaves it out where it stores.
template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_, int kValueDim_ = kHeadDim_>
struct ForwardTraits {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kBlockM = kConsumers * 64;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;  // of K, and of V
  static constexpr int kColumnBlocks = divide_up(kHeadDim, kSwizzleColumns);
  static constexpr int kColumns = kColumnBlocks * kSwizzleColumns;
  static constexpr int kValueColumnBlocks = divide_up(kValueDim, kSwizzleColumns);
  static constexpr int kValueColumns = kValueColumnBlocks * kSwizzleColumns;
  // Wide heads leave no shared memory for the output: it takes the place of Q, which is released
  // when the output has left.
  static constexpr bool kOutputInQ = kColumnBlocks > 2;
  static_assert(!kOutputInQ || kValueColumns <= kColumns);
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Together all 64K registers of an SM, as far as a CTA can deal them out in units of eight.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  // K and V, which wgmma alone reads, are released by a warp. Q and its work tile, which threads
  // read, are released by every thread: racecheck does not follow a warp's other lanes to the one
  // that arrives.
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
};

// With a head dimension of 64 the output leaves registers for three or four consumers, which share
// each load of K and V. Four have registers for a kBlockN of 64 only; but with few keys they win,
// because more warpgroups overlap the start and the end of a tile. On an H200 the causal forward of
// 384 heads with 1024 keys takes three 160 us and four 147 us; of 48 heads with 4096 keys, 229 us
// and 260 us.
using ForwardHdim96 = ForwardTraits<96, 2, 128, 2>;
using ForwardHdim128 = ForwardTraits<128, 2, 128, 2>;
using ForwardHdim64 = ForwardTraits<64, 3, 128, 3>;
using ForwardHdim64FewKeys = ForwardTraits<64, 4, 64, 4>;
// As many keys as fit. Segments need whole granules of them.
using ForwardHdim192 = ForwardTraits<192, 2, 96, 2>;
using ForwardHdim192Value128 = ForwardTraits<192, 2, 128, 2, 128>;
// With segments the registers hold fewer scores.
using ForwardHdim192Value128Segments = ForwardTraits<192, 2, 96, 2, 128>;
using ForwardHdim256 = ForwardTraits<256, 2, 80, 2>;
using ForwardHdim256Segments = ForwardTraits<256, 2, 64, 2>;

// A query tile of one head.
struct ForwardWorkTile {
  int query_tile, head, sequence;

  __device__ __forceinline__ bool is_valid() const { return query_tile >= 0; }
};

template <typename T, class Traits>
struct ForwardSmem {
  T q[Traits::kConsumers][64 * Traits::kColumns];
  T k[Traits::kStages][Traits::kBlockN * Traits::kColumns];
  T v[Traits::kStages][Traits::kBlockN * Traits::kValueColumns];
  T own_out[Traits::kOutputInQ ? 1 : Traits::kConsumers]
           [Traits::kOutputInQ ? 8 : 64 * Traits::kValueColumns];
  Pipeline<1> q_pipeline;
  Pipeline<Traits::kStages> k_pipeline, v_pipeline;
  // These come with Q. The work tile after the last is not valid.
  ForwardWorkTile work;
  TileRange key_tiles;

  __device__ __forceinline__ T* out(int consumer) {
    if constexpr (Traits::kOutputInQ) return q[consumer];
    return own_out[consumer];
  }
};

struct ForwardParams {
  LocalMask mask;
  int batch, heads, kv_heads, query_tiles, tiles, heads_at_a_time;
  HeadOrder q_order;
  float scale;  // of the scores; with a softcap, of their tanh: the softcap
  Softcap softcap;
  attention::Sinks sinks;
  float* lse;
  int* tile_counter;
  SegmentParams segments;
};

// Named barriers of a CTA; 0 is __syncthreads.
struct ForwardNamedBarriers {
  static constexpr int kOrder = 1;     // + consumer: its slot of the tensor cores (ping-pong)
  static constexpr int kEpilogue = 5;  // + consumer: its output is in shared memory
};

}  // namespace jaxllm::hopper
