// Sums of the result's columns in an epilogue, such as the gradient of a bias.
#pragma once

#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

// Adds 16 values over the eight lanes that are equal modulo 4, in a fixed order. Returns two of the
// sums: those of values 2 i and 2 i + 1, where i = lane / 4 with its bits reversed. Each step
// halves the values: a lane keeps one half, and adds the partner's.
__device__ __forceinline__ float2 sum_over_rows(const float (&values)[16], int lane) {
  float eight[8], four[4], two[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float keep = lane & 4 ? values[i + 8] : values[i];
    const float give = lane & 4 ? values[i] : values[i + 8];
    eight[i] = keep + __shfl_xor_sync(0xffffffff, give, 4);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = lane & 8 ? eight[i + 4] : eight[i];
    const float give = lane & 8 ? eight[i] : eight[i + 4];
    four[i] = keep + __shfl_xor_sync(0xffffffff, give, 8);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = lane & 16 ? four[i + 2] : four[i];
    const float give = lane & 16 ? four[i] : four[i + 2];
    two[i] = keep + __shfl_xor_sync(0xffffffff, give, 16);
  }
  return {two[0], two[1]};
}

// The first of the two columns, of 64, whose sums sum_over_rows() returns.
__device__ __forceinline__ int summed_column(int lane) {
  const int j = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);  // the bits of lane / 4 reversed
  return 8 * j + lane % 4 * 2;
}

// Adds a pair, the first of its columns or a further one, to what a lane has of a column block.
template <class Tile>
__device__ __forceinline__ void add_to_columns(float (&sums)[16], const Subtile<Tile>& subtile,
                                               int j, int half, float2 pair) {
  const bool is_first = subtile.row_block() == 0 && half == 0;
  sums[2 * j] = is_first ? pair.x : sums[2 * j] + pair.x;
  sums[2 * j + 1] = is_first ? pair.y : sums[2 * j + 1] + pair.y;
}

template <class Tile, typename T>
struct ColumnSumStorage : SubtileStorage<Tile, T> {
  float sums[Tile::kConsumers][4][kSwizzleColumns];  // by warp
};
template <class Tile, typename T>
using ColumnSumWarp = EpilogueWarp<Tile, T, ColumnSumStorage<Tile, T>>;

// Writes the sums of a column block over the rows of a tile to row `work.row` / kBlockM of
// `partial`, in two steps: all four warps call stage_column_sums(), meet, and call
// store_column_sums(). They meet again before the next ones are staged. A lane's 16 `sums` are over
// its rows, of columns 8 j + 2 (lane % 4) and the next. `Warp` is an EpilogueWarp whose storage has
// the `sums` of ColumnSumStorage.
template <class Warp>
__device__ __forceinline__ void stage_column_sums(const Warp& warp, const float (&sums)[16]) {
  const float2 two = sum_over_rows(sums, warp.lane);
  float* const of_warp = warp.smem.sums[warp.consumer][warp.warp];
  *reinterpret_cast<float2*>(of_warp + summed_column(warp.lane)) = two;
}

template <class Tile, class Warp>
__device__ __forceinline__ void store_column_sums(const Warp& warp, const WorkTile& work,
                                                  const Subtile<Tile>& subtile, int rows,
                                                  int columns, float* partial) {
  const auto& of_warps = warp.smem.sums[warp.consumer];
  const int thread = warp.warp * 32 + warp.lane;
  const int column = warp.column(work, subtile) + thread;
  if (thread < kSwizzleColumns && column < columns && work.row < rows) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) sum += of_warps[w][thread];
    const int64_t partial_row = work.row / Tile::kBlockM;
    partial[partial_row * columns + column] = sum;
  }
}

// Both steps.
template <class Tile, class Warp>
__device__ __forceinline__ void write_column_sums(const Warp& warp, const float (&sums)[16],
                                                  const WorkTile& work,
                                                  const Subtile<Tile>& subtile, int rows,
                                                  int columns, float* partial) {
  constexpr int kNamedBarrier = 1;  // + consumer
  stage_column_sums(warp, sums);
  named_barrier_sync(kNamedBarrier + warp.consumer, kWarpgroup);
  store_column_sums<Tile>(warp, work, subtile, rows, columns, partial);
  named_barrier_sync(kNamedBarrier + warp.consumer, kWarpgroup);
}

}  // namespace jaxllm::hopper
