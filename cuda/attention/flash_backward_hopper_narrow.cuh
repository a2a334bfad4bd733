// The multipliers of heads of 64, and the warpgroup that multiplies dq for both: they need not wait
// for one another's ds then, nor for what becomes of dq, and it leaves them registers for scores
// that are multiplied ahead. On an H200, 384 causal heads of 1024 queries take 319 us, and took 327
// when each of them multiplied half of dq.
//
// A step is a tile of 128 queries, taken in two halves. While the tensor cores multiply dk of a
// half and s and dp of the next, the exponentials of its scores are computed:
//
//   start_dv:  dp started    s awaited    s -> p      dv started               dp, dv awaited
//   start_dk:  next s started             dp -> ds    ds to shared memory      dk started
//
// Under a causal mask, a tile's last 64 keys are not seen by the first half of the queries on the
// diagonal: their multiplier begins with the second.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/flash_backward_hopper_multiply.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// Whether the first half of a head's first tile of queries sees none of a multiplier's keys.
template <typename Shape, typename Tiles>
__device__ __forceinline__ bool begins_with_second_half(const Tiles& band, const BackwardTile& tile,
                                                        int multiplier) {
  const int second_half = tile.queries.begin * Shape::kQueries + Shape::kQueries / 2;
  return second_half <= band.first_query(first_key_of<Shape>(tile, multiplier));
}

