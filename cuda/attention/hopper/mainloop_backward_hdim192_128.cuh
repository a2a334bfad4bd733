// The backward's mainloops for queries and keys of 192 columns and values of 128. They compute dk
// and dv; a kernel of its own computes dq (kernel_dq.cuh). The consumers share 64 keys, and each
// has a gradient to itself. A step is a tile of 64 queries:
//
//   consumer 0    s -> p  ---.                  dv += p dout    s of the next step
//   consumer 1    dp         '-> ds, with p     dk += ds q      dp of the next step
//
// So p and ds are left operands in registers, p goes one way through shared memory, rounded, and ds
// never does. s and dk multiply 192 columns, dp and dv 128: both consumers have the same work.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/hopper/mainloop_backward.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// Stores a gradient, whose place in shared memory is the consumer's own.
template <int kConsumer, class Traits, typename T, int kSize>
__device__ __forceinline__ void store_own_gradient(const float (&gradient)[kSize], float factor,
                                                   T* place, const CUtensorMap& map,
                                                   const BackwardWorkTile& tile) {
  constexpr int kBarrier = BackwardNamedBarriers::kEpilogue + kConsumer;
  constexpr int kBlockN = Traits::kBlockN;
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  if (is_first) tma_store_wait_read<0>();  // the earlier tile's gradient has left
  named_barrier_sync(kBarrier, kWarpgroup);
  store_gradient<kBlockN>(gradient, factor, place, /*half=*/0);
  fence_async_proxy();
  named_barrier_sync(kBarrier, kWarpgroup);
  if (!is_first) return;
  for (int block = 0; block < kSize * 2 / kSwizzleColumns; ++block) {
    tma_store_4d(map, place + block * kBlockN * kSwizzleColumns,
                 {block * kSwizzleColumns, tile.kv_head, tile.key_tile * kBlockN, tile.sequence});
  }
  tma_store_commit();
}

// Consumer 0.
template <bool kSegments, typename T, class Traits>
__device__ __forceinline__ void backward_mma_dv(BackwardSmem<T, Traits>& smem,
                                                const BackwardParams& params,
                                                const CUtensorMap& dv_map) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr uint32_t kTileBytes = kBlockN * kBlockM * sizeof(T);  // of p
  const TiledMask<kBlockM, kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const float scale_log2 = params.score_scale * float{M_LOG2E};
  const uint64_t k_operand = k_major_descriptor(smem_address(smem.k[0]));
  const uint32_t p_rows = smem_address(smem.ds) + stmatrix_offset(0, threadIdx.x % kWarpgroup);

  PipelineState<1> k_state;
  PipelineState<Traits::kQStages> q_state;
  PipelineState<Traits::kDoutStages> dout_state;
  PipelineState<Traits::kDsStages> p_state;
  float dv[Traits::kValueDim / 2], s[kBlockM / 2];

  const auto start_s = [&] {
    smem.q_pipeline.consumer_wait(q_state);
    start_scores<Traits>(s, k_operand, smem.q[q_state.stage]);
  };

  PipelineState<2> work_state;
  BackwardWorkTile tile = next_work(smem, work_state);
  while (tile.is_valid()) {
    const ScoreMask<Rows::kKeys, kSegments, kBlockM, kBlockN> score_mask(
        params.segments, mask, tile.sequence, tile.key_tile * kBlockN);
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (float& x : dv) x = 0.0f;
    warpgroup_fence_operand(dv);

    smem.k_pipeline.consumer_wait(k_state);
    k_state.advance();
    int query_tile = tile.query_tiles.begin;
    const auto run_step = [&](auto last) {
      constexpr bool kLast = decltype(last)::value;
      const int q_stage = q_state.stage, dout_stage = dout_state.stage;
      uint32_t p_words[kBlockM / 4];
      warpgroup_wait<0>(s);
      if constexpr (kLast) smem.k_pipeline.consumer_release(0);
      score_mask.apply(s, query_tile, query_tile * kBlockM);
      exponentiate(s, scale_log2, smem.lse[q_stage]);
      smem.q_pipeline.empty[q_stage].arrive();
      q_state.advance();
      pack_accumulator<T>(s, p_words);
      smem.p_pipeline.producer_acquire(p_state);
      store_left_operand<Traits>(p_words, p_rows + p_state.stage * kTileBytes);
      arrive_as_warp(smem.p_pipeline.full[p_state.stage]);
      p_state.advance();
      smem.dout_pipeline.consumer_wait(dout_state);
      start_gradient<Traits>(dv, p_words, smem.dout[dout_stage]);
      dout_state.advance();
      if constexpr (!kLast) start_s();
      warpgroup_wait<kLast ? 0 : 1>();  // for dv
      smem.dout_pipeline.empty[dout_stage].arrive();
      if (++query_tile == tile.query_tiles.end) query_tile = tile.query_tiles.begin;
    };
    if (steps > 0) {
      start_s();
      for (int step = 0; step < steps - 1; ++step) run_step(std::false_type{});
      run_step(std::true_type{});
    } else {
      smem.k_pipeline.consumer_release(0);
    }
    warpgroup_wait<0>(dv);
    store_own_gradient<0, Traits>(dv, 1.0f, smem.dv_out(), dv_map, tile);
    tile = next_work(smem, work_state);
  }
  if (threadIdx.x % kWarpgroup == 0) tma_store_wait<0>();
}

