// The warpgroup that computes dq for both consumers of a head dimension of 64.
#pragma once

#include <type_traits>

#include "attention/hopper/mainloop_backward.cuh"

namespace jaxllm::hopper {

// dq = ds^T k, by halves of a tile's queries, each when both consumers have written its ds. Hands
// dq to the thread that accumulates it; where this CTA adds last, adds the sum of the others and
// converts.
template <bool kSegments, typename T, class Traits>
__device__ __forceinline__ void backward_mma_dq(BackwardSmem<T, Traits>& smem,
                                                const BackwardParams& params) {
  constexpr int kColumnBlockBytesN = Traits::kBlockN * kSwizzleRowBytes;
  constexpr uint32_t kKeyStage = sizeof(smem.k[0]) >> 4;  // in units of descriptors
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const uint64_t first_ds = mn_major_descriptor(smem_address(smem.ds), kColumnBlockBytesN);
  const uint64_t first_k = mn_major_descriptor(smem_address(smem.k[0]), kColumnBlockBytesN);

  PipelineState<2> work_state;
  PipelineState<Traits::kKvStages> kv_state;
  // Of all tiles of dq, of those that are accumulated, and of those that are converted here. Only
  // an accumulated tile has a copy that must have left smem.dq.
  PipelineState<1> state, accum_state, store_state;
  float dq[32];
  for (BackwardWorkTile tile; (tile = next_work(smem, work_state)).is_valid();) {
    smem.k_pipeline.consumer_wait(kv_state);
    const uint64_t k_mn = first_k + kv_state.stage * kKeyStage;
    // `consumers`: how many have written ds of the half.
    const auto mma_half = [&](auto consumers, uint64_t ds_mn) {
      warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < decltype(consumers)::value * 64 / 16; ++step) {
        const uint64_t offset = step * kMnMajorStepBytes >> 4;
        wgmma<T, Major::kMN, Major::kMN>(dq, ds_mn + offset, k_mn + offset, step > 0);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>(dq);
    };
    // How many consumers' keys the first half of a head's first query tile sees: the first ones.
    int seen_at_first = Traits::kConsumers;
    while (seen_at_first > 0 && begins_with_second_half<Traits>(mask, tile, seen_at_first - 1)) {
      --seen_at_first;
    }
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
#pragma unroll 1
      for (int query_tile = tile.query_tiles.begin; query_tile < tile.query_tiles.end;
           ++query_tile) {
        const TileRange seen =
            visible_key_tiles<kSegments>(params, mask, tile.sequence, query_tile);
        const bool is_last = tile.key_tile == last_dq_key_tile(seen, params.split);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const bool is_first = query_tile == tile.query_tiles.begin && half == 0;
          const int consumers = is_first ? seen_at_first : Traits::kConsumers;
          const uint64_t ds_mn = first_ds + half * (kColumnBlockBytesN >> 4);
          smem.ds_pipeline.full[half].wait(state.phase);
          if (consumers == 2) {
            mma_half(std::integral_constant<int, 2>{}, ds_mn);
          } else if (consumers == 1) {
            mma_half(std::integral_constant<int, 1>{}, ds_mn);
          } else {
#pragma unroll
            for (int j = 0; j < 32; ++j) dq[j] = 0.0f;
          }
          smem.ds_pipeline.consumer_release(half);
          if (is_last) {
            if (half == 0) smem.dq_store_pipeline.producer_acquire(store_state);
            smem.dq_sum_full[half].wait(store_state.phase);
            convert_dq(smem, dq, params.scale, /*is_alone=*/seen.size() == 1, half);
          } else {
            smem.dq_pipeline.empty[half].wait(accum_state.phase ^ 1);
            store_dq_accumulator(dq, smem.dq[half]);
            fence_async_proxy();
          }
          smem.dq_pipeline.full[half].arrive();
        }
        state.advance();
        if (is_last) {
          fence_async_proxy();
          smem.dq_store_pipeline.full[0].arrive();
          store_state.advance();
        } else {
          accum_state.advance();
        }
      }
    }
    smem.k_pipeline.consumer_release(kv_state.stage);
    kv_state.advance();
  }
}

}  // namespace jaxllm::hopper
