// The sums of dq over the tiles of keys, in their order, and their rounding: what two threads of
// the main kernel's copying warpgroup do, and two of its warps.
#pragma once

#include "attention/flash_backward_hopper_plan.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::hopper {

__device__ __forceinline__ int load_acquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int* target, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

// Drops a line of the L2 cache: what stands there has no value any more, and is never written to
// memory.
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], %1;" ::"l"(line), "n"(kCacheLineBytes) : "memory");
}

// A tile of dq that a block adds to.
struct DqStep {
  int sequence, head, query_tile;
  int rank, last_rank;  // of the block's addition, and of the last
};

// The number of a step's tile of dq among those of all sequences and heads.
template <int kWidth>
__device__ __forceinline__ int64_t dq_tile(const BackwardArguments& a, const DqStep& step) {
  using Shape = BackwardShape<kWidth>;
  const int query_tiles = TiledBand<Shape::kQueries, Shape::kKeys>(a.band).query_tiles();
  return (int64_t{step.sequence} * a.heads + step.head) * query_tiles + step.query_tile;
}

// Calls visit(step) for each of the block's, in the order in which the multipliers take them.
template <bool kSegments, typename T, int kWidth, typename Visit>
__device__ __forceinline__ void for_each_dq_step(BackwardShared<T, kWidth>& shared,
                                                 const BackwardArguments& a, const Visit& visit) {
  using Shape = BackwardShape<kWidth>;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int group = a.heads / a.kv_heads;
  RingPosition<2> tiles;
  for (BackwardTile tile; (tile = read_tile(shared, tiles)).is_there();) {
#pragma unroll 1
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int query_tile = tile.queries.begin; query_tile < tile.queries.end; ++query_tile) {
        const TileRange seen = keys_seen<kSegments>(a, band, tile.sequence, query_tile);
        visit(DqStep{tile.sequence, head, query_tile, rank_of(tile.key_tile, seen, a.split),
                     seen.size() - 1});
      }
    }
  }
}

// Adds each tile of dq to global memory when it is its turn; or, where it is the last and is
// rounded here, fetches the sum of those before it.
template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void add_dq(BackwardShared<T, kWidth>& shared,
                                       const BackwardArguments& a) {
  using Shape = BackwardShape<kWidth>;
  RingPosition<1> ring, before_ring;
  const auto add = [&](const DqStep& step) {
    const int64_t tile = dq_tile<kWidth>(a, step);
    float* const sum = a.dq_sums + tile * (Shape::kQueries * kWidth);
    const auto await_rank = [&] {
      while (load_acquire(a.ranks + tile) != step.rank) {
      }
      fence_async_proxy_global();
    };
    if constexpr (Shape::kRoundsDq) {
      if (step.rank == step.last_rank) {
        shared.before_empty.wait(before_ring.parity ^ 1);
        before_ring.advance();
        if (step.rank > 0) {
          await_rank();
          shared.before_full.arrive_and_expect(sizeof(shared.dq_before));
          load_bytes(shared.dq_before, sum, sizeof(shared.dq_before), shared.before_full);
        } else {
          shared.before_full.arrive();
        }
        shared.dq_full.wait(ring.parity);
        ring.advance();
        shared.dq_empty.arrive();
        return;
      }
    }
    // Before the tile is there, lest it wait for what has long been true to be read.
    await_rank();
    shared.dq_full.wait(ring.parity);
    ring.advance();
    // The first writes, so that nobody has to write zeros before.
    if (step.rank == 0) {
      store_bytes(sum, shared.dq, sizeof(shared.dq));
    } else {
      add_floats(sum, shared.dq[0], sizeof(shared.dq));
    }
    commit_stores();
    wait_until_stores_have_read();
    shared.dq_empty.arrive();
    wait_for_stores();
    fence_async_proxy_global();
    store_release(a.ranks + tile, step.rank + 1);
  };
  for_each_dq_step<kSegments>(shared, a, add);
}

