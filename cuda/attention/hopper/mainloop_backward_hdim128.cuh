// The backward's mainloop for a head dimension of 96 or 128. A step is a tile of 64 queries: the
// accumulators of dk and dv take half of a thread's registers. Each consumer computes half of the
// columns of dq. The tensor cores have work while the threads compute and store:
//
//   threads         s -> p    dp -> ds, to shared memory         dq to shared memory
//   tensor cores    dp        dv += p dout                 dq    dk += ds q
//
// With kDkBeforeDq dk overlaps the wait for the other consumer's ds instead.
#pragma once

#include <cmath>

#include "attention/hopper/mainloop_backward.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

template <bool kSegments, bool kSoftcap, typename T, class Traits>
__device__ __forceinline__ void backward_mma_hdim128(BackwardSmem<T, Traits>& smem,
                                                     const BackwardParams& params,
                                                     const CUtensorMap& dk_map,
                                                     const CUtensorMap& dv_map, int consumer) {
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kColumnBlockBytesN = Traits::kBlockN * kSwizzleRowBytes;
  const TiledMask<kBlockM, Traits::kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = params.score_scale * float{M_LOG2E};

  // As left operands, this consumer's rows of K and V.
  const uint32_t my_rows = consumer * 64 * kSwizzleRowBytes;
  const uint64_t k_operand = k_major_descriptor(smem_address(smem.k[0]) + my_rows);
  const uint64_t v_operand = k_major_descriptor(smem_address(smem.v[0]) + my_rows);
  // dq = ds^T k, of which a consumer has a block of 64 columns.
  const uint64_t ds_operand = mn_major_descriptor(smem_address(smem.ds), kColumnBlockBytesN);
  const uint64_t k_mn_operand = mn_major_descriptor(
      smem_address(smem.k[0]) + consumer * kColumnBlockBytesN, kColumnBlockBytesN);
  const uint32_t ds_rows = smem_address(smem.ds) + stmatrix_offset(consumer, thread);

  PipelineState<1> kv_state;
  // Of Q, dout and dq. With two stages the stage is also the parity of a step, and so that of the
  // barriers of ds, which has one buffer.
  PipelineState<Traits::kDoutStages> state;
  static_assert(Traits::kDoutStages == 2 && Traits::kQStages == 2 && Traits::kDqStages == 2);
  float dk[Traits::kHeadDim / 2], dv[Traits::kHeadDim / 2];

  const auto start_dq = [&](float (&dq)[32]) {
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      const uint64_t offset = step * kMnMajorStepBytes >> 4;
      wgmma<T, Major::kMN, Major::kMN>(dq, ds_operand + offset, k_mn_operand + offset, step > 0);
    }
    warpgroup_commit_batch();
  };

  PipelineState<2> work_state;
  // Read here and at the end: in a loop's condition it makes the compiler keep descriptors in the
  // registers of each thread, with two more instructions for every wgmma.
  BackwardWorkTile tile = next_work(smem, work_state);
  while (tile.is_valid()) {
    const ScoreMask<Rows::kKeys, kSegments, Traits::kBlockM, Traits::kBlockN> score_mask(
        params.segments, mask, tile.sequence, consumer_first_key<Traits>(tile, consumer));
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (int j = 0; j < Traits::kHeadDim / 2; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    smem.v_pipeline.consumer_wait(kv_state);
    smem.k_pipeline.consumer_wait(kv_state);
    kv_state.advance();
    int query_tile = tile.query_tiles.begin;
    for (int step = 0; step < steps; ++step) {
      float s[kBlockM / 2], dp[kBlockM / 2], dq[32];
      uint32_t p_operand[kBlockM / 4], ds_left_operand[kBlockM / 4];
      const int stage = state.stage;
      smem.q_pipeline.consumer_wait(state);
      start_scores<Traits>(s, k_operand, smem.q[stage]);
      smem.dout_pipeline.consumer_wait(state);
      start_scores<Traits>(dp, v_operand, smem.dout[stage]);
      warpgroup_wait<1>(s);
      if constexpr (kSoftcap) cap_scores(s, params.softcap);
      score_mask.apply(s, query_tile, query_tile * kBlockM);
      exponentiate(s, scale_log2, smem.lse[stage]);
      pack_accumulator<T>(s, p_operand);
      start_gradient<Traits>(dv, p_operand, smem.dout[stage]);
      warpgroup_wait<1>(dp);
      smem.ds_pipeline.empty[0].wait(stage ^ 1);
      differentiate_softmax(s, dp, smem.delta[stage]);
      if constexpr (kSoftcap) differentiate_softcap(s, dp, scale_log2, smem.lse[stage]);
      pack_accumulator<T>(dp, ds_left_operand);
      store_left_operand<Traits>(ds_left_operand, ds_rows);
      fence_async_proxy();
      arrive_as_warp(smem.ds_pipeline.full[0]);
      if (Traits::kDkBeforeDq) start_gradient<Traits>(dk, ds_left_operand, smem.q[stage]);
      smem.ds_pipeline.full[0].wait(stage);
      if (Traits::kDkBeforeDq) warpgroup_wait<1>();  // of dv
      start_dq(dq);
      if (!Traits::kDkBeforeDq) start_gradient<Traits>(dk, ds_left_operand, smem.q[stage]);
      warpgroup_wait<Traits::kDkBeforeDq ? 0 : 1>(dq);
      smem.ds_pipeline.consumer_release(0);
      if (Traits::kDkBeforeDq) smem.q_pipeline.empty[stage].arrive();
      smem.dout_pipeline.empty[stage].arrive();
      smem.dq_pipeline.producer_acquire(state);
      store_dq_accumulator(dq, smem.dq[stage * Traits::kDqBlocks + consumer]);
      fence_async_proxy();
      smem.dq_pipeline.full[stage].arrive();
      state.advance();
      if (!Traits::kDkBeforeDq) {
        warpgroup_wait<0>();
        smem.q_pipeline.empty[stage].arrive();
      }
      if (++query_tile == tile.query_tiles.end) query_tile = tile.query_tiles.begin;
    }
    warpgroup_wait<0>(dk, dv);
    // Both consumers have read K and V, which the gradients replace.
    named_barrier_sync(BackwardNamedBarriers::kConsumers, Traits::kConsumers * kWarpgroup);
    store_gradient<Traits::kBlockN>(dk, params.scale, smem.k[0], consumer);
    store_gradient<Traits::kBlockN>(dv, 1.0f, smem.v[0], consumer);
    fence_async_proxy();
    named_barrier_sync(BackwardNamedBarriers::kEpilogue + consumer, kWarpgroup);
    if (thread == 0) {
      tma_store_gradients<Traits>(dk_map, smem.k[0], dv_map, smem.v[0], tile, consumer, mask.keys);
      tma_store_wait_read<0>();
      smem.k_pipeline.empty[0].arrive();
      smem.v_pipeline.empty[0].arrive();
    }
    tile = next_work(smem, work_state);
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
