// The order of the saved derivatives of GELU: that of the accumulators, so that they pass no shared
// memory, of whose bandwidth the operands leave little. jaxllm/ops/gemm/tile_order.py converts it.
//
//   matrix of (128 x 192) tiles, row by row, an even number of tiles in a row
//   tile       4 warps            16 rows of each 64
//   warp       6 subtiles         16 x 64 each, as epilogue.cuh numbers them
//   subtile    4 fragments        16 columns each
//   fragment   32 lanes x 16 bytes: of each 8 columns, row lane / 4 and then the row 8 below,
//              columns 2 (lane % 4) and the next
#pragma once

#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

template <class Tile>
struct DgeluOrder {
  static constexpr int kFragments = kSwizzleColumns / 16;  // of a subtile

  static int column_tiles(int64_t columns) {
    return static_cast<int>(divide_up(columns, Tile::kBlockN * Tile::kClusterN)) * Tile::kClusterN;
  }
  static int64_t elements(const GemmShape& shape) {
    static_assert(Tile::kClusterM == 1);
    return divide_up(shape.rows, Tile::kBlockM) * Tile::kBlockM * column_tiles(shape.columns) *
           Tile::kBlockN;
  }

  // The lane's first fragment of a subtile; its others lie 32 further each.
  template <typename T>
  __device__ __forceinline__ static uint4* fragment(const T* dgelu, int column_tiles,
                                                    const WorkTile& work, int warp, int lane,
                                                    const Subtile<Tile>& subtile) {
    const int64_t row = work.row / Tile::kBlockM, column = work.column / Tile::kBlockN;
    const T* const tile = dgelu + (row * column_tiles + column) * (Tile::kBlockM * Tile::kBlockN);
    const T* const of_warp = tile + (warp * Tile::kSubtiles + subtile.index) * kSubtileSize;
    return reinterpret_cast<uint4*>(const_cast<T*>(of_warp)) + lane;
  }
};

}  // namespace jaxllm::hopper
