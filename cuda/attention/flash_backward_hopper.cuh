// The gradient in two or three kernels. The first writes, for each query, the two numbers that the
// main one needs beside its row: lse, and delta = sum(out * dout). The main kernel holds a tile of
// keys, and walks over the queries that see it, of all the heads that share it. With keys as rows,
// so that what the threads compute in registers is the left operand of the products with dout and
// with q:
//
//   s = k q^T       p = 2^(c s - lse)         dv += p dout
//   dp = v dout^T   ds = p (dp - delta)       dk += ds q        dq += ds^T k
//
// dv and dk stay in registers. For narrow heads the scores of a step are multiplied beside the dq
// of the step before, also where that belongs to another tile of keys. dq is summed over the tiles
// of keys in global memory, in float32, by the copy engine. Each tile of dq counts its additions,
// and each adder waits for its rank, so that the order, and with it each bit, is always the same.
// For narrow heads the last of them adds what the others have summed to its own part and rounds,
// in registers; else a third kernel rounds.
//
// Five products, where a kernel of its own for dq would need seven: that would have to run at 90%
// of the tensor cores' peak to be as fast as this at 65%. The price is 4 bytes through the L2 cache
// for each query, head, column and tile of keys: about 1.5 TB/s where the products are at their
// best.
//
// Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Shah et al., "FlashAttention-3"
// (arXiv:2407.08608).
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/flash_backward_hopper_dq.cuh"
#include "attention/flash_backward_hopper_plan.cuh"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"

namespace jaxllm::hopper {

// The copies of one tile of keys and what it walks over. Its first queries before its keys: there
// is room for them earlier.
template <typename T, int kWidth>
struct BackwardCopier {
  using Shape = BackwardShape<kWidth>;
  BackwardShared<T, kWidth>& shared;
  const BackwardArguments& a;
  const CUtensorMap &q_map, &k_map, &v_map, &dout_map;
  RingPosition<Shape::kKeyStages> k_ring = {};
  RingPosition<1> v_ring = {};
  RingPosition<Shape::kStages> ring = {};

  // Of the keys or of the values.
  __device__ __forceinline__ void load_key_rows(const BackwardTile& tile, const CUtensorMap& map,
                                                T* target, Barrier& full) {
    full.arrive_and_expect(Shape::kKeys * kWidth * sizeof(T));
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      load_box(target + slab * Shape::kKeys * kSlabWidth, map,
               {slab * kSlabWidth, tile.kv_head, tile.key_tile * Shape::kKeys, tile.sequence},
               full);
    }
  }

  __device__ __forceinline__ void load_keys(const BackwardTile& tile) {
    shared.k_empty[k_ring.stage].wait(k_ring.parity ^ 1);
    load_key_rows(tile, k_map, shared.k[k_ring.stage], shared.k_full[k_ring.stage]);
    k_ring.advance();
    shared.v_empty.wait(v_ring.parity ^ 1);
    load_key_rows(tile, v_map, shared.v, shared.v_full);
    v_ring.advance();
  }

  // With the two numbers of each, which begin at `row`.
  __device__ __forceinline__ void load_queries(int sequence, int head, int query, int64_t row) {
    constexpr int kBytes = Shape::kQueries * (kWidth * sizeof(T) + sizeof(float));
    const int stage = ring.stage;
    shared.q_empty[stage].wait(ring.parity ^ 1);
    shared.q_full[stage].arrive_and_expect(kBytes);
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      load_box(shared.q[stage] + slab * Shape::kQueries * kSlabWidth, q_map,
               {slab * kSlabWidth, head, query, sequence}, shared.q_full[stage]);
    }
    load_bytes(shared.lse[stage], a.lse + row, sizeof(shared.lse[stage]), shared.q_full[stage]);
    shared.dout_empty[stage].wait(ring.parity ^ 1);
    shared.dout_full[stage].arrive_and_expect(kBytes);
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      load_box(shared.dout[stage] + slab * Shape::kQueries * kSlabWidth, dout_map,
               {slab * kSlabWidth, head, query, sequence}, shared.dout_full[stage]);
    }
    load_bytes(shared.delta[stage], a.delta + row, sizeof(shared.delta[stage]),
               shared.dout_full[stage]);
    ring.advance();
  }

  __device__ __forceinline__ void copy(const BackwardTile& tile) {
    const int padded_queries =
        TiledBand<Shape::kQueries, Shape::kKeys>(a.band).query_tiles() * Shape::kQueries;
    const int group = a.heads / a.kv_heads;
    bool has_keys = false;
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
      const int64_t rows = (int64_t{tile.sequence} * a.heads + head) * padded_queries;
      for (int i = tile.queries.begin; i < tile.queries.end; ++i) {
        const int query = i * Shape::kQueries;
        load_queries(tile.sequence, head, query, rows + query);
        if (!has_keys) load_keys(tile);
        has_keys = true;
      }
    }
    if (!has_keys) load_keys(tile);
  }
};

