// Hopper's matrix products: the end of a tile of a product p that is the gradient of what a layer
// norm puts out, before scale and bias: those belong to the layer after it. What leaves is the
// gradient of what the norm reads, added to another that is there already, the one along the
// residual stream:
//
//   out += rstd (p - mean(p) - xhat mean(p xhat)),  xhat = rstd (x - mean(x)).
//
// The means are over a row, of which a tile has a part: gemm/matmul_row_sums.cuh.
#pragma once

#include "common/fragment.cuh"
#include "gemm/matmul_column_sums.cuh"
#include "gemm/matmul_row_sums.cuh"

namespace jaxllm {
namespace {

// ---- The bands of a tile. A warp's four slots take four each, of xhat twice and of out: those of
// xhat in order in the first pass, and of xhat and out from the last to the first in the second,
// which finds the last two of xhat still there. Tiles of another number of bands would need another
// plan.

template <class Shape, typename T>
struct NormBands {
  static_assert(Shape::kBands == 6 && kSlots == 4);

  const BandWarp<Shape, T>& warp;
  const TileOrigin& origin;

  // One lane's task: has a band copied into a slot.
  __device__ __forceinline__ void load(const CUtensorMap& map, int slot, int band) const {
    Barrier& saved = warp.shared.saved[warp.multiplier][warp.warp][slot];
    saved.arrive_and_expect(kBandSize * sizeof(T));
    tma_load_2d(warp.slot(slot), map, warp.column(origin, band), warp.row(origin, band), saved);
  }

  // Waits for a slot's band for the `use`-th time in this tile.
  __device__ __forceinline__ void wait(int slot, int use) const {
    warp.shared.saved[warp.multiplier][warp.warp][slot].wait(use & 1);
  }
};

// ---- What belongs to columns: sums over all rows that a warp sees. All tiles of a block have the
// same columns. Of a slab's 64 sum_over_rows gives two to each lane.

template <class Shape>
struct ColumnSums {
  float2 of_slabs[Shape::kSlabs] = {};

  __device__ __forceinline__ void add(int slab, const float (&values)[16], int lane) {
    const float2 two = sum_over_rows(values, lane);
    of_slabs[slab].x += two.x;
    of_slabs[slab].y += two.y;
  }
};

// Writes a warp's sums, a row of the matrix of partial sums.
template <class Shape, typename T>
__device__ __forceinline__ void write_sums_of_out(const BandWarp<Shape, T>& warp,
                                                  const ColumnSums<Shape>& sums, int rank) {
  const auto& a = warp.arguments;
  const int column_tiles = a.tiles / a.row_tiles, cluster = blockIdx.x / Shape::kCluster;
  constexpr int kWarps = Shape::kCluster * Shape::kMultipliers * 4;
  const int row = cluster / column_tiles * kWarps +
                  (rank * Shape::kMultipliers + warp.multiplier) * 4 + warp.warp;
  const int lane = warp.lane, first = cluster % column_tiles * Shape::kColumns;
  const int j = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);  // the bits of lane / 4 reversed
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
    const int column = first + slab * kSwizzleColumns + 8 * j + lane % 4 * 2;
    float* const partial = a.partial + int64_t{row} * a.columns + column;
    if (column < a.columns) *reinterpret_cast<float2*>(partial) = sums.of_slabs[slab];
  }
}

// ---- The two passes.

// Adds up the rows of the product p in `sums`, and of p xhat.
template <class Shape, typename T>
__device__ __forceinline__ void sum_norm_gradient(
    BandWarp<Shape, T>& warp, const NormBands<Shape, T>& bands,
    const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2]) {
  float of_p[Shape::kBlocksOf64][2] = {}, of_products[Shape::kBlocksOf64][2] = {};
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    const int slot = band % kSlots;
    bands.wait(slot, band / kSlots);
    const uint32_t row = warp.matrix_row(warp.slot(slot));
#pragma unroll
    for (int first = 0; first < 8; first += 2) {
      uint32_t words[4];
      ldmatrix(words, row ^ 16 * first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2, at = sum_index(slab, first + i / 2, half);
        const float2 xhat = unpack_pair<T>(words[i]);
        of_p[block][half] += sums[block][at];
        of_p[block][half] += sums[block][at + 1];
        of_products[block][half] += sums[block][at] * xhat.x;
        of_products[block][half] += sums[block][at + 1] * xhat.y;
      }
    }
    __syncwarp();
    if (warp.lane == 0) {
      if (band + kSlots < Shape::kBands) bands.load(warp.saved_map, slot, band + kSlots);
      // The slots 2 and 3 have done their part for xhat.
      if (slot == band && slot >= 2) bands.load(warp.out_map, slot, Shape::kBands + 1 - slot);
    }
  }
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_p[block][half] = sum_over_lanes_of_row(of_p[block][half]);
      of_products[block][half] = sum_over_lanes_of_row(of_products[block][half]);
    }
  }
  leave_row_sums(warp, bands.origin, of_p, of_products);
}

