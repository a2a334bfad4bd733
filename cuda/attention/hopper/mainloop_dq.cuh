// The mainloop of the kernel for dq: the producer loads Q, dout, K and V, and each consumer
// computes 64 rows of
//
//   s = q k^T       p = 2^(c s - lse)
//   dp = dout v^T   ds = p (dp - delta)       dq += ds k
//
// The wgmma of a consumer come in this order, so that s of the next tile is there when the
// exponentials of this one are done, and those overlap dq and dp:
//
//   threads         s0 -> p0        dp0 -> ds0      s1 -> p1        dp1 -> ds1
//   tensor cores    dp0                      s1     dq0  dp1                 s2   dq1  dp2
#pragma once

#include <cmath>

#include "attention/hopper/dq_traits.cuh"
#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/mainloop_forward.cuh"

namespace jaxllm::hopper {

// The producer's part: one thread.
template <typename T, class Traits>
struct DqProducer {
  DqSmem<T, Traits>& smem;
  const CUtensorMap &q_map, &k_map, &v_map, &dout_map;
  PipelineState<1> q_state = {}, dout_state = {};
  PipelineState<Traits::kKStages> k_state = {};
  PipelineState<Traits::kVStages> v_state = {};

  // A tile of K or of V, which has kSize elements.
  template <int kStages, int kSize>
  __device__ __forceinline__ static void load_kv(Pipeline<kStages>& pipeline,
                                                 PipelineState<kStages>& state, T (*stages)[kSize],
                                                 const CUtensorMap& map, int kv_head, int key_tile,
                                                 int sequence) {
    const Barrier& full = pipeline.producer_acquire(state, kSize * sizeof(T));
#pragma unroll 1
    for (int block = 0; block < kSize / (Traits::kBlockN * kSwizzleColumns); ++block) {
      tma_load_4d(stages[state.stage] + block * Traits::kBlockN * kSwizzleColumns, map,
                  {block * kSwizzleColumns, kv_head, key_tile * Traits::kBlockN, sequence}, full);
    }
    state.advance();
  }

  // Both consumers' rows of Q or dout, where the head stands at `place`, of which `full` expects
  // the bytes.
  template <int kSize>
  __device__ __forceinline__ static void load_queries(T (*rows)[kSize], const CUtensorMap& map,
                                                      const ForwardWorkTile& work, int place,
                                                      const Barrier& full) {
#pragma unroll 1
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
#pragma unroll 1
      for (int block = 0; block < kSize / (64 * kSwizzleColumns); ++block) {
        tma_load_4d(rows[consumer] + block * 64 * kSwizzleColumns, map,
                    {block * kSwizzleColumns, place,
                     work.query_tile * Traits::kBlockM + consumer * 64, work.sequence},
                    full);
      }
    }
  }

  // Loads what a work tile needs, in the order in which the tile before releases it: Q last, whose
  // place dq takes.
  __device__ __forceinline__ void load(const ForwardWorkTile& work, const TileRange& key_tiles,
                                       int kv_head, int q_place) {
    const auto load_key_tile = [&](int tile) {
      load_kv(smem.k_pipeline, k_state, smem.k, k_map, kv_head, tile, work.sequence);
      load_kv(smem.v_pipeline, v_state, smem.v, v_map, kv_head, tile, work.sequence);
    };
    if (key_tiles.size() > 0) load_key_tile(key_tiles.end - 1);
    load_queries(smem.dout, dout_map, work, work.head,
                 smem.dout_pipeline.producer_acquire(dout_state, sizeof(smem.dout)));
    dout_state.advance();
    smem.q_pipeline.producer_acquire(q_state);
    smem.work = work;
    smem.key_tiles = key_tiles;
    smem.q_pipeline.full[0].arrive_and_expect(sizeof(smem.q));
    load_queries(smem.q, q_map, work, q_place, smem.q_pipeline.full[0]);
    q_state.advance();
#pragma unroll 1
    for (int tile = key_tiles.end - 2; tile >= key_tiles.begin; --tile) load_key_tile(tile);
  }

