// The rasterization order of tiles: in which order CTAs take the tiles of a GEMM, or of heads.
#pragma once

#include <cuda_runtime.h>

namespace jaxllm {

struct TileCoord {
  int row, column;  // in tiles
};

// The coordinates of tile number `tile`. The order takes groups of `group_rows` row tiles (GROUP_M
// in Triton), column by column, so that the operands of the tiles in flight fit the L2 cache:
//
//   0 2 4 6   group_rows = 2: tiles of a 4 x 4 grid, numbered
//   1 3 5 7
//   8 10 12 14
//   9 11 13 15
__device__ __forceinline__ TileCoord tile_coord(int tile, int row_tiles, int column_tiles,
                                                int group_rows) {
  const int first_row = tile / (group_rows * column_tiles) * group_rows;
  const int rows = min(group_rows, row_tiles - first_row);
  const int in_group = tile - first_row * column_tiles;
  return {first_row + in_group % rows, in_group / rows};
}

}  // namespace jaxllm