template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void multiply_narrow(BackwardShared<T, kWidth>& shared,
                                                const BackwardArguments& a,
                                                const CUtensorMap& dk_map,
                                                const CUtensorMap& dv_map, int multiplier) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kHalf = Shape::kQueries / 2;          // in queries
  constexpr int kHalfTile = kHalf * kSwizzleColumns;  // in elements of q or dout
  constexpr int kKeySlabBytes = Shape::kKeys * kSwizzleRowBytes;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int group = a.heads / a.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = a.scale * float{M_LOG2E};

  // As left operands, this multiplier's rows of the first stage of k and of v.
  const uint32_t my_rows = multiplier * 64 * kSwizzleRowBytes;
  const uint64_t first_k_rows = k_major_descriptor(smem_address(shared.k[0]) + my_rows);
  const uint64_t first_v_rows = k_major_descriptor(smem_address(shared.v[0]) + my_rows);
  constexpr uint32_t kKeyStage = sizeof(shared.k[0]) >> 4;  // in units of descriptors
  const uint32_t ds_rows = smem_address(shared.ds) + offset_of_matrices(multiplier, thread);

  PipelineState<Shape::kKeyStages> key_ring;  // of k and of v
  PipelineState<Shape::kQueryStages> q_ring;
  // With two stages the stage is also the parity of a step, and so that of the barriers of ds.
  PipelineState<Shape::kStages> ring;
  static_assert(Shape::kStages == 2);
  // The scores of both halves: while those of one are weights, the other's are multiplied.
  float s[2][32], dp[32], dk[32], dv[32];
  uint32_t p_operand[16], ds_left_operand[16];

  bool has_stored = false;
  // Before the next tile's ds goes over what is stored of this one.
  const auto await_stores = [&](int key_stage) {
    if (thread == 0) {
      tma_store_wait_read<0>();
      if (has_stored) shared.v_empty[key_stage ^ 1].arrive();
    }
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
  };
  // dv over this multiplier's rows of v, dk over those of the first half of ds: there is room for
  // them before the last dq is multiplied.
  const auto store_gradients = [&](const BackwardTile& tile, int key_stage) {
    store_gradient<Shape>(dv, 1.0f, shared.v[key_stage], multiplier);
    shared.ds_empty[0].wait(ring.stage ^ 1);
    store_gradient<Shape>(dk, a.scale, shared.ds, multiplier);
    fence_async_proxy();
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
    has_stored = true;
    if (thread == 0) {
      copy_gradients<Shape>(dk_map, shared.ds, dv_map, shared.v[key_stage], tile, multiplier,
                            band.keys);
    }
  };

  PipelineState<2> tiles;
  // Whether the scores of the tile's first half step are there: the tile before has seen to it.
  bool has_scores = false;
  BackwardTile tile = read_tile(shared, tiles), next;
  while (tile.is_there()) {
    const ScoreMask<kSegments, decltype(band)> mask(a, band, tile,
                                                    first_key_of<Shape>(tile, multiplier));
    const int steps = group * tile.queries.size();
#pragma unroll
    for (int j = 0; j < 32; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    const int key_stage = key_ring.stage;
    const uint64_t k_rows = first_k_rows + key_stage * kKeyStage;
    const uint64_t v_rows = first_v_rows + key_stage * kKeyStage;
    shared.v_full[key_stage].wait(key_ring.phase);
    const bool begins_halved = begins_with_second_half<Shape>(band, tile, multiplier);
    int query_tile = tile.queries.begin;
    if (!has_scores) {
      shared.k_full[key_stage].wait(key_ring.phase);
      if (steps > 0) {
        shared.q_full[q_ring.stage].wait(q_ring.phase);
        start_scores<Shape>(s[0], k_rows, shared.q[q_ring.stage] + begins_halved * kHalfTile);
        warpgroup_wait<0>(s[0]);
        has_scores = true;
      }
    }

    // dv += p dout of a half, whose dp it leaves. `pending`: how many groups of products have been
    // started since its scores were; less than none where the scores are known to be there.
    const auto start_dv = [&](auto pending, float (&s)[32], int q_stage, int half) {
      constexpr int kPending = decltype(pending)::value;
      const T* const dout = shared.dout[ring.stage] + half * kHalfTile;
      start_scores<Shape>(dp, v_rows, dout);
      if constexpr (kPending >= 0) warpgroup_wait<kPending + 1>(s);
      mask.apply(s, query_tile, query_tile * Shape::kQueries + half * kHalf);
      exponentiate(s, scale_log2, shared.lse[q_stage] + half * kHalf);
      warpgroup_fence_operand(s);
      pack_accumulator<T>(s, p_operand);
      start_gradient<Shape>(dv, p_operand, dout);
      shared.ds_empty[half].wait(ring.stage ^ 1);
      warpgroup_wait<0>(dp);
    };
    // dk += ds q of a half, and its ds for dq.
    const auto start_dk = [&](const float (&p)[32], int q_stage, int half, bool is_first) {
      differentiate_softmax(p, dp, shared.delta[ring.stage] + half * kHalf);
      pack_accumulator<T>(dp, ds_left_operand);
      if (is_first) await_stores(key_stage);
      store_ds<Shape>(ds_left_operand, ds_rows + half * kKeySlabBytes);
      fence_async_proxy();
      arrive_as_warp(shared.ds_full[half]);
      start_gradient<Shape>(dk, ds_left_operand, shared.q[q_stage] + half * kHalfTile);
    };
    // A step from after its first weights to after those of the next step, if the tile has one.
    const auto walk = [&](auto halved, auto last, bool is_first) {
      constexpr bool kHalved = decltype(halved)::value, kLast = decltype(last)::value;
      const int q_stage = q_ring.stage;
      q_ring.advance();
      // What the scores come from that are multiplied ahead.
      uint64_t next_k_rows = k_rows;
      bool is_next_halved = begins_halved && query_tile + 1 == tile.queries.end;
      if constexpr (kLast) {
        next = read_tile(shared, tiles);
        key_ring.advance();
        next_k_rows = first_k_rows + key_ring.stage * kKeyStage;
        has_scores = next.is_there() && next.queries.size() > 0;
        is_next_halved = has_scores && begins_with_second_half<Shape>(band, next, multiplier);
      }
      if constexpr (kHalved) {
        shared.ds_empty[0].wait(ring.stage ^ 1);
        arrive_as_warp(shared.ds_full[0]);
      } else {
        start_scores<Shape>(s[1], k_rows, shared.q[q_stage] + kHalfTile);
        start_dk(s[0], q_stage, 0, is_first);
        start_dv(std::integral_constant<int, 1>{}, s[1], q_stage, 1);
      }
      // After the very last step nobody reads the scores: they cost less than a branch around a
      // product.
      if (!kLast || has_scores) {
        if constexpr (kLast) shared.k_full[key_ring.stage].wait(key_ring.phase);
        shared.q_full[q_ring.stage].wait(q_ring.phase);
      }
      if constexpr (kHalved) start_dk(s[0], q_stage, 1, is_first);
      start_scores<Shape>(s[0], next_k_rows, shared.q[q_ring.stage] + is_next_halved * kHalfTile);
      if constexpr (!kHalved) start_dk(s[1], q_stage, 1, false);
      const int stage = ring.stage;
      ring.advance();
      if (++query_tile == tile.queries.end) query_tile = tile.queries.begin;
      if constexpr (kLast) {
        warpgroup_wait<0>(s[0], dk, dv);
      } else {
        shared.dout_full[ring.stage].wait(ring.phase);
        start_dv(std::integral_constant<int, kHalved ? 0 : 1>{}, s[0], q_ring.stage,
                 is_next_halved);
      }
      shared.q_empty[q_stage].arrive();
      shared.dout_empty[stage].arrive();
    };
    if (steps > 0) {
      constexpr std::true_type yes;
      constexpr std::false_type no;
      shared.dout_full[ring.stage].wait(ring.phase);
      start_dv(std::integral_constant<int, -1>{}, s[0], q_ring.stage, begins_halved);
      for (int step = 0; step < steps - 1; ++step) {
        if (begins_halved && query_tile == tile.queries.begin) {
          walk(yes, no, step == 0);
        } else {
          walk(no, no, step == 0);
        }
      }
      if (begins_halved && query_tile == tile.queries.begin) {
        walk(yes, yes, steps == 1);
      } else {
        walk(no, yes, steps == 1);
      }
    } else {
      await_stores(key_stage);
    }
    store_gradients(tile, key_stage);
    if (steps == 0) {
      key_ring.advance();
      next = read_tile(shared, tiles);
    }
    tile = next;
  }
  if (thread == 0) tma_store_wait<0>();
}