  // Tells the consumers that there is no more work.
  __device__ __forceinline__ void load_tail() {
    smem.q_pipeline.producer_acquire(q_state);
    smem.work.query_tile = -1;
    smem.q_pipeline.full[0].arrive();
  }
};

// A consumer warpgroup's part.
template <typename T, class Traits, bool kSegments, bool kSoftcap>
class DqConsumer {
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kColumnBlockBytes = kBlockN * kSwizzleRowBytes;

 public:
  using Smem = DqSmem<T, Traits>;
  using Mask = TiledMask<Traits::kBlockM, kBlockN>;

  __device__ __forceinline__ DqConsumer(Smem& smem, const DqParams& params, int consumer)
      : smem_(smem),
        params_(params),
        q_operand_(k_major_descriptor(smem_address(smem.q[consumer]))),
        dout_operand_(k_major_descriptor(smem_address(smem.dout[consumer]))) {}

  // dq of the consumer's 64 queries, not yet scaled. `key_tiles` is what the CTA visits.
  __device__ __forceinline__ void mma(const Mask& mask, const ForwardWorkTile& work,
                                      const TileRange& key_tiles, int first_query,
                                      float (&dq)[kHeadDim / 2]) {
    const TileRange own = consumer_key_tiles(mask, key_tiles, first_query);
    const ScoreMask<Rows::kQueries, kSegments, Traits::kBlockM, kBlockN> score_mask(
        params_.segments, mask, work.sequence, first_query);
    const float scale_log2 = params_.score_scale * float{M_LOG2E};
    float s[kBlockN / 2], dp[kBlockN / 2];
    uint32_t ds[kBlockN / 4];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.0f;
    warpgroup_fence_operand(dq);

    for (int i = own.end; i < key_tiles.end; ++i) skip_key_tile();
    if (own.size() == 0) {
      smem_.dout_pipeline.consumer_wait(dout_state_);
      smem_.dout_pipeline.consumer_release(0);
    } else {
      // There are lse and delta of all 64 queries: these begin before the last query.
      const int64_t row =
          (int64_t{work.sequence} * params_.heads + work.head) * params_.padded_queries +
          first_query + accumulator_row(threadIdx.x % kWarpgroup);
      const float lse[2] = {__ldcg(params_.lse + row), __ldcg(params_.lse + row + 8)};
      const float delta[2] = {__ldcg(params_.delta + row), __ldcg(params_.delta + row + 8)};
      int key_tile = own.end - 1;
      const auto exponentiate_tile = [&] {
        if constexpr (kSoftcap) cap_scores(s, params_.softcap);
        score_mask.apply(s, key_tile, key_tile * kBlockN);
        exponentiate_rows(s, scale_log2, lse);
        warpgroup_fence_operand(s);
      };
      start_s(s);
      smem_.dout_pipeline.consumer_wait(dout_state_);
      start_dp(dp);
      warpgroup_wait<1>(s);
      exponentiate_tile();
      // As in the forward the loop ends between the exponentials and the wait for the wgmma beside
      // them: within one basic block the assembler would put the wait first.
      for (;;) {
        warpgroup_wait<0>(dq, dp, s);
        release_v();
        if (key_tile < own.end - 1) release_k();
        float unrounded[kBlockN / 2];
        differentiate_softmax_rows(s, dp, delta, unrounded);
        if constexpr (kSoftcap) differentiate_softcap_rows(s, unrounded, scale_log2, lse);
        pack_accumulator<T>(unrounded, ds);
        if (key_tile == own.begin) break;

        --key_tile;
        start_s(s);
        start_dq(ds, dq);
        start_dp(dp);
        warpgroup_wait<2>(s);
        exponentiate_tile();
      }
      smem_.dout_pipeline.consumer_release(0);
      start_dq(ds, dq);
      warpgroup_wait<0>(dq);
      release_k();
    }
    dout_state_.advance();
    for (int i = own.begin; i > key_tiles.begin; --i) skip_key_tile();
  }

