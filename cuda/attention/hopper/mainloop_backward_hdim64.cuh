// The backward's mainloop for a head dimension of 64. Another warpgroup computes dq, so consumers
// wait neither for each other's ds nor for the accumulation of dq, and they have registers for
// scores that are computed ahead. On an H200, 384 causal heads of 1024 queries take 319 us, and 327
// us when each consumer computes half of dq.
//
// A step is a tile of 128 queries, taken in two halves. While the tensor cores compute dk of a half
// and s and dp of the next, the threads compute the exponentials of its scores:
//
//   start_dv:  start dp         wait for s      s -> p      start dv                wait for dp, dv
//   start_dk:  start next s                     dp -> ds    ds to shared memory     start dk
//
// Under a causal mask, the first half of the queries on the diagonal does not see a tile's last 64
// keys: their consumer begins with the second half.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/hopper/mainloop_backward.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

template <bool kSegments, bool kSoftcap, typename T, class Traits>
__device__ __forceinline__ void backward_mma_hdim64(BackwardSmem<T, Traits>& smem,
                                                    const BackwardParams& params,
                                                    const CUtensorMap& dk_map,
                                                    const CUtensorMap& dv_map, int consumer) {
  constexpr int kHalf = Traits::kBlockM / 2;          // in queries
  constexpr int kHalfTile = kHalf * kSwizzleColumns;  // in elements of q or dout
  constexpr int kColumnBlockBytesN = Traits::kBlockN * kSwizzleRowBytes;
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = params.score_scale * float{M_LOG2E};

  // As left operands, this consumer's rows of the first stage of K and of V.
  const uint32_t my_rows = consumer * 64 * kSwizzleRowBytes;
  const uint64_t first_k_rows = k_major_descriptor(smem_address(smem.k[0]) + my_rows);
  const uint64_t first_v_rows = k_major_descriptor(smem_address(smem.v[0]) + my_rows);
  constexpr uint32_t kKeyStage = sizeof(smem.k[0]) >> 4;  // in units of descriptors
  const uint32_t ds_rows = smem_address(smem.ds) + stmatrix_offset(consumer, thread);

  PipelineState<Traits::kKvStages> kv_state;
  PipelineState<Traits::kQStages> q_state;
  // With two stages the stage is also the parity of a step, and so that of the barriers of ds.
  PipelineState<Traits::kDoutStages> state;
  static_assert(Traits::kDoutStages == 2);
  // The scores of both halves: one half is p already while the tensor cores compute the other.
  float s[2][32], dp[32], dk[32], dv[32];
  uint32_t p_operand[16], ds_left_operand[16];

  bool has_stored = false;
  // Before the next tile's ds overwrites what is stored of this one.
  const auto wait_for_stores = [&](int key_stage) {
    if (thread == 0) {
      tma_store_wait_read<0>();
      if (has_stored) smem.v_pipeline.empty[key_stage ^ 1].arrive();
    }
    named_barrier_sync(BackwardNamedBarriers::kEpilogue + consumer, kWarpgroup);
  };
  // dv replaces this consumer's rows of V, and dk those of the first half of ds, which are free
  // before the last dq is computed.
  const auto store_gradients = [&](const BackwardWorkTile& tile, int key_stage) {
    store_gradient<Traits::kBlockN>(dv, 1.0f, smem.v[key_stage], consumer);
    smem.ds_pipeline.empty[0].wait(state.stage ^ 1);
    store_gradient<Traits::kBlockN>(dk, params.scale, smem.ds, consumer);
    fence_async_proxy();
    named_barrier_sync(BackwardNamedBarriers::kEpilogue + consumer, kWarpgroup);
    has_stored = true;
    if (thread == 0) {
      tma_store_gradients<Traits>(dk_map, smem.ds, dv_map, smem.v[key_stage], tile, consumer,
                                  mask.keys);
    }
  };

  PipelineState<2> work_state;
  // Whether the last step of the tile before has computed the scores of this tile's first half.
  bool has_scores = false;
  BackwardWorkTile tile = next_work(smem, work_state), next;
  while (tile.is_valid()) {
    const ScoreMask<Rows::kKeys, kSegments, Traits::kBlockM, Traits::kBlockN> score_mask(
        params.segments, mask, tile.sequence, consumer_first_key<Traits>(tile, consumer));
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (int j = 0; j < 32; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    const int key_stage = kv_state.stage;
    const uint64_t k_rows = first_k_rows + key_stage * kKeyStage;
    const uint64_t v_rows = first_v_rows + key_stage * kKeyStage;
    smem.v_pipeline.consumer_wait(kv_state);
    const bool begins_halved = begins_with_second_half<Traits>(mask, tile, consumer);
    int query_tile = tile.query_tiles.begin;
    if (!has_scores) {
      smem.k_pipeline.consumer_wait(kv_state);
      if (steps > 0) {
        smem.q_pipeline.consumer_wait(q_state);
        start_scores<Traits>(s[0], k_rows, smem.q[q_state.stage] + begins_halved * kHalfTile);
        warpgroup_wait<0>(s[0]);
        has_scores = true;
      }
    }

    // dv += p dout of a half; leaves its dp. `pending` counts the wgmma groups committed since its
    // scores; -1 if the scores are complete.
    const auto start_dv = [&](auto pending, float (&s)[32], int q_stage, int half) {
      constexpr int kPending = decltype(pending)::value;
      const T* const dout = smem.dout[state.stage] + half * kHalfTile;
      start_scores<Traits>(dp, v_rows, dout);
      if constexpr (kPending >= 0) warpgroup_wait<kPending + 1>(s);
      if constexpr (kSoftcap) cap_scores(s, params.softcap);
      score_mask.apply(s, query_tile, query_tile * Traits::kBlockM + half * kHalf);
      exponentiate(s, scale_log2, smem.lse[q_stage] + half * kHalf);
      warpgroup_fence_operand(s);
      pack_accumulator<T>(s, p_operand);
      start_gradient<Traits>(dv, p_operand, dout);
      smem.ds_pipeline.empty[half].wait(state.stage ^ 1);
      warpgroup_wait<0>(dp);
    };
    // dk += ds q of a half; hands its ds to the dq warpgroup.
    const auto start_dk = [&](const float (&p)[32], int q_stage, int half, bool is_first) {
      differentiate_softmax(p, dp, smem.delta[state.stage] + half * kHalf);
      if constexpr (kSoftcap) {
        differentiate_softcap(p, dp, scale_log2, smem.lse[q_stage] + half * kHalf);
      }
      pack_accumulator<T>(dp, ds_left_operand);
      if (is_first) wait_for_stores(key_stage);
      store_left_operand<Traits>(ds_left_operand, ds_rows + half * kColumnBlockBytesN);
      fence_async_proxy();
      arrive_as_warp(smem.ds_pipeline.full[half]);
      start_gradient<Traits>(dk, ds_left_operand, smem.q[q_stage] + half * kHalfTile);
    };
    // Goes on from p of a step's first half to p of the next step's, if the tile has one.
    const auto run_step = [&](auto halved, auto last, bool is_first) {
      constexpr bool kHalved = decltype(halved)::value, kLast = decltype(last)::value;
      const int q_stage = q_state.stage;
      q_state.advance();
      // The keys of the scores that are computed ahead.
      uint64_t next_k_rows = k_rows;
      bool is_next_halved = begins_halved && query_tile + 1 == tile.query_tiles.end;
      if constexpr (kLast) {
        next = next_work(smem, work_state);
        kv_state.advance();
        next_k_rows = first_k_rows + kv_state.stage * kKeyStage;
        has_scores = next.is_valid() && next.query_tiles.size() > 0;
        is_next_halved = has_scores && begins_with_second_half<Traits>(mask, next, consumer);
      }
      if constexpr (kHalved) {
        smem.ds_pipeline.empty[0].wait(state.stage ^ 1);
        arrive_as_warp(smem.ds_pipeline.full[0]);
      } else {
        start_scores<Traits>(s[1], k_rows, smem.q[q_stage] + kHalfTile);
        start_dk(s[0], q_stage, 0, is_first);
        start_dv(std::integral_constant<int, 1>{}, s[1], q_stage, 1);
      }
      // After the very last step nobody reads the scores, but a branch around a wgmma costs more.
      if (!kLast || has_scores) {
        if constexpr (kLast) smem.k_pipeline.consumer_wait(kv_state);
        smem.q_pipeline.consumer_wait(q_state);
      }
      if constexpr (kHalved) start_dk(s[0], q_stage, 1, is_first);
      start_scores<Traits>(s[0], next_k_rows, smem.q[q_state.stage] + is_next_halved * kHalfTile);
      if constexpr (!kHalved) start_dk(s[1], q_stage, 1, false);
      const int stage = state.stage;
      state.advance();
      if (++query_tile == tile.query_tiles.end) query_tile = tile.query_tiles.begin;
      if constexpr (kLast) {
        warpgroup_wait<0>(s[0], dk, dv);
      } else {
        smem.dout_pipeline.consumer_wait(state);
        start_dv(std::integral_constant<int, kHalved ? 0 : 1>{}, s[0], q_state.stage,
                 is_next_halved);
      }
      smem.q_pipeline.empty[q_stage].arrive();
      smem.dout_pipeline.empty[stage].arrive();
    };
    if (steps > 0) {
      constexpr std::true_type yes;
      constexpr std::false_type no;
      smem.dout_pipeline.consumer_wait(state);
      start_dv(std::integral_constant<int, -1>{}, s[0], q_state.stage, begins_halved);
      for (int step = 0; step < steps - 1; ++step) {
        if (begins_halved && query_tile == tile.query_tiles.begin) {
          run_step(yes, no, step == 0);
        } else {
          run_step(no, no, step == 0);
        }
      }
      if (begins_halved && query_tile == tile.query_tiles.begin) {
        run_step(yes, yes, steps == 1);
      } else {
        run_step(no, yes, steps == 1);
      }
    } else {
      wait_for_stores(key_stage);
    }
    store_gradients(tile, key_stage);
    if (steps == 0) {
      kv_state.advance();
      next = next_work(smem, work_state);
    }
    tile = next;
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
