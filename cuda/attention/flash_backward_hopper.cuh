// The gradient in two or three kernels. The first writes, for each query, the two numbers that the
// main one needs beside its row: lse, and delta = sum(out * dout). The main kernel holds a tile of
// keys, and walks over the queries that see it, of all the heads that share it. With keys as rows,
// so that what the threads compute in registers is the left operand of the products with dout and
// with q:
//
//   s = k q^T       p = 2^(c s - lse)         dv += p dout
//   dp = v dout^T   ds = p (dp - delta)       dk += ds q        dq += ds^T k
//
// dv and dk stay in registers. dq is summed over the tiles of keys in global memory, in float32, by
// the copy engine. Each tile of dq counts its additions, and each adder waits for its rank, so that
// the order, and with it each bit, is always the same. For narrow heads the last of them adds what
// the others have summed to its own part and rounds, in registers; else a third kernel rounds.
//
// Five products, where a kernel of its own for dq would need seven: that would have to run at 90%
// of the tensor cores' peak to be as fast as this at 65%. The price is 4 bytes through the L2 cache
// for each query, head, column and tile of keys: about 1.5 TB/s where the products are at their
// best.
//
// Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Shah et al., "FlashAttention-3"
// (arXiv:2407.08608).
#pragma once

#include "attention/flash_backward_hopper_narrow.cuh"
#include "attention/flash_backward_hopper_wide.cuh"
#include "common/dependent_launch.cuh"

namespace jaxllm::hopper {

// The copies of one tile of keys and what it walks over, each when there is room for it: of narrow
// heads, which have two buffers of keys, the keys before the first queries, else after them.
template <typename T, int kWidth>
struct BackwardCopier {
  using Shape = BackwardShape<kWidth>;
  BackwardShared<T, kWidth>& shared;
  const BackwardArguments& a;
  const CUtensorMap &q_map, &k_map, &v_map, &dout_map;
  PipelineState<Shape::kKeyStages> k_ring = {}, v_ring = {};
  PipelineState<Shape::kQueryStages> q_ring = {};
  PipelineState<Shape::kStages> dout_ring = {};

  // Of the keys or of the values.
  __device__ __forceinline__ void load_key_rows(const BackwardTile& tile, const CUtensorMap& map,
                                                T* target, Barrier& full) {
    full.arrive_and_expect(Shape::kKeys * kWidth * sizeof(T));
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      tma_load_4d(
          target + slab * Shape::kKeys * kSwizzleColumns, map,
          {slab * kSwizzleColumns, tile.kv_head, tile.key_tile * Shape::kKeys, tile.sequence},
          full);
    }
  }

  __device__ __forceinline__ void load_keys(const BackwardTile& tile) {
    const int stage = k_ring.stage;
    shared.k_empty[stage].wait(k_ring.phase ^ 1);
    load_key_rows(tile, k_map, shared.k[stage], shared.k_full[stage]);
    k_ring.advance();
  }
  __device__ __forceinline__ void load_values(const BackwardTile& tile) {
    const int stage = v_ring.stage;
    shared.v_empty[stage].wait(v_ring.phase ^ 1);
    load_key_rows(tile, v_map, shared.v[stage], shared.v_full[stage]);
    v_ring.advance();
  }

