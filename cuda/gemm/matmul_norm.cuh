// Hopper's matrix products: the end of a tile of a product p that is added to a residual stream
// which is kept normalized. What leaves is the sum, normalized in its turn, and its mean and
// deviation:
//
//   y = p + bias + xhat / rstd    xhat' = rstd' (y - mean(y))    rstd' = 1 / sqrt(var(y) + eps)
//
// The stream itself is xhat / rstd + mean. It is never written: of each row the mean alone is, and
// passes by, since adding a constant to a row changes its mean and nothing else.
//
// A tile tells the others of its row its own mean, and the sum of the squares of what differs from
// it, as gemm/matmul_row_sums.cuh does. Such pairs add up without cancellation, whatever the mean.
#pragma once

#include "common/fragment.cuh"
#include "gemm/matmul_row_sums.cuh"

namespace jaxllm {
namespace {

// Makes y of the product and the bias in `sums`, and adds up the rows.
template <class Shape, typename T>
__device__ __forceinline__ void add_normalized_residual(
    BandWarp<Shape, T>& warp, float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin, float rstd_of_row, float (&of_rows)[Shape::kBlocksOf64][2]) {
  const float deviation_of_row = __fdividef(1.0f, rstd_of_row);
  float deviation[Shape::kBlocksOf64][2];
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      deviation[block][half] = value_of_row(deviation_of_row, block, half, warp.lane);
      of_rows[block][half] = 0.0f;
    }
  }
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    const int position = warp.bands_done + band, slot = position % kSlots;
    warp.shared.saved[warp.multiplier][warp.warp][slot].wait(position / kSlots & 1);
    const uint32_t row = warp.matrix_row(warp.slot(slot));
#pragma unroll
    for (int first = 0; first < 8; first += 2) {
      uint32_t words[4];
      ldmatrix(words, row ^ 16 * first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2, at = sum_index(slab, first + i / 2, half);
        const float2 xhat = unpack_pair<T>(words[i]);
        sums[block][at] += deviation[block][half] * xhat.x;
        sums[block][at + 1] += deviation[block][half] * xhat.y;
        of_rows[block][half] += sums[block][at];
        of_rows[block][half] += sums[block][at + 1];
      }
    }
    __syncwarp();
    if (warp.lane == 0 && band + kSlots < Shape::kBands) {
      load_saved(warp, slot, origin, band + kSlots);
    }
  }
}

// Leaves the means and the squares of this tile's part of each row for those beside it.
template <class Shape, typename T>
__device__ __forceinline__ void leave_moments(
    const BandWarp<Shape, T>& warp, float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin, const float (&of_rows)[Shape::kBlocksOf64][2]) {
  const int columns = min(Shape::kColumns, warp.arguments.columns - origin.column);
  float mean[Shape::kBlocksOf64][2], squares[Shape::kBlocksOf64][2];
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mean[block][half] = __fdividef(sum_over_lanes_of_row(of_rows[block][half]), columns);
      squares[block][half] = 0.0f;
    }
  }
  // Columns beyond the last are zeros so far. They must not differ from the mean.
  if (columns < Shape::kColumns) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
      for (int i = 0; i < Shape::kColumns / 2; ++i) {
        if (i / 4 * 8 >= columns) sums[block][i] = mean[block][i / 2 % 2];
      }
    }
  }
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int i = 0; i < Shape::kColumns / 2; ++i) {
      const int half = i / 2 % 2;
      const float difference = sums[block][i] - mean[block][half];
      squares[block][half] += difference * difference;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      squares[block][half] = sum_over_lanes_of_row(squares[block][half]);
    }
  }
  leave_row_sums(warp, origin, mean, squares);
}

struct RowStatistics {
  float mean, rstd;
};

// Those of the lane's row of y.
template <class Shape, typename T>
__device__ __forceinline__ RowStatistics collect_moments(const BandWarp<Shape, T>& warp,
                                                         const TileOrigin& origin) {
  const auto& a = warp.arguments;
  float count = 0.0f, mean = 0.0f, squares = 0.0f;
  visit_row_sums(warp, origin, [&](float2 of_tile, int tile) {
    const float more = min(Shape::kColumns, a.columns - tile * Shape::kColumns);
    const float total = count + more, share = __fdividef(more, total);
    const float difference = of_tile.x - mean;
    mean += difference * share;
    squares += of_tile.y + difference * difference * share * count;
    count = total;
  });
  return {mean, rsqrtf(__fdividef(squares, count) + a.norm.eps)};
}

// Stores rstd (y - mean), where `sums` has y.
template <class Shape, typename T>
__device__ __forceinline__ void store_normalized(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin, const RowStatistics& of_row) {
  const float shift_of_row = -of_row.mean * of_row.rstd;
  float rstd[Shape::kBlocksOf64][2], shift[Shape::kBlocksOf64][2];
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rstd[block][half] = value_of_row(of_row.rstd, block, half, warp.lane);
      shift[block][half] = value_of_row(shift_of_row, block, half, warp.lane);
    }
  }
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    T* const out = warp.slot((warp.bands_done + band) % kSlots);
    if (band >= kSlots) {
      if (warp.lane == 0) tma_store_wait_read<kSlots - 1>();
      __syncwarp();
    }
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      uint32_t words[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int half = i % 2, at = sum_index(slab, first + i / 2, half);
        words[i] = pack_pair<T>(rstd[block][half] * sums[block][at] + shift[block][half],
                                rstd[block][half] * sums[block][at + 1] + shift[block][half]);
      }
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
    }
    store_band(warp, out, origin, band);
  }
}

// Stores the normalized sum of residual and product, where `sums` has the product and the bias.
// Has the residual of the warp's `next` tile come in too.
template <class Shape, typename T>
__device__ __forceinline__ void finish_norm(BandWarp<Shape, T>& warp,
                                            float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
                                            float rstd_of_residual, const TileOrigin& origin,
                                            const TileOrigin& next, bool has_next) {
  const NormRows& norm = warp.arguments.norm;
  float of_rows[Shape::kBlocksOf64][2];
  add_normalized_residual(warp, sums, origin, rstd_of_residual, of_rows);
  leave_moments(warp, sums, origin, of_rows);
  const RowStatistics of_y = collect_moments(warp, origin);
  const int row = row_of_lane(warp, origin);
  if (origin.column == 0 && row < warp.arguments.rows) {
    norm.new_mean[row] = norm.mean[row] + of_y.mean;
    norm.new_rstd[row] = of_y.rstd;
  }
  store_normalized(warp, sums, origin, of_y);
  warp.bands_done += Shape::kBands;
  if (has_next) {
    if (warp.lane == 0) tma_store_wait_read<0>();
    load_first_saved<kSlots>(warp, next);
  }
}

}  // namespace
}  // namespace jaxllm
