// In which order blocks take the tiles of a matrix product, or of heads.
#pragma once

#include <cuda_runtime.h>

namespace jaxllm {

struct TilePlace {
  int row, column;  // counted in tiles
};

// The place of the tile with this number. A group of row tiles at a time, column by column, so that
// what the blocks at work read lies in the L2 cache.
__device__ __forceinline__ TilePlace place_tile(int tile, int row_tiles, int column_tiles,
                                                int row_tiles_at_a_time) {
  const int first_of_group = tile / (row_tiles_at_a_time * column_tiles) * row_tiles_at_a_time;
  const int in_group = min(row_tiles_at_a_time, row_tiles - first_of_group);
  const int rest = tile - first_of_group * column_tiles;
  return {first_of_group + rest % in_group, rest / in_group};
}

}  // namespace jaxllm