  // Of q or dout, with the number of each query, which `numbers` has.
  __device__ __forceinline__ void load_query_rows(const CUtensorMap& map, int sequence, int head,
                                                  int query, T* target, const float* numbers,
                                                  float* target_of_numbers, Barrier& full) {
    constexpr int kBytesOfNumbers = Shape::kQueries * sizeof(float);
    full.arrive_and_expect(Shape::kQueries * kWidth * sizeof(T) + kBytesOfNumbers);
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      tma_load_4d(target + slab * Shape::kQueries * kSwizzleColumns, map,
                  {slab * kSwizzleColumns, head, query, sequence}, full);
    }
    bulk_load(target_of_numbers, numbers, kBytesOfNumbers, full);
  }

  // With the two numbers of each, which begin at `row`.
  __device__ __forceinline__ void load_queries(int sequence, int head, int query, int64_t row) {
    int stage = q_ring.stage;
    shared.q_empty[stage].wait(q_ring.phase ^ 1);
    load_query_rows(q_map, sequence, head, query, shared.q[stage], a.lse + row, shared.lse[stage],
                    shared.q_full[stage]);
    q_ring.advance();
    stage = dout_ring.stage;
    shared.dout_empty[stage].wait(dout_ring.phase ^ 1);
    load_query_rows(dout_map, sequence, head, query, shared.dout[stage], a.delta + row,
                    shared.delta[stage], shared.dout_full[stage]);
    dout_ring.advance();
  }

  __device__ __forceinline__ void copy(const BackwardTile& tile) {
    const int padded_queries =
        TiledBand<Shape::kQueries, Shape::kKeys>(a.band).query_tiles() * Shape::kQueries;
    const int group = a.heads / a.kv_heads;
    if (Shape::kIsNarrow) load_keys(tile);
    bool has_values = false;
    const auto load_others = [&] {
      if (!Shape::kIsNarrow) load_keys(tile);
      load_values(tile);
      has_values = true;
    };
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
      const int64_t rows = (int64_t{tile.sequence} * a.heads + head) * padded_queries;
      for (int i = tile.queries.begin; i < tile.queries.end; ++i) {
        const int query = i * Shape::kQueries;
        load_queries(tile.sequence, head, query, rows + query);
        if (!has_values) load_others();
      }
    }
    if (!has_values) load_others();
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
  PipelineState<2> tiles;
  int ticket = atomicAdd(a.tickets, 1);
  while (ticket < a.items) {
    const BackwardItem item = take_item(a, band.key_tiles(), ticket);
    const BackwardTile tile{item.sequence, item.kv_head, item.key_tile,
                            queries_seen<kSegments>(a, band, item.sequence, item.key_tile)};
    tell_of_tile(shared, tiles, tile);
    copier.copy(tile);
    ticket = atomicAdd(a.tickets, 1);
  }
  tell_of_tile(shared, tiles, {0, 0, -1, {0, 0}});
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
      shared.v_full[stage].init(1);
      shared.v_empty[stage].init(Shape::kMultipliers);
    }
    for (int stage = 0; stage < Shape::kQueryStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(Shape::kReaders);
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(Shape::kReaders);
    }
    for (int part = 0; part < Shape::kParts; ++part) {
      shared.ds_full[part].init(Shape::kWarps);
      shared.ds_empty[part].init(Shape::kDqWarps);
      // Every thread arrives: the copy engine may write next where it wrote or read.
      shared.dq_full[part].init(Shape::kDqWarps * 32);
      shared.dq_empty[part].init(1);
      shared.sum_full[part].init(1);
    }
    shared.rounded_full.init(Shape::kDqWarps * 32);
    shared.rounded_empty.init(Shape::kStorers);
    for (int stage = 0; stage < 2; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(Shape::kTileReaders);
    }
    fence_barrier_init();
  }
  wait_on_dependent_grids();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<Shape::kCopierRegisters>();
    if (threadIdx.x == 0) copy_backward<kSegments>(shared, a, q_map, k_map, v_map, dout_map);
    if (threadIdx.x == 32) add_dq<kSegments>(shared, a);
    if constexpr (Shape::kRoundsDq) {
      const int storer = static_cast<int>(threadIdx.x) - (kWarpgroup - Shape::kStorers);
      if (storer >= 0) store_rounded_dq<kSegments>(shared, a, dq_map, storer);
    }
  } else if (warpgroup > Shape::kMultipliers) {
    if constexpr (Shape::kIsNarrow) {
      warpgroup_reg_dealloc<Shape::kDqRegisters>();
      multiply_dq<kSegments>(shared, a);
    }
  } else {
    warpgroup_reg_alloc<Shape::kMultiplierRegisters>();
    if constexpr (Shape::kIsNarrow) {
      multiply_narrow<kSegments>(shared, a, dk_map, dv_map, warpgroup - 1);
    } else {
      multiply_wide<kSegments>(shared, a, dk_map, dv_map, warpgroup - 1);
    }
  }
#endif
}

}  // namespace jaxllm::hopper
