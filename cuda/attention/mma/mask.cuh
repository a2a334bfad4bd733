// The mask on an accumulator of scores.
#pragma once

#include "attention/mask.cuh"
#include "attention/mma/tile.cuh"

namespace jaxllm::attention {

// Writes `value` where the mask hides a column from a row of the accumulator, whose element (0, 0)
// is at first_row and first_column.
template <Rows kOwn, int kMTiles, int kNTiles>
__device__ __forceinline__ void apply_mask(float (&acc)[kMTiles][kNTiles][4], const Mask& mask,
                                           int first_row, int first_column, float value) {
  constexpr bool kRowsAreQueries = kOwn == Rows::kQueries;
  const int32_t* row_segments = kRowsAreQueries ? mask.query_segments : mask.key_segments;
  const int32_t* column_segments = kRowsAreQueries ? mask.key_segments : mask.query_segments;
  const int rows = kRowsAreQueries ? mask.queries : mask.keys;
  const int columns = kRowsAreQueries ? mask.keys : mask.queries;
  const int lane = threadIdx.x % 32;
  first_row += lane / 4;
  first_column += 2 * (lane % 4);

  int segments[kMTiles][2] = {};
  if (row_segments != nullptr) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 16 * m + 8 * h;
        if (row < rows) segments[m][h] = row_segments[row];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = first_column + 8 * n + c;
      int segment = 0;
      if (column_segments != nullptr && column < columns) segment = column_segments[column];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = first_row + 16 * m + 8 * h;
          const int query = kRowsAreQueries ? row : column, key = kRowsAreQueries ? column : row;
          const bool seen =
              key < mask.keys && mask.in_window(query, key) && segment == segments[m][h];
          if (!seen) acc[m][n][2 * h + c] = value;
        }
      }
    }
  }
}

}  // namespace jaxllm::attention
