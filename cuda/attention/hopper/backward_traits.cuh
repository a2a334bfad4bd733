// Tile sizes, shared memory and parameters of the backward kernel.
#pragma once

#include "attention/hopper/segments.cuh"
#include "attention/hopper/softmax.cuh"
#include "common/head_order.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace jaxllm::hopper {

// A CTA has a producer warpgroup, two consumer warpgroups of 64 keys each and, with a head
// dimension of 64, a third that computes dq for both: a head dimension of 128 leaves it no
// registers. Beyond 128 both consumers have the same 64 keys, and some of the columns each; and a
// kernel of its own computes dq (kSeparateDq): see dq_traits.cuh. Where values are narrower than
// keys one consumer computes dv and the other dk (kSplitsGradients).
// kHeadDim, kColumns, kValueDim and kValueColumns are as in the forward; dq has kColumns.
template <int kHeadDim_, int kValueDim_ = kHeadDim_>
struct BackwardTraits {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr bool kHasDqWarpgroup = kHeadDim == 64;
  static constexpr bool kSeparateDq = kHeadDim > kFlashMaxFusedDqWidth;
  static constexpr bool kSplitsGradients = kValueDim < kHeadDim;
  static_assert(!kSplitsGradients || kSeparateDq);
  static constexpr bool kTakesSoftcap = !kSplitsGradients;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockN = kSeparateDq ? 64 : kConsumers * 64;
  static constexpr int kBlockM = kHasDqWarpgroup ? 128 : 64;  // what registers allow
  static constexpr int kColumnBlocks = divide_up(kHeadDim, kSwizzleColumns);
  static constexpr int kColumns = kColumnBlocks * kSwizzleColumns;
  static constexpr int kValueColumnBlocks = divide_up(kValueDim, kSwizzleColumns);
  static constexpr int kValueColumns = kValueColumnBlocks * kSwizzleColumns;
  // Where scores are computed ahead there are three stages of Q. With kSplitsGradients one consumer
  // is ahead of the other, and shared memory has room for as many of dout.
  static constexpr int kDoutStages = kSplitsGradients ? 3 : 2;
  static constexpr int kQStages = kHasDqWarpgroup || kSplitsGradients ? 3 : 2;
  static constexpr int kDsStages = kSeparateDq ? 2 : 1;
  static constexpr int kKvStages = kHasDqWarpgroup ? 2 : 1;
  // Together the registers that the CTA starts with. The threads that accumulate and store dq need
  // more than 24, and the consumers with a head dimension of 64 more than 192.
  static constexpr int kWarpgroups = 1 + kConsumers + (kHasDqWarpgroup ? 1 : 0);
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kProducerRegisters = kHasDqWarpgroup ? 48 : kSplitsGradients ? 56 : 24;
  static constexpr int kConsumerRegisters = kHasDqWarpgroup ? 200 : kSplitsGradients ? 224 : 240;
  static constexpr int kDqRegisters = 64;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters +
                    (kHasDqWarpgroup ? kDqRegisters : 0) ==
                kWarpgroups * (kHasDqWarpgroup ? 128 : 168));
  // Whether the wgmma of dk come before those of dq, or after them, when they overlap the store of
  // dq. While one thread added dq, the second took 0.95 of the time for heads of 128 and a causal
  // sequence of 16384 tokens, and 1.05 for heads of 96 (H100). With two threads the backward took
  // the same time with both orders, to 3%.
  static constexpr bool kDkBeforeDq = kHeadDim < 128;
  static constexpr int kConsumerWarps = kConsumers * 4;
  // Every thread releases what threads read, because racecheck does not follow a warp's other lanes
  // to the one that arrives. That is as fast.
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  // Whether this kernel converts dq, with so many threads to store it, or a kernel after it. On an
  // H200 it is 4% faster here for 384 causal heads of 1024 queries and a head dimension of 64, and
  // 14% slower for 32 causal key heads of 4096 tokens, of 128, each of four heads.
  static constexpr bool kStoresDq = kHasDqWarpgroup;
  static constexpr int kDqStoreThreads = 64;
  // A tile of dq has blocks of 64 queries by 64 columns. A head dimension of 64 has two of queries,
  // handed on one by one; 96 and 128 have two of columns, handed on together.
  static constexpr int kDqBlockSize = 64 * 64;
  static constexpr int kDqBlocks = kBlockM * kColumns / kDqBlockSize;
  static constexpr int kDqParts = kHasDqWarpgroup ? 2 : 1;
  // Tiles of dq on their way to global memory; each stage has a thread that adds it.
  static constexpr int kDqStages = kHasDqWarpgroup || kSeparateDq ? 1 : 2;
  static constexpr int kDqWarps = kHasDqWarpgroup ? 4 : kConsumerWarps;  // that compute dq
  static constexpr int kDsWarps = kSeparateDq ? 4 : kConsumerWarps;      // that compute ds
  // That read ds in shared memory: without dq the consumer that did not compute it.
  static constexpr int kDsReaders = kSeparateDq ? 4 : kDqWarps;
  // Who releases K: the dq warpgroup; or, as for V, the thread of each consumer that has stored the
  // gradient which replaces it. With kSplitsGradients the one consumer that reads K, or V.
  static constexpr int kKReleases = kHasDqWarpgroup || kSplitsGradients ? 4 : kConsumers;
  static constexpr int kVReleases = kSplitsGradients ? 4 : kConsumers;
  // The elements of ds, p, and gradients in shared memory: see BackwardSmem::ds.
  static constexpr int kDsSize =
      kSplitsGradients ? kDsStages * kBlockN * kBlockM + kBlockN * (kColumns + kValueColumns)
                       : kDsStages * (kSeparateDq ? 2 : 1) * kBlockN * kBlockM;
  // Who reads a work tile: the consumers, the threads that accumulate dq, and those that compute
  // and store it.
  static constexpr int kWorkReaders = kConsumerThreads + (kSeparateDq ? 0 : kDqStages) +
                                      (kHasDqWarpgroup ? kWarpgroup + kDqStoreThreads : 0);
  // The gradient of a bias has a partial column sum of dq for every 64 queries.
  static constexpr bool kSumsBias = !kSeparateDq;
  static constexpr int kDqColumnSums = kBlockM / 64;
};

