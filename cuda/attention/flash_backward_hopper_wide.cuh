// The multipliers of heads of 128. A step is a tile of 64 queries: the accumulators of dk and dv
// take half of a thread's registers, and dq is multiplied by the same two warpgroups, each half of
// its columns. dv += p dout runs beside the arithmetic of ds.
#pragma once

#include <cmath>

#include "attention/flash_backward_hopper_multiply.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void multiply_wide(BackwardShared<T, kWidth>& shared,
                                              const BackwardArguments& a, const CUtensorMap& dk_map,
                                              const CUtensorMap& dv_map, int multiplier) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kQueries = Shape::kQueries;
  constexpr int kKeySlabBytes = Shape::kKeys * kSwizzleRowBytes;
  const TiledBand<kQueries, Shape::kKeys> band(a.band);
  const int group = a.heads / a.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = a.scale * float{M_LOG2E};

  // As left operands, this multiplier's rows of k and v.
  const uint32_t my_rows = multiplier * 64 * kSwizzleRowBytes;
  const uint64_t k_operand = k_major_descriptor(smem_address(shared.k[0]) + my_rows);
  const uint64_t v_operand = k_major_descriptor(smem_address(shared.v[0]) + my_rows);
  // dq = ds^T k, of which it has a slab of columns.
  const uint64_t ds_operand = mn_major_descriptor(smem_address(shared.ds), kKeySlabBytes);
  const uint64_t turned_k_operand =
      mn_major_descriptor(smem_address(shared.k[0]) + multiplier * kKeySlabBytes, kKeySlabBytes);
  const uint32_t ds_rows = smem_address(shared.ds) + offset_of_matrices(multiplier, thread);

  PipelineState<1> key_ring;
  // Of q and dout. With two stages the stage is also the parity of a step, and so that of the
  // barriers of ds and dq, which have one buffer.
  PipelineState<Shape::kStages> ring;
  static_assert(Shape::kStages == 2 && Shape::kQueryStages == 2);
  float s[kQueries / 2], dp[kQueries / 2], dq[32];
  float dk[kWidth / 2], dv[kWidth / 2];
  uint32_t p_operand[kQueries / 4], ds_left_operand[kQueries / 4];

  const auto start_dq = [&] {
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      const uint64_t offset = step * kMnMajorStepBytes >> 4;
      wgmma<T, Major::kMN, Major::kMN>(dq, ds_operand + offset, turned_k_operand + offset,
                                       step > 0);
    }
    warpgroup_commit_batch();
  };

  PipelineState<2> tiles;
  // Read here and in the end: where a loop's condition does it, the compiler has descriptors in
  // registers of each thread, with two instructions more for every product.
  BackwardTile tile = read_tile(shared, tiles);
  while (tile.is_there()) {
    const ScoreMask<kSegments, decltype(band)> mask(a, band, tile,
                                                    first_key_of<Shape>(tile, multiplier));
    const int steps = group * tile.queries.size();
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    shared.v_full[0].wait(key_ring.phase);
    shared.k_full[0].wait(key_ring.phase);
    key_ring.advance();
    int query_tile = tile.queries.begin;
    for (int step = 0; step < steps; ++step) {
      const int stage = ring.stage;
      shared.q_full[stage].wait(ring.phase);
      start_scores<Shape>(s, k_operand, shared.q[stage]);
      shared.dout_full[stage].wait(ring.phase);
      start_scores<Shape>(dp, v_operand, shared.dout[stage]);
      warpgroup_wait<1>(s);
      mask.apply(s, query_tile, query_tile * kQueries);
      exponentiate(s, scale_log2, shared.lse[stage]);
      pack_accumulator<T>(s, p_operand);
      start_gradient<Shape>(dv, p_operand, shared.dout[stage]);
      warpgroup_wait<1>(dp);
      shared.ds_empty[0].wait(stage ^ 1);
      differentiate_softmax(s, dp, shared.delta[stage]);
      pack_accumulator<T>(dp, ds_left_operand);
      store_ds<Shape>(ds_left_operand, ds_rows);
      fence_async_proxy();
      arrive_as_warp(shared.ds_full[0]);
      start_gradient<Shape>(dk, ds_left_operand, shared.q[stage]);
      shared.ds_full[0].wait(stage);
      warpgroup_wait<1>();  // of dv
      start_dq();
      ring.advance();
      warpgroup_wait<0>(dq);
      arrive_as_warp(shared.ds_empty[0]);
      shared.q_empty[stage].arrive();
      shared.dout_empty[stage].arrive();
      shared.dq_empty[0].wait(stage ^ 1);
      store_accumulators(dq, shared.dq[multiplier]);
      fence_async_proxy();
      shared.dq_full[0].arrive();
      if (++query_tile == tile.queries.end) query_tile = tile.queries.begin;
    }
    warpgroup_wait<0>(dk, dv);
    // Both have read k and v, over which the gradients go.
    named_barrier_sync(kAllBarrier, Shape::kMultipliers * kWarpgroup);
    store_gradient<Shape>(dk, a.scale, shared.k[0], multiplier);
    store_gradient<Shape>(dv, 1.0f, shared.v[0], multiplier);
    fence_async_proxy();
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
    if (thread == 0) {
      copy_gradients<Shape>(dk_map, shared.k[0], dv_map, shared.v[0], tile, multiplier, band.keys);
      tma_store_wait_read<0>();
      shared.k_empty[0].arrive();
      shared.v_empty[0].arrive();
    }
    tile = read_tile(shared, tiles);
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
