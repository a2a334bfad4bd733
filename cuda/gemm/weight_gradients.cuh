// Gradients of weights on Hopper: a product whose result has fewer tiles than the GPU has
// multiprocessors, and whose depth they share.
//
// Every block has work of the same length. Of a tile's depth, as many blocks take a whole length as
// there are blocks for each tile. What is left of it, its rest, is for the blocks that remain, each
// of which takes the rests of some tiles one after the other; and the rests of the last tiles, laid
// end to end, are cut into equal shares for these blocks. So many blocks go through the same tokens
// side by side at any time, and what one has brought into the L2 cache the others find there.
//
// What a block has of a tile goes to memory in float32, in the order of the tensor cores'
// accumulators, and a second kernel adds these parts in a fixed order.
//
// In a block one thread copies and two warpgroups multiply, each for half of a tile's rows.
#pragma once

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/hopper_launch.h"
#include "common/pipeline.cuh"
#include "common/tensor_map.h"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "gemm/weight_gradients.h"

// For other GPUs the kernel is empty, and nothing uses what comes here.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm {
namespace {

using namespace hopper;

struct GradientTile {
  static constexpr int kColumns = 192;
  static constexpr int kMultipliers = 2;  // warpgroups, each of 128 of its rows
  static constexpr int kBlocksOf64 = 2;   // of rows, for each
  static constexpr int kRows = kMultipliers * kBlocksOf64 * 64;
  static constexpr int kDepth = 64;
  static constexpr int kStages = 4;
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr int kSlabSize = kDepth * kSwizzleColumns;  // of an operand
  static constexpr int kRowSlabs = kRows / kSwizzleColumns,
                       kColumnSlabs = kColumns / kSwizzleColumns;
  static constexpr int kStageBytes = (kRowSlabs + kColumnSlabs) * kSlabSize * 2;
  static constexpr int kSize = kRows * kColumns;
  // Together the 64K registers of a multiprocessor.
  static constexpr int kCopierRegisters = 24, kMultiplierRegisters = 240;
};

template <typename T>
struct GradientShared {
  T x[GradientTile::kStages][GradientTile::kRowSlabs][GradientTile::kSlabSize];
  T dout[GradientTile::kStages][GradientTile::kColumnSlabs][GradientTile::kSlabSize];
  Barrier full[GradientTile::kStages], empty[GradientTile::kStages];
};

// Of the two gradients.
struct GradientMaps {
  CUtensorMap x[2], dout[2];
};

// The parts that a tile's rest has: so many, numbered from the first on.
struct RestParts {
  int first, count;
};

// How tiles and their depth, counted in steps, are divided among blocks.
struct GradientPlan {
  int tiles;
  int steps;        // of a tile
  int length;       // steps of a block
  int lengths;      // of them in each tile's depth, for as many blocks
  int rest;         // steps of a tile that remain, fewer than a length
  int rest_blocks;  // blocks for the rests
  int whole_rests;  // of so many tiles, one after the other, a block of these has the whole rest
  int share;        // steps that it has of the rests of the tiles after those
  int second_tile;  // the first of the second gradient
  int row_tiles[2];

  __host__ __device__ int blocks() const { return tiles * lengths + rest_blocks; }
  // The first of the tiles whose rests are cut.
  __host__ __device__ int first_cut() const { return rest_blocks * whole_rests; }
  // Parts are numbered: the lengths of all tiles, then whole rests, then what rests are cut into. A
  // cut goes on to the next tile, the next block or both, so that no two have the same sum of them.
  __host__ __device__ int length_part(int tile, int length) const { return length * tiles + tile; }
  __host__ __device__ int rest_part(int tile) const { return tiles * lengths + tile; }
  __host__ __device__ int cut_part(int tile, int rest_block) const {
    return rest_part(tile) + rest_block;
  }
  __host__ __device__ int parts() const { return tiles * (lengths + 1) + rest_blocks; }