// dq = ds^T k, by halves of a tile's queries, each when both multipliers have its ds. Hands it to
// who adds it to the sum; where it is the last of a tile, adds that and rounds.
template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void multiply_dq(BackwardShared<T, kWidth>& shared,
                                            const BackwardArguments& a) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kKeySlabBytes = Shape::kKeys * kSwizzleRowBytes;
  constexpr uint32_t kKeyStage = sizeof(shared.k[0]) >> 4;  // in units of descriptors
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int group = a.heads / a.kv_heads;
  const uint64_t first_ds = mn_major_descriptor(smem_address(shared.ds), kKeySlabBytes);
  const uint64_t first_k = mn_major_descriptor(smem_address(shared.k[0]), kKeySlabBytes);

  PipelineState<2> tiles;
  PipelineState<Shape::kKeyStages> key_ring;
  // Of all steps, and of those whose dq is added to the sum and those whose is rounded: only what
  // was added has a copy that must have left dq's buffer.
  PipelineState<1> ring, added_ring, rounded_ring;
  float dq[32];
  for (BackwardTile tile; (tile = read_tile(shared, tiles)).is_there();) {
    shared.k_full[key_ring.stage].wait(key_ring.phase);
    const uint64_t turned_k = first_k + key_ring.stage * kKeyStage;
    // `multipliers`: how many have ds of the half.
    const auto multiply_half = [&](auto multipliers, uint64_t turned_ds) {
      warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < decltype(multipliers)::value * 64 / 16; ++step) {
        const uint64_t offset = step * kMnMajorStepBytes >> 4;
        wgmma<T, Major::kMN, Major::kMN>(dq, turned_ds + offset, turned_k + offset, step > 0);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>(dq);
    };
    // How many multipliers' keys the first half of a head's first tile of queries sees: the first.
    int seen_at_first = Shape::kMultipliers;
    while (seen_at_first > 0 && begins_with_second_half<Shape>(band, tile, seen_at_first - 1)) {
      --seen_at_first;
    }
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
#pragma unroll 1
      for (int query_tile = tile.queries.begin; query_tile < tile.queries.end; ++query_tile) {
        const TileRange seen = keys_seen<kSegments>(a, band, tile.sequence, query_tile);
        const bool is_rounded = tile.key_tile == last_to_add(seen, a.split);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const bool is_first = query_tile == tile.queries.begin && half == 0;
          const int multipliers = is_first ? seen_at_first : Shape::kMultipliers;
          const uint64_t turned_ds = first_ds + half * (kKeySlabBytes >> 4);
          shared.ds_full[half].wait(ring.phase);
          if (multipliers == 2) {
            multiply_half(std::integral_constant<int, 2>{}, turned_ds);
          } else if (multipliers == 1) {
            multiply_half(std::integral_constant<int, 1>{}, turned_ds);
          } else {
#pragma unroll
            for (int j = 0; j < 32; ++j) dq[j] = 0.0f;
          }
          arrive_as_warp(shared.ds_empty[half]);
          if (is_rounded) {
            if (half == 0) shared.rounded_empty.wait(rounded_ring.phase ^ 1);
            shared.sum_full[half].wait(rounded_ring.phase);
            round_dq(shared, dq, a.scale, /*is_alone=*/seen.size() == 1, half);
          } else {
            shared.dq_empty[half].wait(added_ring.phase ^ 1);
            store_accumulators(dq, shared.dq[half]);
            fence_async_proxy();
          }
          shared.dq_full[half].arrive();
        }
        ring.advance();
        if (is_rounded) {
          fence_async_proxy();
          shared.rounded_full.arrive();
          rounded_ring.advance();
        } else {
          added_ring.advance();
        }
      }
    }
    arrive_as_warp(shared.k_empty[key_ring.stage]);
    key_ring.advance();
  }
}

}  // namespace jaxllm::hopper