// Takes tickets until there are none, tells of their tiles, and copies what those need.
template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void copy_backward(BackwardShared<T, kWidth>& shared,
                                              const BackwardArguments& a, const CUtensorMap& q_map,
                                              const CUtensorMap& k_map, const CUtensorMap& v_map,
                                              const CUtensorMap& dout_map) {
  using Shape = BackwardShape<kWidth>;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  BackwardCopier<T, kWidth> copier{shared, a, q_map, k_map, v_map, dout_map};
  RingPosition<2> tiles;
  int ticket = atomicAdd(a.tickets, 1);
  while (ticket < a.items) {
    const BackwardItem item = take_item(a, band.key_tiles(), ticket);
    for (int i = 0; i < item.count; ++i) {
      const int key_tile = i == 0 ? item.key_tiles[0] : item.key_tiles[1];
      const BackwardTile tile{item.sequence, item.kv_head, key_tile,
                              queries_seen<kSegments>(a, band, item.sequence, key_tile)};
      tell_of_tile(shared, tiles, tile);
      copier.copy(tile);
    }
    ticket = a.pairs ? a.items : atomicAdd(a.tickets, 1);
  }
  tell_of_tile(shared, tiles, {0, 0, -1, {0, 0}});
}

template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void multiply_backward(BackwardShared<T, kWidth>& shared,
                                                  const BackwardArguments& a,
                                                  const CUtensorMap& dk_map,
                                                  const CUtensorMap& dv_map, int multiplier) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kQueries = Shape::kQueries;
  constexpr int kKeySlabBytes = Shape::kKeys * kSlabRowBytes;
  constexpr int kQuerySlabBytes = kQueries * kSlabRowBytes;
  const TiledBand<kQueries, Shape::kKeys> band(a.band);
  const int group = a.heads / a.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const bool is_first_lane = thread % 32 == 0;
  const int key_in_tile = multiplier * 64 + accumulator_row(thread);
  const int column = accumulator_column(thread);
  const float scale_log2 = a.scale * float{M_LOG2E};

  // As left operands, this multiplier's rows of v and of the first stage of k.
  const uint32_t my_rows = multiplier * 64 * kSlabRowBytes;
  const uint64_t k_operand = depth_along_rows(shared_address(shared.k) + my_rows);
  const uint64_t v_operand = depth_along_rows(shared_address(shared.v) + my_rows);
  constexpr uint32_t kKeyStage = sizeof(shared.k[0]) >> 4;  // in units of descriptors
  // dq is cut by columns or, where a tile has but one slab of them, by queries.
  constexpr bool kByColumn = Shape::kSlabs == 2;
  const uint64_t ds_operand = depth_across_rows(
      shared_address(shared.ds) + (kByColumn ? 0 : multiplier * kKeySlabBytes), kKeySlabBytes);
  const uint64_t turned_k_operand = depth_across_rows(
      shared_address(shared.k) + (kByColumn ? multiplier * kKeySlabBytes : 0), kKeySlabBytes);

  const uint32_t ds_rows = shared_address(shared.ds) + offset_of_matrices(multiplier, thread);

  RingPosition<Shape::kKeyStages> k_ring;
  // Of q and dout. With two stages the stage is also the parity of a step, and so that of the
  // barriers of ds and dq, which have one buffer. The same holds for k and v, by tiles.
  RingPosition<Shape::kStages> ring;
  static_assert(Shape::kStages == 2);
  float s[kQueries / 2], dq[32];
  float dk[kWidth / 2], dv[kWidth / 2];
  uint32_t p_operand[kQueries / 4], ds_left_operand[kQueries / 4];

  const auto arrive = [&](Barrier& barrier) {
    __syncwarp();
    if (is_first_lane) barrier.arrive();
  };
  // rows x queries^T, of as many queries as `result` has columns: s = k q^T, dp = v dout^T.
  const auto start_scores = [&](auto& result, uint64_t rows, const T* queries) {
    const uint64_t columns = depth_along_rows(shared_address(queries));
    fence_products();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int within = step % 4 * kDepthStepAlongRows;
      multiply<T, 0, 0>(result, rows + ((step / 4 * kKeySlabBytes + within) >> 4),
                        columns + ((step / 4 * kQuerySlabBytes + within) >> 4), step > 0);
    }
    commit_products();
  };
  // sum += weights x queries: dv += p dout, dk += ds q.
  const auto start_gradient = [&](auto from, float (&sum)[kWidth / 2], const uint32_t* weights,
                                  const T* queries) {
    const uint64_t rows = depth_across_rows(shared_address(queries), kQuerySlabBytes);
    fence_products();
#pragma unroll
    for (int step = decltype(from)::value / 16; step < kQueries / 16; ++step) {
      multiply<T, 1>(sum, weights + 4 * step, rows + (step * kDepthStepAcrossRows >> 4));
    }
    commit_products();
  };
  const auto start_dq = [&] {
    const uint64_t turned_k = turned_k_operand + k_ring.stage * kKeyStage;
    fence_products();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      const uint64_t offset = step * kDepthStepAcrossRows >> 4;
      multiply<T, 1, 1>(dq, ds_operand + offset, turned_k + offset, step > 0);
    }
    commit_products();
  };
  SegmentRows query_segments, key_segments;
  TileRange whole_queries;
  const auto mask = [&](int key_tile, int query_tile) {
    const int first_key = key_tile * Shape::kKeys + multiplier * 64;
    const int first_query = query_tile * kQueries;
    const int key = key_tile * Shape::kKeys + key_in_tile;
    // From here on relative to the thread's first column.
    const int origin = first_query + column;
    if (!whole_queries.contains(query_tile)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = key + 8 * r < band.keys ? band.first_query(key + 8 * r) - origin : INT_MAX;
#pragma unroll
        for (int i = 0; i < kQueries / 2; i += 4) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (2 * i + b < low) s[i + 2 * r + b] = -INFINITY;
          }
        }
        // Of a causal mask without a window nothing is left.
        if (first_query + kQueries - 1 <= band.last_query(first_key)) continue;
        const int high = band.last_query(key + 8 * r) - origin;
