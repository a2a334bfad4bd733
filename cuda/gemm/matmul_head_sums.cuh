// Hopper's matrix products: the end of a tile of a product whose result is the gradient of
// attention's output. Attention's backward wants two sums of it, which are at hand here: over each
// head's columns of the gradient times the output, and over the rows of the gradient.
#pragma once

#include "common/fragment.cuh"
#include "gemm/matmul_column_sums.cuh"

namespace jaxllm {
namespace {

// Writes a head's sums of a band: `sums` has the lane's part of those of rows lane / 4 and 8 below.
template <class Shape, typename T>
__device__ __forceinline__ void write_head_sums(const BandWarp<Shape, T>& warp,
                                                const float (&sums)[2], const TileOrigin& origin,
                                                int band) {
  const auto& a = warp.arguments;
  const int column = warp.column(origin, band);
  // The tokens of a sequence are whole tiles.
  const int sequence = origin.row / a.tokens;
  const int token = warp.row(origin, band) - sequence * a.tokens + warp.lane / 4;
  const int64_t head = int64_t{sequence} * (a.columns / kSwizzleColumns) + column / kSwizzleColumns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = sums[half];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (warp.lane % 4 == 0 && origin.row < a.rows && column < a.columns) {
      a.head_sums[head * a.tokens + token + 8 * half] = sum;
    }
  }
}

// Stores out = p, where `sums` has the product p; the sums over each head's columns of p saved; and
// partial sums of p's columns.
template <class Shape, typename T>
__device__ __forceinline__ void finish_head_sums(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin, const TileOrigin& next, bool has_next) {
  float column_sums[16];
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    const int position = warp.bands_done + band, slot = position % kSlots;
    warp.shared.saved[warp.multiplier][warp.warp][slot].wait(position / kSlots & 1);
    float head_sums[2] = {};
    change_band(warp, warp.slot(slot), [&](int j, int half, float2 saved) {
      const int at = sum_index(slab, j, half);
      // As it is stored: attention's backward takes a head's sum from products of that, and what
      // rounding does to the one it must do to the other.
      const float2 p = unpack_pair<T>(pack_pair<T>(sums[block][at], sums[block][at + 1]));
      head_sums[half] += p.x * saved.x + p.y * saved.y;
      const bool begins = block == 0 && half == 0;
      column_sums[2 * j] = begins ? p.x : column_sums[2 * j] + p.x;
      column_sums[2 * j + 1] = begins ? p.y : column_sums[2 * j + 1] + p.y;
      return p;
    });
    store_and_load_ahead(warp, slot, band, origin, next, has_next);
    write_head_sums(warp, head_sums, origin, band);
    if (block == Shape::kBlocksOf64 - 1) {
      write_column_sums(warp, column_sums, origin, warp.column(origin, band));
    }
  }
  warp.bands_done += Shape::kBands;
}

}  // namespace
}  // namespace jaxllm