  __host__ __device__ RestParts rest_parts(int tile) const {
    if (tile < first_cut()) return {rest_part(tile), 1};
    if (rest == 0) return {rest_part(tile), 0};
    const int first = (tile - first_cut()) * rest, last = first + rest - 1;
    return {cut_part(tile, first / share), last / share - first / share + 1};
  }
};

// The part of a tile that a block makes, and its number.
struct GradientPart {
  int tile, number, first_step, end_step;
};

// Calls work(part) for each part of this block.
template <class Work>
__device__ __forceinline__ void for_each_part(const GradientPlan& plan, const Work& work) {
  const int rest_block = static_cast<int>(blockIdx.x) - plan.tiles * plan.lengths;
  if (rest_block < 0) {
    const int tile = blockIdx.x % plan.tiles, length = blockIdx.x / plan.tiles;
    const int first = length * plan.length;
    work(GradientPart{tile, plan.length_part(tile, length), first,
                      min(first + plan.length, plan.steps)});
    return;
  }
  const int first_of_rest = plan.lengths * plan.length;
  for (int i = 0; i < plan.whole_rests; ++i) {
    const int tile = i * plan.rest_blocks + rest_block;
    work(GradientPart{tile, plan.rest_part(tile), first_of_rest, plan.steps});
  }
  const int end = min((rest_block + 1) * plan.share, (plan.tiles - plan.first_cut()) * plan.rest);
  for (int at = rest_block * plan.share; at < end;) {
    const int tile = plan.first_cut() + at / plan.rest, skipped = at % plan.rest;
    const int steps = min(plan.rest - skipped, end - at);
    const int first = first_of_rest + skipped;
    work(GradientPart{tile, plan.cut_part(tile, rest_block), first, first + steps});
    at += steps;
  }
}

// Where a tile lies: in which gradient, and from which row and column on.
struct GradientOrigin {
  int gradient, row, column;
};

__device__ __forceinline__ GradientOrigin find_tile(const GradientPlan& plan, int tile) {
  const int gradient = tile >= plan.second_tile;
  const int place = gradient ? tile - plan.second_tile : tile;
  const int row_tiles = plan.row_tiles[gradient];
  return {gradient, place % row_tiles * GradientTile::kRows,
          place / row_tiles * GradientTile::kColumns};
}

// Of a tile's part, the floats from the 8 x 8 of a warpgroup's accumulator on that begin at row
// 64 block + 16 warp + 8 half and column 8 j: row by row, two in each lane.
__host__ __device__ __forceinline__ constexpr int part_offset(int multiplier, int warp, int block,
                                                              int j, int half) {
  constexpr int kEights = GradientTile::kColumns / 8;
  return ((((multiplier * 4 + warp) * GradientTile::kBlocksOf64 + block) * 2 + half) * kEights +
          j) *
         64;
}

template <typename T>
__device__ __forceinline__ void copy_gradient_operands(GradientShared<T>& shared,
                                                       const GradientMaps& maps,
                                                       const GradientPlan& plan) {
  using Tile = GradientTile;
  PipelineState<Tile::kStages> ring;
  for_each_part(plan, [&](const GradientPart& part) {
    const GradientOrigin origin = find_tile(plan, part.tile);
    const CUtensorMap& x = maps.x[origin.gradient];
    const CUtensorMap& dout = maps.dout[origin.gradient];
#pragma unroll 1
    for (int step = part.first_step; step < part.end_step; ++step) {
      const int token = step * Tile::kDepth;
      Barrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_and_expect(Tile::kStageBytes);
#pragma unroll
      for (int slab = 0; slab < Tile::kRowSlabs; ++slab) {
        tma_load_2d(shared.x[ring.stage][slab], x, origin.row + slab * kSwizzleColumns, token,
                    full);
      }
#pragma unroll
      for (int slab = 0; slab < Tile::kColumnSlabs; ++slab) {
        tma_load_2d(shared.dout[ring.stage][slab], dout, origin.column + slab * kSwizzleColumns,
                    token, full);
      }
      ring.advance();
    }
  });
}

template <typename T>
__device__ __forceinline__ void multiply_parts(GradientShared<T>& shared, const GradientPlan& plan,
                                               float* partial, int multiplier) {
  using Tile = GradientTile;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  PipelineState<Tile::kStages> ring;
  for_each_part(plan, [&](const GradientPart& part) {
    float sums[Tile::kBlocksOf64][Tile::kColumns / 2];
#pragma unroll
    for (auto& of_block : sums) {
#pragma unroll
      for (float& sum : of_block) sum = 0.0f;
    }
    warpgroup_fence_operand(sums[0]);
    warpgroup_fence_operand(sums[1]);
    int last = 0;  // the stage of the step before
#pragma unroll 1
    for (int step = part.first_step; step < part.end_step; ++step) {
      shared.full[ring.stage].wait(ring.phase);
      constexpr int kSlabBytes = Tile::kSlabSize * 2;
      const uint64_t x = mn_major_descriptor(
          smem_address(shared.x[ring.stage][multiplier * Tile::kBlocksOf64]), kSlabBytes);
      const uint64_t dout = mn_major_descriptor(smem_address(shared.dout[ring.stage]), kSlabBytes);
      constexpr uint32_t kStep = kMnMajorStepBytes >> 4;
      warpgroup_arrive();
#pragma unroll
      for (int depth = 0; depth < Tile::kDepth / 16; ++depth) {
#pragma unroll
        for (int block = 0; block < Tile::kBlocksOf64; ++block) {
          wgmma<T, Major::kMN, Major::kMN>(sums[block],
                                           x + depth * kStep + block * (kSlabBytes >> 4),
                                           dout + depth * kStep, true);
        }
      }
      warpgroup_commit_batch();
      // The products of the step before are done: those of this one follow them without a gap.
      warpgroup_wait<1>(sums[0], sums[1]);
      if (step > part.first_step) arrive_as_warp(shared.empty[last]);
      last = ring.stage;
      ring.advance();
    }
    warpgroup_wait<0>(sums[0], sums[1]);
    arrive_as_warp(shared.empty[last]);

    float* const out = partial + int64_t{part.number} * Tile::kSize;
#pragma unroll
    for (int block = 0; block < Tile::kBlocksOf64; ++block) {
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 4; ++i) {
        const int offset = part_offset(multiplier, warp, block, i / 2, i % 2);
        *reinterpret_cast<float2*>(out + offset + 2 * lane) = {sums[block][2 * i],
                                                               sums[block][2 * i + 1]};
      }
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(GradientTile::kThreads, 1)
    weight_gradients_kernel(const __grid_constant__ GradientMaps maps,
                            const __grid_constant__ GradientPlan plan, float* partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = GradientTile;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<GradientShared<T>*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(4 * Tile::kMultipliers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    warpgroup_reg_dealloc<Tile::kCopierRegisters>();
    if (threadIdx.x == 0) copy_gradient_operands(shared, maps, plan);
  } else {
    warpgroup_reg_alloc<Tile::kMultiplierRegisters>();
    multiply_parts(shared, plan, partial, warp / 4 - 1);
  }
  launch_dependent_grids();
#endif
}

template <typename T>
struct GradientOutputs {
  T* dweight[2];
  int rows[2], columns[2];
};

constexpr int kSumThreads = 256;

// Adds the parts of all tiles: a thread those of eight neighbours in a row.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_gradient_parts_kernel(const float* partial, const __grid_constant__ GradientPlan plan,
                              const __grid_constant__ GradientOutputs<T> outputs) {
  using Tile = GradientTile;
  constexpr int kEights = Tile::kColumns / 8;
  constexpr int kBlocks = Tile::kRows * kEights / kSumThreads;  // of a tile
  const int tile = blockIdx.x / kBlocks;
  const int index = blockIdx.x % kBlocks * kSumThreads + threadIdx.x;
  // The lanes of a warp have four groups of columns of eight rows.
  const int j = index / 32 % (kEights / 4) * 4 + index % 4;
  const int row_in_eight = index / 4 % 8, eight_rows = index / 32 / (kEights / 4);
  const int multiplier = eight_rows / 16, block = eight_rows / 8 % 2;
  const int warp = eight_rows / 2 % 4, half = eight_rows % 2;
  const GradientOrigin origin = find_tile(plan, tile);
  const int row = origin.row + eight_rows * 8 + row_in_eight, column = origin.column + 8 * j;
  const RestParts rests = plan.rest_parts(tile);
  const int parts = plan.lengths + rests.count;
  const int rows = outputs.rows[origin.gradient], columns = outputs.columns[origin.gradient];
  wait_on_dependent_grids();
  if (row >= rows || column >= columns) return;

  partial += part_offset(multiplier, warp, block, j, half) + 8 * row_in_eight;
  float sums[8] = {};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const int number =
        part < plan.lengths ? plan.length_part(tile, part) : rests.first + part - plan.lengths;
    const float* const from = partial + int64_t{number} * Tile::kSize;
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
  *reinterpret_cast<uint4*>(outputs.dweight[origin.gradient] + int64_t{row} * columns + column) =
      make_uint4(pack_pair<T>(sums[0], sums[1]), pack_pair<T>(sums[2], sums[3]),
                 pack_pair<T>(sums[4], sums[5]), pack_pair<T>(sums[6], sums[7]));
}

}  // namespace
}  // namespace jaxllm