// Writes the sums of the columns of a tile of dq as it has been rounded. A warp adds 64 rows, four
// at a time, of which a lane has eight columns. The rows beyond the last query are zeros.
template <typename T, int kWidth>
__device__ __forceinline__ void sum_rounded_dq(const BackwardShared<T, kWidth>& shared,
                                               const BackwardArguments& a, const DqStep& step,
                                               int rounder) {
  using Shape = BackwardShape<kWidth>;
  static_assert(Shape::kSlabs == 1 && Shape::kSumsOfDq == Shape::kRounders / 32);
  constexpr int kColumns = kPackSize<T>, kLanes = kWidth / kColumns;
  const int warp = rounder / 32, lane = rounder % 32;
  const int column = lane % kLanes * kColumns;
  const auto* const tile = reinterpret_cast<const char*>(shared.rounded_dq);
  float sums[kColumns] = {};
#pragma unroll 2
  for (int i = 0; i < 64; i += 32 / kLanes) {
    const uint32_t offset = slab_offset(warp * 64 + i + lane / kLanes, column);
    const auto dq = load<kColumns>(reinterpret_cast<const T*>(tile + offset));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] += dq[c];
  }
  sum_over_groups<kLanes>(sums);
  if (lane >= kLanes) return;
  const int query_tiles = TiledBand<Shape::kQueries, Shape::kKeys>(a.band).query_tiles();
  const int64_t query_tile = int64_t{step.sequence} * query_tiles + step.query_tile;
  const int64_t row = query_tile * Shape::kSumsOfDq + warp;
  store(a.dq_partial + (row * a.heads + step.head) * kWidth + column,
        Pack<float, kColumns>::of(sums));
}

// Drops a tile's sum, which is in shared memory now and which nobody else reads.
template <typename T, int kWidth>
__device__ __forceinline__ void forget_sum(const BackwardArguments& a, const DqStep& step,
                                           int rounder) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kSize = Shape::kQueries * kWidth, kLine = kCacheLineBytes / sizeof(float);
  const float* const sum = a.dq_sums + dq_tile<kWidth>(a, step) * kSize;
#pragma unroll 1
  for (int i = rounder * kLine; i < kSize; i += Shape::kRounders * kLine) {
    discard_line(sum + i);
  }
}

// Rounds the tiles of dq to which this block adds last. A tile's parts lie as the multipliers'
// accumulators did.
template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void round_dq(BackwardShared<T, kWidth>& shared,
                                         const BackwardArguments& a, const CUtensorMap& dq_map,
                                         int rounder) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kAtOnce = 2;  // of the chunks of eight columns
  RingPosition<1> ring, before_ring;
  const auto round_if_last = [&](const DqStep& step) {
    shared.dq_full.wait(ring.parity);
    ring.advance();
    if (step.rank != step.last_rank) {
      shared.dq_empty.arrive();
      return;
    }
    // The earlier tile has left shared memory.
    if (rounder == 0) wait_until_stores_have_read();
    named_barrier_sync(kRoundBarrier, Shape::kRounders);
    shared.before_full.wait(before_ring.parity);
    before_ring.advance();
    if (step.rank > 0) forget_sum<T, kWidth>(a, step, rounder);
#pragma unroll 1
    for (int i = 0; i < Shape::kMultipliers * kWarpgroup / Shape::kRounders; ++i) {
      const int part = i % 2, thread = i / 2 * Shape::kRounders + rounder;
      const auto* const sums = reinterpret_cast<const float4*>(shared.dq[part]) + thread;
      const auto* const before = reinterpret_cast<const float4*>(shared.dq_before[part]) + thread;
      // The second part is the next slab, or the rows that come next.
      char* const target = reinterpret_cast<char*>(shared.rounded_dq) + part * 64 * kSlabRowBytes;
      const uint32_t offset = slab_offset(accumulator_row(thread), accumulator_column(thread));
#pragma unroll
      for (int first = 0; first < 8; first += kAtOnce) {
        float4 sum[kAtOnce], other[kAtOnce] = {};
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          sum[c] = sums[(first + c) * kWarpgroup];
          if (step.rank > 0) other[c] = before[(first + c) * kWarpgroup];
        }
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          const auto round = [&](float x, float of_x, float y, float of_y) {
            return pack<T>((x + of_x) * a.scale, (y + of_y) * a.scale);
          };
          // Of a row's chunks the swizzle exchanges some.
          char* const chunk = target + (offset ^ (first + c) * 16);
          *reinterpret_cast<uint32_t*>(chunk) = round(sum[c].x, other[c].x, sum[c].y, other[c].y);
          *reinterpret_cast<uint32_t*>(chunk + kEightRowsBytes) =
              round(sum[c].z, other[c].z, sum[c].w, other[c].w);
        }
      }
    }
    shared.before_empty.arrive();
    shared.dq_empty.arrive();
    fence_async_proxy();
    named_barrier_sync(kRoundBarrier, Shape::kRounders);
    if (rounder == 0) {
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        store_box(dq_map, shared.rounded_dq + slab * Shape::kQueries * kSlabWidth,
                  {slab * kSlabWidth, step.head, step.query_tile * Shape::kQueries, step.sequence});
      }
      commit_stores();
    }
    // Nobody waits for it until the block's next step.
    if (a.dq_partial != nullptr) sum_rounded_dq(shared, a, step, rounder);
  };
  for_each_dq_step<kSegments>(shared, a, round_if_last);
  if (rounder == 0) wait_for_stores();
}

}  // namespace jaxllm::hopper
