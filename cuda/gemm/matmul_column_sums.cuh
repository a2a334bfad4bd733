// Hopper's matrix products: sums of the result's columns, as the gradient of a bias is.
#pragma once

#include "gemm/matmul_bands.cuh"

namespace jaxllm {
namespace {

// Adds 16 values over the eight lanes whose numbers are equal modulo 4, in fixed order. Returns two
// of the sums: those of values 2 i and 2 i + 1, where i = lane / 4 with its bits reversed.
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

constexpr int kMultiplierBarrier = 1;  // + multiplier: a named barrier of its threads

// Writes the sums of a slab's columns over the rows of a tile, of which `sums` has those of the
// thread's rows: of columns 8 j + 2 (lane % 4) and the next in 2 j and 2 j + 1.
template <class Shape, typename T>
__device__ __forceinline__ void write_column_sums(BandWarp<Shape, T>& warp, const float (&sums)[16],
                                                  const TileOrigin& origin, int slab_column) {
  const int lane = warp.lane, thread = warp.warp * 32 + lane;
  auto& of_warps = warp.shared.sums[warp.multiplier];
  const float2 two = sum_over_rows(sums, lane);
  const int j = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);  // the bits of lane / 4 reversed
  *reinterpret_cast<float2*>(&of_warps[warp.warp][8 * j + lane % 4 * 2]) = two;
  named_barrier_sync(kMultiplierBarrier + warp.multiplier, kWarpgroup);
  const int column = slab_column + thread;
  if (thread < kSwizzleColumns && column < warp.arguments.columns &&
      origin.row < warp.arguments.rows) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) sum += of_warps[w][thread];
    const int64_t partial_row = origin.row / Shape::kRows;
    warp.arguments.partial[partial_row * warp.arguments.columns + column] = sum;
  }
  named_barrier_sync(kMultiplierBarrier + warp.multiplier, kWarpgroup);
}

}  // namespace
}  // namespace jaxllm