// Consumer 1.
template <typename T, class Traits>
__device__ __forceinline__ void backward_mma_dk(BackwardSmem<T, Traits>& smem,
                                                const BackwardParams& params,
                                                const CUtensorMap& dk_map) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr uint32_t kTileBytes = kBlockN * kBlockM * sizeof(T);  // of p
  const int group = params.heads / params.kv_heads;
  const uint64_t v_operand = k_major_descriptor(smem_address(smem.v[0]));
  const uint32_t p_rows = smem_address(smem.ds) + stmatrix_offset(0, threadIdx.x % kWarpgroup);

  PipelineState<1> v_state;
  PipelineState<Traits::kQStages> q_state;
  PipelineState<Traits::kDoutStages> dout_state;
  PipelineState<Traits::kDsStages> p_state;
  float dk[Traits::kHeadDim / 2], dp[kBlockM / 2];

  const auto start_dp = [&] {
    smem.dout_pipeline.consumer_wait(dout_state);
    start_scores<Traits, Traits::kValueDim>(dp, v_operand, smem.dout[dout_state.stage]);
  };

  PipelineState<2> work_state;
  BackwardWorkTile tile = next_work(smem, work_state);
  while (tile.is_valid()) {
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (float& x : dk) x = 0.0f;
    warpgroup_fence_operand(dk);

    smem.v_pipeline.consumer_wait(v_state);
    v_state.advance();
    const auto run_step = [&](auto last) {
      constexpr bool kLast = decltype(last)::value;
      const int q_stage = q_state.stage, dout_stage = dout_state.stage;
      uint32_t p_words[kBlockM / 4], ds_words[kBlockM / 4];
      smem.p_pipeline.consumer_wait(p_state);
      load_left_operand<Traits>(p_words, p_rows + p_state.stage * kTileBytes);
      smem.p_pipeline.consumer_release(p_state.stage);
      p_state.advance();
      float p[kBlockM / 2];
#pragma unroll
      for (int j = 0; j < kBlockM / 4; ++j) {
        const float2 pair = unpack_pair<T>(p_words[j]);
        p[2 * j] = pair.x, p[2 * j + 1] = pair.y;
      }
      warpgroup_wait<0>(dp);
      if constexpr (kLast) smem.v_pipeline.consumer_release(0);
      differentiate_softmax(p, dp, smem.delta[dout_stage]);
      smem.dout_pipeline.empty[dout_stage].arrive();
      dout_state.advance();
      pack_accumulator<T>(dp, ds_words);
      smem.q_pipeline.consumer_wait(q_state);
      start_gradient<Traits>(dk, ds_words, smem.q[q_stage]);
      q_state.advance();
      if constexpr (!kLast) start_dp();
      warpgroup_wait<kLast ? 0 : 1>();  // for dk
      smem.q_pipeline.empty[q_stage].arrive();
    };
    if (steps > 0) {
      start_dp();
      for (int step = 0; step < steps - 1; ++step) run_step(std::false_type{});
      run_step(std::true_type{});
    } else {
      smem.v_pipeline.consumer_release(0);
    }
    warpgroup_wait<0>(dk);
    store_own_gradient<1, Traits>(dk, params.scale, smem.dk_out(), dk_map, tile);
    tile = next_work(smem, work_state);
  }
  if (threadIdx.x % kWarpgroup == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
