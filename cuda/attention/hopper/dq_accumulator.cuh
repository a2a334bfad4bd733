// The accumulation of dq over key tiles in global memory, in float32, and its conversion to T.
//
// Every key tile adds to the dq of the queries that it visits. A semaphore for each tile of dq
// counts the additions, and each adder waits for its rank, so that the order, and with it each bit,
// is always the same (see tile_scheduler.cuh):
//
//   CTA with rank 0    bulk_store                          semaphore = 1
//   CTA with rank 1    wait for 1, bulk_reduce_add         semaphore = 2    ...
//   the last CTA       wait, bulk_load of the sum, add in registers, convert, TMA store
//
// The last line is for a head dimension of 64. With 96 and 128 the last CTA adds too, and a
// postprocess kernel converts. Two threads of the producer warpgroup add there, each every other
// tile, from a stage of its own. A single one keeps the consumers waiting while it waits for its
// rank, for the copy from shared memory, and for the end of the addition. With a head dimension of
// 64 one thread adds, and two warps store.
#pragma once

#include "attention/hopper/tile_scheduler.cuh"
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

// Between two polls of a semaphore, each of which takes some ten times as long.
constexpr int kPollNanoseconds = 32;

// The L2 cache discards lines of this size. The workspace begins at a multiple of it.
constexpr int kCacheLineBytes = 128;

// Discards a line of the L2 cache, which is then never written to memory.
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], %1;" ::"l"(line), "n"(kCacheLineBytes) : "memory");
}

// A tile of dq that a CTA adds to.
struct DqTile {
  int sequence, head, query_tile;
  int rank;  // of the CTA's addition
  bool is_last;
};

// The index among the tiles of dq of all sequences and heads.
template <class Traits>
__device__ __forceinline__ int64_t dq_tile_index(const BackwardParams& params, const DqTile& tile) {
  const int query_tiles = TiledMask<Traits::kBlockM, Traits::kBlockN>(params.mask).query_tiles();
  return (int64_t{tile.sequence} * params.heads + tile.head) * query_tiles + tile.query_tile;
}

// Calls visit(tile) for each of the CTA's, in the order in which the consumers take them.
template <bool kSegments, typename T, class Traits, typename Visit>
__device__ __forceinline__ void for_each_dq_tile(BackwardSmem<T, Traits>& smem,
                                                 const BackwardParams& params, const Visit& visit) {
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  PipelineState<2> work_state;
  for (BackwardWorkTile tile; (tile = next_work(smem, work_state)).is_valid();) {
#pragma unroll 1
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int query_tile = tile.query_tiles.begin; query_tile < tile.query_tiles.end;
           ++query_tile) {
        const TileRange seen =
            visible_key_tiles<kSegments>(params, mask, tile.sequence, query_tile);
        visit(DqTile{tile.sequence, head, query_tile, dq_rank(tile.key_tile, seen, params.split),
                     tile.key_tile == last_dq_key_tile(seen, params.split)});
      }
    }
  }
}

// One thread for each stage: adds the stage's tiles of dq to global memory, at their ranks; or,
// where this CTA adds last and converts dq, loads the sum of the others.
template <bool kSegments, typename T, class Traits>
__device__ __forceinline__ void accumulate_dq(BackwardSmem<T, Traits>& smem,
                                              const BackwardParams& params, int stage) {
  constexpr int kDqParts = Traits::kDqParts, kSize = Traits::kBlockM * Traits::kColumns / kDqParts;
  constexpr int kBytes = kSize * sizeof(float);
  float* const own = smem.dq[stage * Traits::kDqBlocks];
  const int first_part = stage * kDqParts;
  PipelineState<Traits::kDqStages> state;
  const auto add = [&](const DqTile& tile) {
    if (Traits::kDqStages > 1 && state.stage != stage) {
      state.advance();
      return;
    }
    const int64_t index = dq_tile_index<Traits>(params, tile);
    float* const sum = params.dq_accum + index * (kDqParts * kSize);
    // Polled before the tile of dq is ready, so that the latency of the load is hidden.
    if (tile.rank > 0) {
      while (load_acquire(params.dq_semaphore + index) != tile.rank) __nanosleep(kPollNanoseconds);
      fence_async_proxy_global();
    }
    if (Traits::kStoresDq && tile.is_last) {
      for (int part = 0; part < kDqParts; ++part) {
        const int offset = part * kSize;
        if (tile.rank > 0) {
          smem.dq_sum_full[part].arrive_and_expect(kBytes);
          bulk_load(own + offset, sum + offset, kBytes, smem.dq_sum_full[part]);
        } else {
          smem.dq_sum_full[part].arrive();
        }
      }
      // Until the sum has been read: the next one may go to the same place.
      for (int part = 0; part < kDqParts; ++part) {
        smem.dq_pipeline.full[first_part + part].wait(state.phase);
      }
      state.advance();
      return;
    }
    for (int part = 0; part < kDqParts; ++part) {
      const int offset = part * kSize;
      smem.dq_pipeline.full[first_part + part].wait(state.phase);
      // The first stores, so that no kernel has to write zeros.
      if (tile.rank == 0) {
        bulk_store(sum + offset, own + offset, kBytes);
      } else {
        bulk_reduce_add(sum + offset, own + offset, kBytes);
      }
      tma_store_commit();
    }
    state.advance();
    tma_store_wait_read<0>();
    for (int part = 0; part < kDqParts; ++part) smem.dq_pipeline.empty[first_part + part].arrive();
    tma_store_wait<0>();
    fence_async_proxy_global();
    store_release(params.dq_semaphore + index, tile.rank + 1);
  };
  for_each_dq_tile<kSegments>(smem, params, add);
}