// A key tile of one head, and the query tiles that it visits.
struct BackwardWorkTile {
  int sequence, kv_head, key_tile;
  TileRange query_tiles;

  __device__ __forceinline__ bool is_valid() const { return key_tile >= 0; }
};

template <typename T, class Traits>
struct BackwardSmem {
  static constexpr int kColumns = Traits::kColumns;
  T k[Traits::kKvStages][Traits::kBlockN * kColumns];
  T v[Traits::kKvStages][Traits::kBlockN * Traits::kValueColumns];
  T q[Traits::kQStages][Traits::kBlockM * kColumns];
  T dout[Traits::kDoutStages][Traits::kBlockM * Traits::kValueColumns];
  // ds, and p behind it where the consumers share keys (kSeparateDq); stage after stage. With
  // kSplitsGradients p alone, and behind all stages dk and dv on their way out.
  T ds[Traits::kDsSize];
  // What is added to dq in global memory; or, where dq is converted here and this CTA adds last,
  // the sum of all others.
  float dq[Traits::kSeparateDq ? 1 : Traits::kDqStages * Traits::kDqBlocks]
          [Traits::kSeparateDq ? 4 : Traits::kDqBlockSize];
  T dq_store[Traits::kStoresDq ? Traits::kBlockM * kColumns : 8];
  alignas(16) float lse[Traits::kQStages][Traits::kBlockM];
  alignas(16) float delta[Traits::kDoutStages][Traits::kBlockM];
  Pipeline<Traits::kKvStages> k_pipeline, v_pipeline;
  Pipeline<Traits::kQStages> q_pipeline;        // with lse
  Pipeline<Traits::kDoutStages> dout_pipeline;  // with delta
  // From one consumer to the other, if they share keys.
  Pipeline<Traits::kDsStages> p_pipeline;
  // From the consumers to those who compute dq; or, without dq, from one consumer to the other.
  Pipeline<Traits::kSeparateDq ? Traits::kDsStages : Traits::kDqParts> ds_pipeline;
  // On to the thread that accumulates it: the parts of a stage, and stage after stage.
  Pipeline<Traits::kDqStages * Traits::kDqParts> dq_pipeline;
  Barrier dq_sum_full[Traits::kDqParts];  // the sum of all others has arrived
  Pipeline<1> dq_store_pipeline;          // the converted tile, to those who store it
  Pipeline<2> work_pipeline;              // one work tile ahead of the consumers
  BackwardWorkTile work[2];
  // Where consumers that share keys wait for one another. They run different code, and a named
  // barrier wants one instruction.
  Barrier consumers;

