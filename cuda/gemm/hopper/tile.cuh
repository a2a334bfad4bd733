// How a GEMM on Hopper divides the result among CTAs, and a CTA's tile among its warpgroups.
#pragma once

#include "common/wgmma.cuh"

namespace jaxllm::hopper {

// A CTA has a producer warpgroup and two consumer warpgroups. A consumer has kRowBlocks of a tile's
// blocks of 64 rows, those of one wgmma: two for operands of 16 bits, one for those of 8, whose
// accumulators are twice as many.
//
//   ping-pong      each consumer has a tile of its own: one runs its epilogue while the other has
//                  the tensor cores
//   cooperative    the consumers share a tile of twice the rows: more reuse of B
//
// In a cluster kClusterM CTAs have the same columns and share B; kClusterN CTAs share A.
template <int kBlockN_, int kStages_, int kClusterM_ = 1, int kClusterN_ = 1,
          bool kCooperative_ = false, int kRowBlocks_ = 2, int kBlockK_ = 64>
struct GemmTile {
  static constexpr int kConsumers = 2;
  static constexpr bool kCooperative = kCooperative_;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kRowBlocks = kRowBlocks_;  // of a consumer, 64 rows each
  static constexpr int kConsumerM = kRowBlocks * 64;
  static constexpr int kBlockM = kConsumerM * (kCooperative ? kConsumers : 1);
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kColumnBlocks = kBlockN / kSwizzleColumns;
  static constexpr int kSubtiles = kRowBlocks * kColumnBlocks;  // of a warp: epilogue.cuh
  static constexpr int kStages = kStages_;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr int kCluster = kClusterM * kClusterN;
  // Together the 64K registers of an SM.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kBlockN % kSwizzleColumns == 0);
};

// A consumer's accumulators: of each row block, kBlockN / 2 floats in each thread, in wgmma's
// order.
template <class Tile>
using Accumulators = float[Tile::kRowBlocks][Tile::kBlockN / 2];

// A piece of work that a tile scheduler hands out: the first row and column of a CTA's tile, and
// its K-blocks.
struct WorkTile {
  int row, column;
  int first_k_block, end_k_block;
  int problem = 0;  // of a grouped GEMM
  int part = 0;     // of a tile whose K-blocks are split
};

}  // namespace jaxllm::hopper
