// Hopper's matrix products: what the end of a tile knows of whole rows, of which a tile has a part.
//
// The tiles of a row are with several multiprocessors, at the same time: a launch has as many
// blocks as run at once, and takes the tiles of a row one after the other. So a tile is gone
// through twice: once for its part of a row's sums, which it leaves in global memory for the tiles
// beside it, and again with all parts of them. docs/waits.md says why that cannot deadlock.
#pragma once

#include "gemm/matmul_bands.cuh"

namespace jaxllm {
namespace {

// A warp has 16 rows of each 64, and a lane what belongs to one of those 32: its row of the matrix.
template <class Shape, typename T>
__device__ __forceinline__ int row_of_lane(const BandWarp<Shape, T>& warp,
                                           const TileOrigin& origin) {
  return warp.row(origin, warp.lane / kBandRows) + warp.lane % kBandRows;
}

template <class Shape, typename T>
__device__ __forceinline__ float load_rstd(const BandWarp<Shape, T>& warp,
                                           const TileOrigin& origin) {
  const int row = row_of_lane(warp, origin);
  return row < warp.arguments.rows ? __ldg(warp.arguments.norm.rstd + row) : 1.0f;
}

// A lane's value of a row as the accumulators have rows: that of lane / 4, or (`half`) 8 below, of
// the first or the second 64.
__device__ __forceinline__ float value_of_row(float value, int block, int half, int lane) {
  return __shfl_sync(0xffffffff, value, kBandRows * block + 8 * half + lane / 4);
}

// Two sums of each row of a tile.
constexpr int kRowSums = 64;  // of a warp

// Where the warp's are, of the tiles of a row from the first column on, 4 kRowSums apart.
template <class Shape, typename T>
__device__ __forceinline__ float* row_sums_of_warp(const BandWarp<Shape, T>& warp,
                                                   const TileOrigin& origin) {
  const auto& a = warp.arguments;
  const int64_t first_tile = int64_t{origin.row / Shape::kRows} * (a.tiles / a.row_tiles);
  return a.norm.sums + (first_tile * 4 + warp.warp) * kRowSums;
}

// Adds up what the four lanes of a row have of it.
__device__ __forceinline__ float sum_over_lanes_of_row(float sum) {
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  return sum + __shfl_xor_sync(0xffffffff, sum, 2);
}

// Leaves two sums of this tile of each row, of those of lane / 4 and 8 below in each 64. Lanes of a
// row have the sums each.
template <class Shape, typename T>
__device__ __forceinline__ void leave_row_sums(const BandWarp<Shape, T>& warp,
                                               const TileOrigin& origin,
                                               const float (&first)[Shape::kBlocksOf64][2],
                                               const float (&second)[Shape::kBlocksOf64][2]) {
  if (warp.lane % 4 > 0) return;
  float* const of_tile =
      row_sums_of_warp(warp, origin) + origin.column / Shape::kColumns * 4 * kRowSums + warp.lane;
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     of_tile + block * (kRowSums / 2)),
                 "f"(first[block][0]), "f"(second[block][0]), "f"(first[block][1]),
                 "f"(second[block][1])
                 : "memory");
  }
}

// Calls visit(two sums, tile) for what each tile of a row has left of the lane's row, in the order
// of the columns, as soon as it is there. Before, it is NaNs that no arithmetic makes.
template <class Shape, typename T, class Visit>
__device__ __forceinline__ void visit_row_sums(const BandWarp<Shape, T>& warp,
                                               const TileOrigin& origin, const Visit& visit) {
  const int lane = warp.lane, column_tiles = warp.arguments.tiles / warp.arguments.row_tiles;
  const float* const mine = row_sums_of_warp(warp, origin) + lane / kBandRows * (kRowSums / 2) +
                            lane % 8 * 4 + lane / 8 % 2 * 2;
  constexpr int kAtOnce = 4;
  for (int first = 0; first < column_tiles; first += kAtOnce) {
    float2 sums[kAtOnce] = {};
    bool is_missing;
    do {
      is_missing = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= column_tiles) break;
        asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                     : "=f"(sums[i].x), "=f"(sums[i].y)
                     : "l"(mine + (first + i) * 4 * kRowSums)
                     : "memory");
      }
#pragma unroll
      for (const float2& sum : sums) {
        is_missing |=
            __float_as_uint(sum.x) == kMissingRowSum || __float_as_uint(sum.y) == kMissingRowSum;
      }
      // A fraction of what a load takes: time for the block's other warps.
      if (is_missing) __nanosleep(64);
    } while (is_missing);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < column_tiles) visit(sums[i], first + i);
    }
  }
  __syncwarp();
}

}  // namespace
}  // namespace jaxllm