// out += rstd p + factor xhat + constant, where `sums` has p and the lane what belongs to its row.
template <class Shape, typename T>
__device__ __forceinline__ void add_norm_gradient(
    BandWarp<Shape, T>& warp, const NormBands<Shape, T>& bands,
    const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2], float rstd_of_row,
    float factor_of_row, float constant_of_row, ColumnSums<Shape>& of_out) {
  const int lane = warp.lane;
#pragma unroll
  for (int slab = Shape::kSlabs - 1; slab >= 0; --slab) {
    float of_columns[16] = {};
#pragma unroll
    for (int block = Shape::kBlocksOf64 - 1; block >= 0; --block) {
      const int band = slab * Shape::kBlocksOf64 + block, turn = Shape::kBands - 1 - band;
      const int xhat_slot = 1 - turn % 2, out_slot = 2 + turn % 2;
      float rstd[2], factor[2], constant[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rstd[half] = value_of_row(rstd_of_row, block, half, lane);
        factor[half] = value_of_row(factor_of_row, block, half, lane);
        constant[half] = value_of_row(constant_of_row, block, half, lane);
      }
      if (turn >= 2) bands.wait(xhat_slot, 1 + turn / 2);
      bands.wait(out_slot, 1 + turn / 2);
      T* const slot = warp.slot(out_slot);
      const uint32_t xhat_row = warp.matrix_row(warp.slot(xhat_slot));
      const uint32_t row = warp.matrix_row(slot);
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        if (first == 4 && turn > 0 && band > 0 && lane == 0) {
          // By now the band before has left its slot.
          tma_store_wait_read<0>();
          bands.load(warp.out_map, 5 - out_slot, band - 1);
        }
        uint32_t xhat_words[4], words[4];
        ldmatrix(xhat_words, xhat_row ^ 16 * first);
        ldmatrix(words, row ^ 16 * first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i / 2, half = i % 2, at = sum_index(slab, j, half);
          const float2 old = unpack_pair<T>(words[i]), xhat = unpack_pair<T>(xhat_words[i]);
          of_columns[2 * j] += old.x;
          of_columns[2 * j + 1] += old.y;
          words[i] = pack_pair<T>(
              old.x + (rstd[half] * sums[block][at] + (factor[half] * xhat.x + constant[half])),
              old.y +
                  (rstd[half] * sums[block][at + 1] + (factor[half] * xhat.y + constant[half])));
        }
        stmatrix(row ^ 16 * first, words);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        tma_store_2d(warp.out_map, slot, warp.column(bands.origin, band),
                     warp.row(bands.origin, band));
        tma_store_commit();
        if (band >= 2) bands.load(warp.saved_map, xhat_slot, band - 2);
      }
    }
    of_out.add(slab, of_columns, lane);
  }
}

// Adds the gradient of the norm's input to out, where `sums` has the product p, and goes on with
// the sums of the columns of out as it was. Has xhat of the warp's `next` tile come in too.
template <class Shape, typename T>
__device__ __forceinline__ void finish_norm_gradient(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    float rstd, ColumnSums<Shape>& sums_of_out, const TileOrigin& origin, const TileOrigin& next,
    bool has_next) {
  const NormBands<Shape, T> bands{warp, origin};
  sum_norm_gradient(warp, bands, sums);
  float of_p = 0.0f, of_products = 0.0f;
  visit_row_sums(warp, origin, [&](float2 of_tile, int) {
    of_p += of_tile.x;
    of_products += of_tile.y;
  });
  const float share = -rstd / warp.arguments.columns;
  add_norm_gradient(warp, bands, sums, rstd, share * of_products, share * of_p, sums_of_out);
  if (has_next) {
    if (warp.lane == 0) tma_store_wait_read<0>();
    load_first_saved<kSlots>(warp, next);
  }
}

}  // namespace
}  // namespace jaxllm