#pragma unroll
        for (int i = 0; i < kQueries / 2; i += 4) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (2 * i + b > high) s[i + 2 * r + b] = -INFINITY;
          }
        }
      }
    }
    if constexpr (kSegments) {
      if (are_one_segment(query_segments.of<kQueries>(first_query),
                          key_segments.of<64>(first_key))) {
        return;
      }
      const int segment[2] = {key_segments.id(key), key_segments.id(key + 8)};
#pragma unroll
      for (int i = 0; i < kQueries / 2; i += 4) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int of_query = query_segments.id(origin + 2 * i + b);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (of_query != segment[r]) s[i + 2 * r + b] = -INFINITY;
          }
        }
      }
    }
  };
  // Writes this multiplier's rows of a gradient to a tile as k and v have them: over its rows of k
  // or v, or of ds.
  const auto store_gradient = [&](const float (&gradient)[kWidth / 2], float factor, T* tile) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; i += 2) {
      const int first_column = i / 4 * 8;
      char* const slab = reinterpret_cast<char*>(tile) + first_column / kSlabWidth * kKeySlabBytes;
      *reinterpret_cast<uint32_t*>(
          slab + slab_offset(key_in_tile + i / 2 % 2 * 8, first_column % kSlabWidth + column)) =
          pack<T>(gradient[i] * factor, gradient[i + 1] * factor);
    }
  };

  T* const dk_tile = Shape::kStoresFromDs ? shared.ds : shared.k[0];
  T* const dv_tile = Shape::kStoresFromDs ? shared.ds + Shape::kKeys * kSlabWidth : shared.v;
  // Leaves both to the copy engine.
  const auto store_gradients = [&](const BackwardTile& tile) {
    if constexpr (Shape::kStoresFromDs) {
      shared.ds_empty.wait(ring.stage ^ 1);
    } else {
      // Both have read k and v.
      named_barrier_sync(kAllBarrier, Shape::kMultipliers * kWarpgroup);
    }
    store_gradient(dk, a.scale, dk_tile);
    store_gradient(dv, 1.0f, dv_tile);
    fence_async_proxy();
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
    if (thread > 0) return;
    const int first_key = tile.key_tile * Shape::kKeys + multiplier * 64;
    if (first_key < band.keys) {
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        const Box box{slab * kSlabWidth, tile.kv_head, first_key, tile.sequence};
        const int offset = (slab * Shape::kKeys + multiplier * 64) * kSlabWidth;
        store_box(dk_map, dk_tile + offset, box);
        store_box(dv_map, dv_tile + offset, box);
      }
      commit_stores();
    }
    if constexpr (!Shape::kStoresFromDs) {
      wait_until_stores_have_read();
      shared.k_empty[0].arrive();
      shared.v_empty.arrive();
    }
  };
  // Waits until they have left this multiplier's rows of ds.
  const auto await_stores = [&] {
    if (thread == 0) wait_until_stores_have_read();
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
  };

  RingPosition<2> tiles;
  RingPosition<1> rounded_ring;
  // Whether s has the scores of the step that comes next: the one before has seen to it, be it of
  // the tile before.
  bool has_scores = false;
  BackwardTile tile = read_tile(shared, tiles), next;
  while (tile.is_there()) {
    if constexpr (kSegments) {
      query_segments = queries_of_sequence(a.segments, band, tile.sequence);
      key_segments = keys_of_sequence(a.segments, band, tile.sequence);
    }
    whole_queries = band.whole_queries_of(tile.key_tile * Shape::kKeys + multiplier * 64, 64);
    const int steps = group * tile.queries.size();
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) dk[j] = dv[j] = 0.0f;
    pin(dk);
    pin(dv);

    shared.v_full.wait(Shape::kKeyStages == 2 ? k_ring.stage : k_ring.parity);
    // A step: the weights p and ds of a tile of queries, and the products that they go into. Of
    // narrow heads s is there already, and the next step's is left; while dp is multiplied, s
    // becomes p, and while s is, dq is handed on. `from`: 0 or, where the first half of the queries
    // see none of this multiplier's keys, where the second begins.
    const auto walk = [&](auto from, int query_tile, bool is_first, bool is_last) {
      constexpr int kFirst = decltype(from)::value;
      constexpr int kFrom = kFirst / 2;  // in the accumulators
      float dp[kQueries / 2 - kFrom];
      if constexpr (!Shape::kEarlyScores) {
        shared.q_full[ring.stage].wait(ring.parity);
        start_scores(s, k_operand, shared.q[ring.stage]);
      }
      const int stage = ring.stage;
      shared.dout_full[stage].wait(ring.parity);
      start_scores(dp, v_operand, shared.dout[stage] + kFirst * kSlabWidth);
      if constexpr (!Shape::kEarlyScores) wait_for_products<1>(s);
      mask(tile.key_tile, query_tile);
#pragma unroll
      for (int j = kFrom; j < kQueries / 2; j += 4) {
        const float2 lse = *reinterpret_cast<const float2*>(shared.lse[stage] + 2 * j + column);
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          s[j + r] = exp2_fast(fmaf(s[j + r], scale_log2, -lse.x));
          s[j + r + 1] = exp2_fast(fmaf(s[j + r + 1], scale_log2, -lse.y));
        }
      }
      if constexpr (Shape::kEarlyDv) {
        pack<T>(s, p_operand);
        start_gradient(from, dv, p_operand, shared.dout[stage]);
        wait_for_products<1>(dp);
        shared.ds_empty.wait(stage ^ 1);
      } else {
        // A wait that branches, between the exponentials and the wait for the product beside
        // them: within one basic block the assembler would put the latter first.
        pin(s);
        shared.ds_empty.wait(stage ^ 1);
        wait_for_products<0>(dp);
      }
      if constexpr (Shape::kStoresFromDs) {
        if (is_last) arrive(shared.v_empty);
      }