// Writes the column sums of a converted tile of dq. A warp adds 64 rows, four at a time, of which a
// lane has eight columns. The rows beyond the last query are zeros.
template <typename T, class Traits>
__device__ __forceinline__ void write_dq_column_sums(const BackwardSmem<T, Traits>& smem,
                                                     const BackwardParams& params,
                                                     const DqTile& tile, int store_thread) {
  static_assert(Traits::kColumnBlocks == 1 &&
                Traits::kDqColumnSums == Traits::kDqStoreThreads / 32);
  constexpr int kColumns = kPackSize<T>, kLanes = Traits::kHeadDim / kColumns;
  const int warp = store_thread / 32, lane = store_thread % 32;
  const int column = lane % kLanes * kColumns;
  const auto* const rows = reinterpret_cast<const char*>(smem.dq_store);
  float sums[kColumns] = {};
#pragma unroll 2
  for (int i = 0; i < 64; i += 32 / kLanes) {
    const uint32_t offset = swizzled_offset(warp * 64 + i + lane / kLanes, column);
    const auto dq = load<kColumns>(reinterpret_cast<const T*>(rows + offset));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] += dq[c];
  }
  sum_over_groups<kLanes>(sums);
  if (lane >= kLanes) return;
  const int query_tiles = TiledMask<Traits::kBlockM, Traits::kBlockN>(params.mask).query_tiles();
  const int64_t query_tile = int64_t{tile.sequence} * query_tiles + tile.query_tile;
  const int64_t row = query_tile * Traits::kDqColumnSums + warp;
  store(params.dq_column_sums + (row * params.heads + tile.head) * Traits::kHeadDim + column,
        Pack<float, kColumns>::of(sums));
}

// Discards a tile's accumulator, which is in shared memory now and which nobody else reads.
template <typename T, class Traits>
__device__ __forceinline__ void discard_dq_accum(const BackwardParams& params, const DqTile& tile,
                                                 int store_thread) {
  constexpr int kSize = Traits::kBlockM * Traits::kColumns, kLine = kCacheLineBytes / sizeof(float);
  const float* const sum = params.dq_accum + dq_tile_index<Traits>(params, tile) * kSize;
#pragma unroll 1
  for (int i = store_thread * kLine; i < kSize; i += Traits::kDqStoreThreads * kLine) {
    discard_line(sum + i);
  }
}

// Hands a block of dq to the thread that adds it.
__device__ __forceinline__ void store_dq_accumulator(const float (&dq)[32], float* block) {
  const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    reinterpret_cast<float4*>(block)[j * kWarpgroup + thread] =
        make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// Adds the sum of the others, if there are any, to half a tile of dq, and converts it to shared
// memory.
template <typename T, class Traits>
__device__ __forceinline__ void convert_dq(BackwardSmem<T, Traits>& smem, const float (&dq)[32],
                                           float scale, bool is_alone, int half) {
  static_assert(Traits::kColumnBlocks == 1);
  const int thread = threadIdx.x % kWarpgroup;
  const auto* const sum = reinterpret_cast<const float4*>(smem.dq[half]) + thread;
  const uint32_t rows = smem_address(smem.dq_store) + stmatrix_offset(half, thread);
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

// kDqStoreThreads: stores the converted tiles of dq, and writes their column sums.
template <bool kSegments, typename T, class Traits>
__device__ __forceinline__ void store_dq(BackwardSmem<T, Traits>& smem,
                                         const BackwardParams& params, const CUtensorMap& dq_map,
                                         int store_thread) {
  PipelineState<1> state;
  const auto store_if_last = [&](const DqTile& tile) {
    if (!tile.is_last) return;
    smem.dq_store_pipeline.consumer_wait(state);
    state.advance();
    if (store_thread == 0) {
      tma_store_4d(
          dq_map, smem.dq_store,
          {0, params.q_order.place(tile.head), tile.query_tile * Traits::kBlockM, tile.sequence});
      tma_store_commit();
    }
    if (tile.rank > 0) discard_dq_accum<T, Traits>(params, tile, store_thread);
    if (params.dq_column_sums != nullptr) write_dq_column_sums(smem, params, tile, store_thread);
    if (store_thread == 0) tma_store_wait_read<0>();
    smem.dq_store_pipeline.empty[0].arrive();
  };
  for_each_dq_tile<kSegments>(smem, params, store_if_last);
  if (store_thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
