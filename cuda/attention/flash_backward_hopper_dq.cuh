// The sums of dq over the tiles of keys, in their order, and their rounding: what a thread and two
// warps of the main kernel's copying warpgroup do, and who has multiplied dq in a tile's last turn.
#pragma once

#include "attention/flash_backward_hopper_plan.cuh"
#include "common/fragment.cuh"
#include "common/reduce.cuh"
#include "common/tma.cuh"
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

// Between two looks at a rank, of which each takes some ten times as long.
constexpr int kPollNanoseconds = 32;

// Drops a line of the L2 cache: what stands there has no value any more, and is never written to
// memory.
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], %1;" ::"l"(line), "n"(kCacheLineBytes) : "memory");
}

// A tile of dq that a block adds to.
struct DqStep {
  int sequence, head, query_tile;
  int rank;      // of the block's addition
  bool is_last;  // and whether it is the last
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
  PipelineState<2> tiles;
  for (BackwardTile tile; (tile = read_tile(shared, tiles)).is_there();) {
#pragma unroll 1
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int query_tile = tile.queries.begin; query_tile < tile.queries.end; ++query_tile) {
        const TileRange seen = keys_seen<kSegments>(a, band, tile.sequence, query_tile);
        visit(DqStep{tile.sequence, head, query_tile, rank_of(tile.key_tile, seen, a.split),
                     tile.key_tile == last_to_add(seen, a.split)});
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
  constexpr int kParts = Shape::kParts, kSize = Shape::kQueries * kWidth / kParts;
  constexpr int kBytes = kSize * sizeof(float);
  float* const own = shared.dq[0];
  PipelineState<1> ring;
  const auto add = [&](const DqStep& step) {
    const int64_t tile = dq_tile<kWidth>(a, step);
    float* const sum = a.dq_sums + tile * (kParts * kSize);
    // Before the tile is there, lest it wait for what has long been true to be read.
    if (step.rank > 0) {
      while (load_acquire(a.ranks + tile) != step.rank) __nanosleep(kPollNanoseconds);
      fence_async_proxy_global();
    }
    if (Shape::kRoundsDq && step.is_last) {
      for (int part = 0; part < kParts; ++part) {
        const int offset = part * kSize;
        if (step.rank > 0) {
          shared.sum_full[part].arrive_and_expect(kBytes);
          bulk_load(own + offset, sum + offset, kBytes, shared.sum_full[part]);
        } else {
          shared.sum_full[part].arrive();
        }
      }
      // Until the sum has been read there: the next may be fetched to the same place.
      for (int part = 0; part < kParts; ++part) shared.dq_full[part].wait(ring.phase);
      ring.advance();
      return;
    }
    for (int part = 0; part < kParts; ++part) {
      const int offset = part * kSize;
      shared.dq_full[part].wait(ring.phase);
      // The first writes, so that nobody has to write zeros before.
      if (step.rank == 0) {
        bulk_store(sum + offset, own + offset, kBytes);
      } else {
        bulk_reduce_add(sum + offset, own + offset, kBytes);
      }
      tma_store_commit();
    }
    ring.advance();
    tma_store_wait_read<0>();
    for (int part = 0; part < kParts; ++part) shared.dq_empty[part].arrive();
    tma_store_wait<0>();
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
                                               int storer) {
  using Shape = BackwardShape<kWidth>;
  static_assert(Shape::kSlabs == 1 && Shape::kSumsOfDq == Shape::kStorers / 32);
  constexpr int kColumns = kPackSize<T>, kLanes = kWidth / kColumns;
  const int warp = storer / 32, lane = storer % 32;
  const int column = lane % kLanes * kColumns;
  const auto* const tile = reinterpret_cast<const char*>(shared.rounded_dq);
  float sums[kColumns] = {};
#pragma unroll 2
  for (int i = 0; i < 64; i += 32 / kLanes) {
    const uint32_t offset = swizzled_offset(warp * 64 + i + lane / kLanes, column);
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
                                           int storer) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kSize = Shape::kQueries * kWidth, kLine = kCacheLineBytes / sizeof(float);
  const float* const sum = a.dq_sums + dq_tile<kWidth>(a, step) * kSize;
#pragma unroll 1
  for (int i = storer * kLine; i < kSize; i += Shape::kStorers * kLine) {
    discard_line(sum + i);
  }
}

// Where, in a slab, a thread's row begins of the four matrices that its warp has of the first 16
// columns of the first or second 64 rows. For columns 8 j to 8 j + 15, j even, the address ^ 16 j.
__device__ __forceinline__ uint32_t offset_of_matrices(int half, int thread) {
  const int lane = thread % 32;
  return swizzled_offset(half * 64 + thread / 32 * 16 + lane % 16, lane / 16 * 8);
}

// Hands a half of a tile of dq to who adds it.
__device__ __forceinline__ void store_accumulators(const float (&dq)[32], float* half) {
  const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    reinterpret_cast<float4*>(half)[j * kWarpgroup + thread] =
        make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// Adds what the others have summed, unless they are none, to half a tile of dq, and leaves it in
// shared memory rounded.
template <typename T, int kWidth>
__device__ __forceinline__ void round_dq(BackwardShared<T, kWidth>& shared, const float (&dq)[32],
                                         float scale, bool is_alone, int half) {
  static_assert(BackwardShape<kWidth>::kSlabs == 1);
  const int thread = threadIdx.x % kWarpgroup;
  const auto* const sum = reinterpret_cast<const float4*>(shared.dq[half]) + thread;
  const uint32_t rows = smem_address(shared.rounded_dq) + offset_of_matrices(half, thread);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const own = dq + 4 * (j + i);
      float4 other = {};
      if (!is_alone) other = sum[(j + i) * kWarpgroup];
      words[2 * i] = pack_pair<T>((own[0] + other.x) * scale, (own[1] + other.y) * scale);
      words[2 * i + 1] = pack_pair<T>((own[2] + other.z) * scale, (own[3] + other.w) * scale);
    }
    stmatrix(rows ^ 16 * j, words);
  }
}

// Stores the tiles of dq that are rounded, and adds up their columns.
template <bool kSegments, typename T, int kWidth>
__device__ __forceinline__ void store_rounded_dq(BackwardShared<T, kWidth>& shared,
                                                 const BackwardArguments& a,
                                                 const CUtensorMap& dq_map, int storer) {
  using Shape = BackwardShape<kWidth>;
  PipelineState<1> ring;
  const auto store_if_last = [&](const DqStep& step) {
    if (!step.is_last) return;
    shared.rounded_full.wait(ring.phase);
    ring.advance();
    if (storer == 0) {
      tma_store_4d(dq_map, shared.rounded_dq,
                   {0, step.head, step.query_tile * Shape::kQueries, step.sequence});
      tma_store_commit();
    }
    if (step.rank > 0) forget_sum<T, kWidth>(a, step, storer);
    if (a.dq_partial != nullptr) sum_rounded_dq(shared, a, step, storer);
    if (storer == 0) tma_store_wait_read<0>();
    shared.rounded_empty.arrive();
  };
  for_each_dq_step<kSegments>(shared, a, store_if_last);
  if (storer == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