#pragma unroll
      for (int j = kFrom; j < kQueries / 2; j += 4) {
        const float2 delta = *reinterpret_cast<const float2*>(shared.delta[stage] + 2 * j + column);
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          float* const ds = dp + (j - kFrom + r);
          ds[0] = s[j + r] * (ds[0] - delta.x);
          ds[1] = s[j + r + 1] * (ds[1] - delta.y);
        }
      }
      if constexpr (!Shape::kEarlyDv) pack<T>(s, p_operand);
#pragma unroll
      for (int j = 0; j < kQueries / 4; ++j) {
        const int i = 2 * j - kFrom;
        ds_left_operand[j] = i < 0 ? 0 : pack<T>(dp[i], dp[i + 1]);
      }
      if constexpr (!Shape::kEarlyDv) start_gradient(from, dv, p_operand, shared.dout[stage]);
      if constexpr (Shape::kStoresFromDs) {
        if (is_first) await_stores();
      }
      // Both multipliers' rows of ds go to shared memory: dq sums over all of them.
#pragma unroll
      for (int j = 0; j < kQueries / 4; j += 4) {
        const int chunk = j / 2;  // of eight queries
        store_matrices((ds_rows + chunk / 8 * kKeySlabBytes) ^ chunk % 8 * 16,
                       *reinterpret_cast<const uint32_t (*)[4]>(ds_left_operand + j));
      }
      fence_async_proxy();
      arrive(shared.ds_full);
      start_gradient(from, dk, ds_left_operand, shared.q[stage]);
      shared.ds_full.wait(stage);
      wait_for_products<1>();  // of dv
      start_dq();
      ring.advance();
      if constexpr (Shape::kEarlyScores) {
        const int k_stage = k_ring.stage;
        if (is_last) {
          next = read_tile(shared, tiles);
          k_ring.advance();
          has_scores = next.is_there() && next.queries.size() > 0;
          if (has_scores) shared.k_full[k_ring.stage].wait(k_ring.parity);
        }
        // After the very last step nobody reads them: they cost less than a branch around a
        // product.
        if (has_scores) shared.q_full[ring.stage].wait(ring.parity);
        start_scores(s, k_operand + k_ring.stage * kKeyStage, shared.q[ring.stage]);
        wait_for_products<1>(dq);
        if (is_last) arrive(shared.k_empty[k_stage]);
      } else {
        wait_for_products<0>(dq);
      }
      arrive(shared.ds_empty);
      shared.q_empty[stage].arrive();
      shared.dout_empty[stage].arrive();
      bool is_rounded = false;
      if constexpr (Shape::kRoundsDq) {
        const TileRange seen = keys_seen<kSegments>(a, band, tile.sequence, query_tile);
        is_rounded = tile.key_tile == last_to_add(seen, a.split);
        if (is_rounded) {
          shared.rounded_empty.wait(rounded_ring.parity ^ 1);
          shared.before_full.wait(rounded_ring.parity);
          rounded_ring.advance();
          round_dq(shared, dq, a.scale, /*is_alone=*/seen.size() == 1, multiplier);
          fence_async_proxy();
          shared.before_empty.arrive();
          shared.rounded_full.arrive();
        }
      }
      shared.dq_empty.wait(stage ^ 1);
      if (!is_rounded) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          reinterpret_cast<float4*>(shared.dq[multiplier])[j * kWarpgroup + thread] =
              make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        }
        fence_async_proxy();
      }
      arrive(shared.dq_full);
      if constexpr (Shape::kEarlyScores) wait_for_products<0>(s);
    };
    if (!has_scores) {
      shared.k_full[k_ring.stage].wait(k_ring.parity);
      if (Shape::kEarlyScores && steps > 0) {
        shared.q_full[ring.stage].wait(ring.parity);
        start_scores(s, k_operand + k_ring.stage * kKeyStage, shared.q[ring.stage]);
        wait_for_products<0>(s);
        has_scores = true;
      }
    }
    if (steps > 0) {
      // The diagonal of a causal mask leaves such a half in a head's first tile of queries.
      const int first_query = band.first_query(tile.key_tile * Shape::kKeys + multiplier * 64);
      const bool is_halved = tile.queries.begin * kQueries + kQueries / 2 <= first_query;
      const int halved = Shape::kEarlyScores && is_halved ? tile.queries.begin : -1;
      constexpr std::integral_constant<int, 0> whole;
      constexpr std::integral_constant<int, Shape::kEarlyScores ? kQueries / 2 : 0> half;
      int query_tile = tile.queries.begin, remaining = steps;
      do {
        const bool is_first = remaining == steps, is_last = remaining == 1;
        if (query_tile == halved) {
          walk(half, query_tile, is_first, is_last);
        } else {
          walk(whole, query_tile, is_first, is_last);
        }
        if (++query_tile == tile.queries.end) query_tile = tile.queries.begin;
      } while (--remaining > 0);
    } else if constexpr (Shape::kStoresFromDs) {
      await_stores();
      arrive(shared.k_empty[k_ring.stage]);
      arrive(shared.v_empty);
    }
    wait_for_products<0>(dk, dv);
    store_gradients(tile);
    if (!Shape::kEarlyScores || steps == 0) {
      k_ring.advance();
      next = read_tile(shared, tiles);
    }
    tile = next;
  }
  if (thread == 0) wait_for_stores();
}

