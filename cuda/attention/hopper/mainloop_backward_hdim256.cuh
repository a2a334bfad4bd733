// The backward's mainloop for a head dimension of 192 or 256. It computes dk and dv; a kernel of
// its own computes dq (kernel_dq.cuh). dk and dv of 64 keys take half of the registers of both
// consumers, so these share the keys: consumer 0 has the first 128 columns of the gradients,
// consumer 1 the others. Each computes one of the two matrices of a step of 64 queries, and hands
// it to the other one in shared memory, rounded:
//
//   consumer 0    s -> p  ----.                   dv += p dout    dk += ds q    s of the next step
//   consumer 1    dp      --> ds, with p  ----->  dv += p dout    dk += ds q    dp of the next step
//
// All of these have two stages. The wgmma of the next step are started behind those of dv and dk,
// which are released as they end: so Q and dout arrive a step ahead.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/hopper/mainloop_backward.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// Stores the gradients of a work tile, of which this consumer has its columns.
template <int kConsumer, typename T, class Traits, int kSize>
__device__ __forceinline__ void store_shared_key_gradients(
    BackwardSmem<T, Traits>& smem, const BackwardParams& params, const CUtensorMap& gradient_map,
    const BackwardWorkTile& tile, const float (&dk)[kSize], const float (&dv)[kSize]) {
  constexpr int kBlockN = Traits::kBlockN, kFirstBlock = 2 * kConsumer;
  const auto wait_for_both = [&](uint32_t parity) {
    arrive_as_warp(smem.consumers);
    smem.consumers.wait(parity);
  };
  wait_for_both(0);  // until they have read K and V, which the gradients replace
  store_gradient<Traits::kBlockN>(dk, params.scale, smem.k[0], /*half=*/0, kFirstBlock * 8);
  store_gradient<Traits::kBlockN>(dv, 1.0f, smem.v[0], /*half=*/0, kFirstBlock * 8);
  fence_async_proxy();
  wait_for_both(1);
  if (threadIdx.x % kWarpgroup == 0) {  // consumer 0 stores dk, and consumer 1 dv
    const T* const gradient = kConsumer == 0 ? smem.k[0] : smem.v[0];
    for (int block = 0; block < Traits::kColumnBlocks; ++block) {
      tma_store_4d(gradient_map, gradient + block * kBlockN * kSwizzleColumns,
                   {block * kSwizzleColumns, tile.kv_head, tile.key_tile * kBlockN, tile.sequence});
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    smem.k_pipeline.empty[0].arrive();
    smem.v_pipeline.empty[0].arrive();
  }
}

template <int kConsumer, bool kSegments, bool kSoftcap, typename T, class Traits>
__device__ __forceinline__ void backward_mma_hdim256(BackwardSmem<T, Traits>& smem,
                                                     const BackwardParams& params,
                                                     const CUtensorMap& gradient_map) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kFirstBlock = 2 * kConsumer;  // of the consumer's columns
  constexpr int kOwnColumns = kConsumer == 0 ? 128 : Traits::kHeadDim - 128;
  constexpr int kOwnOffset = kFirstBlock * kBlockM * kSwizzleColumns;
  constexpr uint32_t kTileBytes = kBlockN * kBlockM * sizeof(T);  // of ds or p
  const TiledMask<kBlockM, kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = params.score_scale * float{M_LOG2E};

  // The left operand of this consumer's scores: K, or V.
  const uint64_t score_operand =
      k_major_descriptor(smem_address(kConsumer == 0 ? smem.k[0] : smem.v[0]));
  // A stage has ds, and p behind it.
  const uint64_t ds_operand = k_major_descriptor(smem_address(smem.ds));
  const uint32_t ds_rows = smem_address(smem.ds) + stmatrix_offset(0, thread);
  const uint32_t p_rows = ds_rows + kTileBytes;

  PipelineState<1> kv_state;
  // Of Q, dout, p and ds alike: each has a stage for a step.
  PipelineState<2> state;
  static_assert(Traits::kQStages == 2 && Traits::kDoutStages == 2 && Traits::kDsStages == 2);
  float dk[kOwnColumns / 2], dv[kOwnColumns / 2];
  float scores[kBlockM / 2];  // s or dp

  // s = k q^T or dp = v dout^T.
  const auto start_own_scores = [&](const PipelineState<2>& at) {
    if constexpr (kConsumer == 0) {
      smem.q_pipeline.consumer_wait(at);
      start_scores<Traits>(scores, score_operand, smem.q[at.stage]);
    } else {
      smem.dout_pipeline.consumer_wait(at);
      start_scores<Traits>(scores, score_operand, smem.dout[at.stage]);
    }
  };

  PipelineState<2> work_state;
  BackwardWorkTile tile = next_work(smem, work_state);
  while (tile.is_valid()) {
    const ScoreMask<Rows::kKeys, kSegments, kBlockM, kBlockN> score_mask(
        params.segments, mask, tile.sequence, tile.key_tile * kBlockN);
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (int j = 0; j < kOwnColumns / 2; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    smem.v_pipeline.consumer_wait(kv_state);
    smem.k_pipeline.consumer_wait(kv_state);
    kv_state.advance();
    int query_tile = tile.query_tiles.begin;
    const auto run_step = [&](auto last) {
      constexpr bool kLast = decltype(last)::value;
      const int stage = state.stage;
      const uint32_t ds_stage = stage * 2 * kTileBytes;
      const T* const own_q = smem.q[stage] + kOwnOffset;
      const T* const own_dout = smem.dout[stage] + kOwnOffset;
      uint32_t p_words[kBlockM / 4];
      [[maybe_unused]] uint32_t ds_words[kBlockM / 4];
      if constexpr (kConsumer == 0) {
        warpgroup_wait<0>(scores);
        [[maybe_unused]] float slope[kBlockM / 2];  // the derivative of the softcap
        if constexpr (kSoftcap) {
          cap_scores(scores, params.softcap);
#pragma unroll
          for (int j = 0; j < kBlockM / 2; ++j) slope[j] = fmaf(-scores[j], scores[j], 1.0f);
        }
        score_mask.apply(scores, query_tile, query_tile * kBlockM);
        exponentiate(scores, scale_log2, smem.lse[stage]);
        pack_accumulator<T>(scores, p_words);
        smem.p_pipeline.producer_acquire(state);
        store_left_operand<Traits>(p_words, p_rows + ds_stage);
        if constexpr (kSoftcap) {
          // From a rounded p the derivative would not follow: its share of p goes where ds will be.
#pragma unroll
          for (int j = 0; j < kBlockM / 2; ++j) scores[j] *= slope[j];
          uint32_t p_slope_words[kBlockM / 4];
          pack_accumulator<T>(scores, p_slope_words);
          smem.ds_pipeline.producer_acquire(state);
          store_left_operand<Traits>(p_slope_words, ds_rows + ds_stage);
        }
        arrive_as_warp(smem.p_pipeline.full[stage]);
        smem.dout_pipeline.consumer_wait(state);
        start_gradient<Traits>(dv, p_words, own_dout);
        smem.ds_pipeline.consumer_wait(state);
        start_gradient<Traits>(dk, ds_operand + (ds_stage >> 4), own_q);
      } else {
        smem.p_pipeline.consumer_wait(state);
        load_left_operand<Traits>(p_words, p_rows + ds_stage);
        // p, times the derivative of a softcap.
        uint32_t p_slope_words[kBlockM / 4];
        if constexpr (kSoftcap) load_left_operand<Traits>(p_slope_words, ds_rows + ds_stage);
        smem.p_pipeline.consumer_release(stage);
        float p[kBlockM / 2];
#pragma unroll
        for (int j = 0; j < kBlockM / 4; ++j) {
          const float2 pair = unpack_pair<T>(kSoftcap ? p_slope_words[j] : p_words[j]);
          p[2 * j] = pair.x, p[2 * j + 1] = pair.y;
        }
        warpgroup_wait<0>(scores);
        differentiate_softmax(p, scores, smem.delta[stage]);
        smem.q_pipeline.consumer_wait(state);
        pack_accumulator<T>(scores, ds_words);
        smem.ds_pipeline.producer_acquire(state);
        store_left_operand<Traits>(ds_words, ds_rows + ds_stage);
        fence_async_proxy();
        arrive_as_warp(smem.ds_pipeline.full[stage]);
        start_gradient<Traits>(dv, p_words, own_dout);
        start_gradient<Traits>(dk, ds_words, own_q);
      }
      state.advance();
      constexpr int kAhead = kLast ? 0 : 1;  // wgmma of the next step
      if constexpr (!kLast) start_own_scores(state);
      warpgroup_wait<1 + kAhead>();  // for dv
      smem.dout_pipeline.empty[stage].arrive();
      warpgroup_wait<kAhead>();  // for dk
      smem.q_pipeline.empty[stage].arrive();
      if constexpr (kConsumer == 0) smem.ds_pipeline.consumer_release(stage);
      if (++query_tile == tile.query_tiles.end) query_tile = tile.query_tiles.begin;
    };
    if (steps > 0) {
      start_own_scores(state);
      for (int step = 0; step < steps - 1; ++step) run_step(std::false_type{});
      run_step(std::true_type{});
    }
    warpgroup_wait<0>(dk, dv);
    store_shared_key_gradients<kConsumer>(smem, params, gradient_map, tile, dk, dv);
    tile = next_work(smem, work_state);
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
