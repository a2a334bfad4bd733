// Hopper's matrix products: the ends of the two whose backward and forward share GELU's slope.
//
// The slopes that one product keeps for another take no way through shared memory, of whose
// bandwidth the operands leave little: the lanes store them as they have them, in an order of their
// own (gemm/matmul_hopper.h) and in the dtype of the operands. The slope is computed beside the
// activation in the forward pass, with which it has most of its operations in common.
#pragma once

#include "common/fragment.cuh"
#include "gemm/matmul_bands.cuh"
#include "gemm/matmul_column_sums.cuh"

namespace jaxllm {
namespace {

// The lane's first pack of a band of slopes; its others lie 32 packs apart. A pack holds what the
// lane has of 16 columns.
constexpr int kPackColumns = 16;
constexpr int kSlopePacks = kSwizzleColumns / kPackColumns;

template <class Shape, typename T>
__device__ __forceinline__ uint4* slopes_of_band(const BandWarp<Shape, T>& warp,
                                                 const TileOrigin& origin, int band) {
  T* const tile = tile_of_slopes<Shape>(warp.arguments, origin);
  return reinterpret_cast<uint4*>(tile + (warp.warp * Shape::kBands + band) * kBandSize) +
         warp.lane;
}

// A branch that is always taken. Within one basic block the assembler orders as it likes: it would
// begin with the squares of many batches, for which there are no registers.
__device__ __forceinline__ void end_basic_block(int at_least_zero) {
  asm volatile(
      "{\n"
      ".reg .pred always;\n"
      "setp.ge.s32 always, %0, 0;\n"
      "AGAIN: @always bra NEXT;\n"
      "nanosleep.u32 1;\n"
      "bra AGAIN;\n"
      "NEXT:\n"
      "}\n" ::"r"(at_least_zero));
}

// Stores out = gelu(x), where `sums` has x = p + bias, and keeps the slope of GELU there.
template <class Shape, typename T>
__device__ __forceinline__ void finish_gelu_and_slope(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
  static_assert(8 * kBatch == kPackColumns);
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    uint4* const kept = slopes_of_band(warp, origin, band);
    T* const out = free_slot(warp, band);
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      float x[kBatchElements], dgelu[kBatchElements];
      uint32_t words[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int at = sum_index(slab, first + i / 2, i % 2);
        x[2 * i] = sums[block][at];
        x[2 * i + 1] = sums[block][at + 1];
      }
      gelu_and_dgelu_each(x, dgelu);
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) words[i] = pack_pair<T>(dgelu[2 * i], dgelu[2 * i + 1]);
      // Nobody reads them before the backward pass.
      __stcs(kept + first / kBatch * 32, make_uint4(words[0], words[1], words[2], words[3]));
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
      end_basic_block(warp.arguments.steps);
    }
    store_band(warp, out, origin, band);
  }
}

// Stores out = p slope and partial sums of its columns, where `sums` has the product p.
template <class Shape, typename T>
__device__ __forceinline__ void finish_scaled(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
  // A lane's packs of a band are loaded a band ahead.
  uint4 packs[kSlopePacks];
#pragma unroll
  for (int i = 0; i < kSlopePacks; ++i) {
    packs[i] = __ldcs(slopes_of_band(warp, origin, 0) + i * 32);
  }
  float column_sums[16];
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    uint32_t slopes[4 * kSlopePacks];  // a word for two neighbours of a row
#pragma unroll
    for (int i = 0; i < kSlopePacks; ++i) {
      const uint32_t of_pack[4] = {packs[i].x, packs[i].y, packs[i].z, packs[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) slopes[4 * i + w] = of_pack[w];
      if (band + 1 < Shape::kBands) {
        packs[i] = __ldcs(slopes_of_band(warp, origin, band + 1) + i * 32);
      }
    }
    T* const out = free_slot(warp, band);
#pragma unroll
    for (int first = 0; first < 8; first += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + i / 2, half = i % 2, at = sum_index(slab, j, half);
        const float2 slope = unpack_pair<T>(slopes[2 * j + half]);
        const float2 scaled = {sums[block][at] * slope.x, sums[block][at + 1] * slope.y};
        const bool begins = block == 0 && half == 0;
        column_sums[2 * j] = begins ? scaled.x : column_sums[2 * j] + scaled.x;
        column_sums[2 * j + 1] = begins ? scaled.y : column_sums[2 * j + 1] + scaled.y;
        words[i] = pack_pair<T>(scaled.x, scaled.y);
      }
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
    }
    store_band(warp, out, origin, band);
    if (block == Shape::kBlocksOf64 - 1) {
      write_column_sums(warp, column_sums, origin, warp.column(origin, band));
    }
  }
}

}  // namespace
}  // namespace jaxllm
