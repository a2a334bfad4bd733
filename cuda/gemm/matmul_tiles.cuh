// Hopper's matrix products: how the result is divided among blocks, and the copier, which brings
// them their operands.
#pragma once

#include "common/pipeline.cuh"
#include "common/tile_order.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "gemm/matmul_hopper.h"

namespace jaxllm {
namespace {

using namespace hopper;

// How a kernel divides its work. A tile has 128 rows.
template <int kColumns_, int kStages_, int kClusterRows_, int kClusterColumns_>
struct TileShape {
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;
  // Blocks of a cluster that have the same columns, and so the same b; and the same rows and a.
  static constexpr int kClusterRows = kClusterRows_;
  static constexpr int kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;

  static constexpr int kMultipliers = 2;
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr int kBlocksOf64 = 2;
  static constexpr int kRows = kBlocksOf64 * 64;
  static constexpr int kDepth = 64;
  static constexpr int kSlabs = kColumns / kSwizzleColumns;
  static constexpr int kBands = kBlocksOf64 * kSlabs;  // of a tile, for each warp
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 2;
  // Warps that say, in each block of the cluster, that they are done with a stage.
  static constexpr int kReaders = 4 * kCluster;
  // Together the 64K registers of a multiprocessor.
  static constexpr int kCopierRegisters = 24;
  static constexpr int kMultiplierRegisters = 240;
  static_assert(kColumns % kSwizzleColumns == 0);
};

// A warp finishes 16 rows by 64 columns at a time, a band of its tile, in a slot of its own.
constexpr int kBandRows = 16;
constexpr int kBandSize = kBandRows * kSwizzleColumns;
constexpr int kSlots = 4;

template <typename T, class Shape>
struct MatmulShared {
  T a[Shape::kStages][Shape::kRows * Shape::kDepth];
  T b[Shape::kStages][Shape::kColumns * Shape::kDepth];
  T slots[Shape::kMultipliers][4][kSlots][kBandSize];
  float sums[Shape::kMultipliers][4][kSwizzleColumns];  // of columns, by warp
  Barrier full[Shape::kStages], empty[Shape::kStages];
  Barrier saved[Shape::kMultipliers][4][kSlots];  // a band has arrived
  Barrier turn[Shape::kMultipliers];              // to multiply
};

template <typename T>
struct MatmulArguments {
  int rows, columns;     // of the result
  int steps;             // of kDepth
  int row_tiles, tiles;  // of a cluster
  int row_tiles_at_a_time;
  const T* bias;  // null for none
  float* partial;
  float* wide_out;
  T* slopes;          // see gemm/matmul_hopper.h; null for none
  int slope_columns;  // of tiles
  float* head_sums;   // (sequences, columns / 64, tokens)
  int tokens;         // of a sequence
  SoftmaxRows softmax;
  NormRows norm;
};

// The first row and column of a block's tile, by the number of its cluster's.
struct TileOrigin {
  int row, column;
};

template <class Shape, typename T>
__device__ __forceinline__ TileOrigin decode_tile(const MatmulArguments<T>& arguments, int tile,
                                                  int rank) {
  const TilePlace place =
      place_tile(tile, arguments.row_tiles, arguments.tiles / arguments.row_tiles,
                 arguments.row_tiles_at_a_time);
  return {(place.row * Shape::kClusterRows + rank % Shape::kClusterRows) * Shape::kRows,
          (place.column * Shape::kClusterColumns + rank / Shape::kClusterRows) * Shape::kColumns};
}

template <class Shape>
constexpr int kTileSize = Shape::kRows * Shape::kColumns;

// A block's tile of the slopes: as many numbers as the tile has, in the order of its accumulators.
template <class Shape, typename T>
__device__ __forceinline__ T* tile_of_slopes(const MatmulArguments<T>& arguments,
                                             const TileOrigin& origin) {
  const int64_t row = origin.row / Shape::kRows, column = origin.column / Shape::kColumns;
  return arguments.slopes + (row * arguments.slope_columns + column) * kTileSize<Shape>;
}

// Copies one operand's slice of a stage: `kExtent` rows of the result for a, or columns for b, by
// kDepth. kTurned: the depth runs across the rows of the operand in memory. Of kShares blocks that
// need the slice, each copies one part into all of those in `blocks`.
template <int kExtent, bool kTurned, int kShares, typename T>
__device__ __forceinline__ void load_slice(T* target, const CUtensorMap& map, int first, int depth,
                                           int share, uint16_t blocks, const Barrier& full) {
  constexpr int kBoxRows = (kTurned ? 64 : kExtent) / kShares;
  constexpr int kBoxes = kTurned ? kExtent / kSwizzleColumns : 1;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    T* const to = target + (box * 64 + share * kBoxRows) * kSwizzleColumns;
    const int column = kTurned ? first + box * kSwizzleColumns : depth;
    const int row = (kTurned ? depth : first) + share * kBoxRows;
    if constexpr (kShares == 1) {
      tma_load_2d(to, map, column, row, full);
    } else {
      tma_load_2d(to, map, column, row, full, blocks);
    }
  }
}

template <class Shape, bool kTurnA, bool kTurnB, typename T>
__device__ __forceinline__ void copy_operands(MatmulShared<T, Shape>& shared,
                                              const MatmulArguments<T>& arguments,
                                              const CUtensorMap& a_map, const CUtensorMap& b_map,
                                              int rank) {
  const int rank_row = rank % Shape::kClusterRows, rank_column = rank / Shape::kClusterRows;
  uint16_t same_rows = 0, same_columns = 0;  // the blocks that need the same a, and the same b
  for (int i = 0; i < Shape::kClusterColumns; ++i) {
    same_rows |= 1 << (rank_row + i * Shape::kClusterRows);
  }
  for (int i = 0; i < Shape::kClusterRows; ++i) {
    same_columns |= 1 << (i + rank_column * Shape::kClusterRows);
  }
  PipelineState<Shape::kStages> ring;
  const int clusters = gridDim.x / Shape::kCluster;
  for (int tile = blockIdx.x / Shape::kCluster; tile < arguments.tiles; tile += clusters) {
    const TileOrigin origin = decode_tile<Shape>(arguments, tile, rank);
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      const int depth = step * Shape::kDepth;
      Barrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_and_expect(Shape::kStageBytes);
      load_slice<Shape::kRows, kTurnA, Shape::kClusterColumns>(
          shared.a[ring.stage], a_map, origin.row, depth, rank_column, same_rows, full);
      load_slice<Shape::kColumns, kTurnB, Shape::kClusterRows>(
          shared.b[ring.stage], b_map, origin.column, depth, rank_row, same_columns, full);
      ring.advance();
    }
  }
}

}  // namespace
}  // namespace jaxllm