 private:
  // left right^T, both in shared memory and kDepth wide; `left` has 64 rows.
  template <int kDepth>
  __device__ __forceinline__ static void start_product(float (&result)[kBlockN / 2], uint64_t left,
                                                       const T* right) {
    const uint64_t columns = k_major_descriptor(smem_address(right));
    asm volatile("" : "+l"(left));
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      const int within = step % 4 * kKMajorStepBytes;
      wgmma<T, Major::kK, Major::kK>(
          result, left + ((step / 4 * 64 * kSwizzleRowBytes + within) >> 4),
          columns + ((step / 4 * kColumnBlockBytes + within) >> 4), step > 0);
    }
    warpgroup_commit_batch();
  }
  // s = q k^T of the next stage of K.
  __device__ __forceinline__ void start_s(float (&s)[kBlockN / 2]) {
    smem_.k_pipeline.consumer_wait(k_state_);
    start_product<kHeadDim>(s, q_operand_, smem_.k[k_state_.stage]);
    k_state_.advance();
  }
  // dp = dout v^T of the next stage of V, which release_v() goes on from.
  __device__ __forceinline__ void start_dp(float (&dp)[kBlockN / 2]) {
    smem_.v_pipeline.consumer_wait(v_state_);
    start_product<kValueDim>(dp, dout_operand_, smem_.v[v_state_.stage]);
  }
  // dq += ds k of the first stage of K that is not released.
  __device__ __forceinline__ void start_dq(const uint32_t (&ds)[kBlockN / 4],
                                           float (&dq)[kHeadDim / 2]) {
    const uint64_t k_operand =
        mn_major_descriptor(smem_address(smem_.k[k_release_.stage]), kColumnBlockBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      wgmma<T, Major::kMN>(dq, ds + 4 * step, k_operand + (step * kMnMajorStepBytes >> 4));
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void release_k() {
    smem_.k_pipeline.consumer_release(k_release_.stage);
    k_release_.advance();
  }
  __device__ __forceinline__ void release_v() {
    smem_.v_pipeline.consumer_release(v_state_.stage);
    v_state_.advance();
  }
  // A key tile that only the other consumer's queries see.
  __device__ __forceinline__ void skip_key_tile() {
    smem_.k_pipeline.consumer_wait(k_state_);
    k_state_.advance();
    release_k();
    smem_.v_pipeline.consumer_wait(v_state_);
    release_v();
  }

  Smem& smem_;
  const DqParams& params_;
  const uint64_t q_operand_, dout_operand_;
  PipelineState<Traits::kKStages> k_state_, k_release_;
  PipelineState<Traits::kVStages> v_state_;
  PipelineState<1> dout_state_;
};

// Scales a consumer's dq, stores it over its rows of Q, and releases Q.
template <typename T, class Traits>
__device__ __forceinline__ void store_dq_rows(DqSmem<T, Traits>& smem, const DqParams& params,
                                              const CUtensorMap& dq_map,
                                              const ForwardWorkTile& work, int first_query,
                                              int consumer,
                                              const float (&dq)[Traits::kHeadDim / 2]) {
  const int barrier = DqNamedBarriers::kEpilogue + consumer;
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  // All warps have read Q.
  named_barrier_sync(barrier, kWarpgroup);
  store_gradient<64>(dq, params.scale, smem.q[consumer], /*half=*/0);
  fence_async_proxy();
  named_barrier_sync(barrier, kWarpgroup);
  if (is_first) {
    if (first_query < params.mask.queries) {
      for (int block = 0; block < Traits::kColumnBlocks; ++block) {
        tma_store_4d(
            dq_map, smem.q[consumer] + block * 64 * kSwizzleColumns,
            {block * kSwizzleColumns, params.q_order.place(work.head), first_query, work.sequence});
      }
      tma_store_commit();
    }
    tma_store_wait_read<0>();
  }
  smem.q_pipeline.empty[0].arrive();
}

}  // namespace jaxllm::hopper