  // With kSplitsGradients.
  __device__ __forceinline__ T* dk_out() {
    return ds + Traits::kDsStages * Traits::kBlockN * Traits::kBlockM;
  }
  __device__ __forceinline__ T* dv_out() { return dk_out() + Traits::kBlockN * kColumns; }
};

struct BackwardParams {
  LocalMask mask;
  int heads, kv_heads;
  HeadOrder q_order;  // of q and dq
  int width;          // of v; and, unless a kernel of its own computes dq, of q
  // Of the gradients, and of the scores; with a softcap, of their tanh: the softcap.
  float scale, score_scale;
  Softcap softcap;
  // Key tiles below `split` add to dq from the last to the first, the others after them and
  // upwards.
  int split;
  float* lse;           // (batch, heads, padded queries), times log2(e); inf where no key is seen
  float* delta;         // the same shape; rowsum(dout * out)
  float* dq_accum;      // (batch, heads, query tiles) of tiles in the order of accumulators
  int* dq_semaphore;    // (batch, heads, query tiles): how often a tile of dq was added to
  int* tile_counter;    // the next ticket; with kSeparateDq, then that of the kernel for dq
  int tiles;            // as many tickets: a key tile of a head each
  bool from_last;       // the last head of the last sequence has the first tickets
  int heads_at_a_time;  // so many alternate
  SegmentParams segments;
  // Partial column sums for the gradient of a bias, or null. Of dq (batch, query tiles,
  // kDqColumnSums, heads, head dim); of dout (batch, query tiles, group, kv_heads, head dim), where
  // a group is the heads that share keys.
  float *dq_column_sums, *dout_column_sums;
};

// Named barriers of a CTA; 0 is __syncthreads.
struct BackwardNamedBarriers {
  static constexpr int kConsumers = 1;  // both consumers are done with K and V
  static constexpr int kEpilogue = 2;   // + consumer: its gradients are in shared memory
};

// The query tiles that a key tile visits, and the other way round.
template <bool kSegments, class Mask>
__device__ __forceinline__ TileRange visible_query_tiles(const BackwardParams& params,
                                                         const Mask& mask, int sequence,
                                                         int key_tile) {
  if constexpr (!kSegments) return mask.visible_query_tiles(key_tile);
  return params.segments.query_tiles[int64_t{sequence} * mask.key_tiles() + key_tile];
}
template <bool kSegments, class Mask>
__device__ __forceinline__ TileRange visible_key_tiles(const BackwardParams& params,
                                                       const Mask& mask, int sequence,
                                                       int query_tile) {
  if constexpr (!kSegments) return mask.visible_key_tiles(query_tile);
  return params.segments.key_tiles[int64_t{sequence} * mask.query_tiles() + query_tile];
}

// The first of a consumer's 64 keys of a tile.
template <class Traits>
__device__ __forceinline__ int consumer_first_key(const BackwardWorkTile& tile, int consumer) {
  return tile.key_tile * Traits::kBlockN + consumer * 64;
}

// Where, in a column block, a thread's row begins of the four matrices that stmatrix writes: those
// that its warp has of the first 16 columns of the first or second 64 rows.
__device__ __forceinline__ uint32_t stmatrix_offset(int half, int thread) {
  const int lane = thread % 32;
  return swizzled_offset(half * 64 + thread / 32 * 16 + lane % 16, lane / 16 * 8);
}

// The same of columns 8 `chunk` on, in a tile of kRows rows; `rows` is the address for chunk 0.
template <int kRows>
__device__ __forceinline__ uint32_t stmatrix_chunk(uint32_t rows, int chunk) {
  return (rows + chunk / 8 * kRows * kSwizzleRowBytes) ^ chunk % 8 * 16;
}

}  // namespace jaxllm::hopper