template <typename T, int kWidth, bool kSegments>
__global__ void __launch_bounds__(BackwardShape<kWidth>::kThreads, 1)
    flash_attention_backward_hopper_kernel(
        const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
        const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
        const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map,
        const __grid_constant__ CUtensorMap dq_map, const __grid_constant__ BackwardArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = BackwardShape<kWidth>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardShared<T, kWidth>*>(shared_memory);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      shared.k_full[stage].init(1);
      shared.k_empty[stage].init(Shape::kKeyReleases);
    }
    shared.v_full.init(1);
    shared.v_empty.init(Shape::kKeyReleases);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(Shape::kReaders);
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(Shape::kReaders);
    }
    shared.ds_full.init(Shape::kWarps);
    shared.ds_empty.init(Shape::kWarps);
    shared.dq_full.init(Shape::kWarps);
    shared.dq_empty.init(1);
    shared.before_full.init(1);
    shared.before_empty.init(Shape::kReaders);
    shared.rounded_full.init(Shape::kReaders);
    shared.rounded_empty.init(Shape::kStorers);
    for (int stage = 0; stage < 2; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(Shape::kTileReaders);
    }
    fence_barrier_init();
  }
  wait_for_last_kernel();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    give_registers<Shape::kCopierRegisters>();
    if (threadIdx.x == 0) copy_backward<kSegments>(shared, a, q_map, k_map, v_map, dout_map);
    if (threadIdx.x == 32) add_dq<kSegments>(shared, a);
    if constexpr (Shape::kRoundsDq) {
      const int storer = static_cast<int>(threadIdx.x) - (kWarpgroup - Shape::kStorers);
      if (storer >= 0) store_rounded_dq<kSegments>(shared, a, dq_map, storer);
    }
  } else {
    take_registers<Shape::kMultiplierRegisters>();
    multiply_backward<kSegments>(shared, a, dk_map, dv_map, warpgroup - 1);
  }
#endif
}

}  // namespace jaxllm::hopper
