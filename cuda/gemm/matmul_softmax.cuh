// Hopper's matrix products: the end of a tile of logits, the product of a model's head.
//
// A softmax wants e^(p - m) of a row's logits p and the sum of those, for an m that keeps both in
// range. With an m that is known beforehand no pass over the logits is left: what is stored are the
// exponentials, and whoever multiplies by them next divides by the sum. In bfloat16, which has the
// exponents of float32, an m within some 50 of the largest logit will do. Of rows whose m is not,
// the largest logit is left for a second attempt; loss/head.h has the whole of it.
#pragma once

#include "common/fast_math.cuh"
#include "common/float_order.cuh"
#include "common/fragment.cuh"
#include "gemm/matmul_bands.cuh"

namespace jaxllm {
namespace {

// The largest of a row of a tile, in the four lanes that have it.
template <int kCount>
__device__ __forceinline__ float largest_of_row(const float (&sums)[kCount], int half) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(sums[i], sums[i + 1]));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
}

// Stores out = e^(p - shift) for a row's shift, where `sums` has the product p, and adds up each
// row. Takes -inf for the p of labels, of padding and of ignored rows, whose labels are negative:
// so these are zeros, even of a p that is not finite.
template <class Shape, typename T>
__device__ __forceinline__ void finish_softmax(
    BandWarp<Shape, T>& warp, float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
  const SoftmaxRows& softmax = warp.arguments.softmax;
  const int first_row = warp.row(origin, 0) + warp.lane / 4;
  float offsets[Shape::kBlocksOf64][2], totals[Shape::kBlocksOf64][2] = {};
  int labels[Shape::kBlocksOf64][2];
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 64 * block + 8 * half;
      const bool inside = row < warp.arguments.rows;
      offsets[block][half] = inside ? softmax.shifts[row] * kLog2E : 0.0f;
      labels[block][half] = inside ? softmax.labels[row] : 0;
    }
  }
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    const int first_column = warp.column(origin, band), column = first_column + warp.lane % 4 * 2;
    const auto has_label = [&](int half) {
      const int label = labels[block][half];
      return (label >= first_column || label < 0) && label < first_column + kSwizzleColumns;
    };
    if (__any_sync(0xffffffff, has_label(0) || has_label(1)) ||
        first_column + kSwizzleColumns > softmax.columns) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int at = column + i / 4 * 8 + i % 2, half = i / 2 % 2;
        if (at == labels[block][half] || at >= softmax.columns || labels[block][half] < 0) {
          sums[block][32 * slab + i] = -INFINITY;
        }
      }
    }
    T* const out = free_slot(warp, band);
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      uint32_t words[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int half = i % 2, at = sum_index(slab, first + i / 2, half);
        const float offset = offsets[block][half];
        const float low = exp2_fast(fmaf(sums[block][at], kLog2E, -offset));
        const float high = exp2_fast(fmaf(sums[block][at + 1], kLog2E, -offset));
        totals[block][half] += low + high;
        words[i] = pack_pair<T>(low, high);
      }
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
    }
    store_band(warp, out, origin, band);
  }
  const int64_t column_tile = origin.column / Shape::kColumns;
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = totals[block][half];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      const int row = first_row + 64 * block + 8 * half;
      const bool writes =
          warp.lane % 4 == 0 && row < warp.arguments.rows && origin.column < warp.arguments.columns;
      if (writes) softmax.sums[column_tile * warp.arguments.rows + row] = total;
      const bool is_large = writes && !(total <= kSoftmaxMost);
      if (__any_sync(0xffffffff, is_large)) {
        const float largest = largest_of_row(sums[block], half);
        if (is_large) atomicMax(softmax.largest + row, to_ordered(largest));
      }
    }
  }
}

}  // namespace
}  // namespace jaxllm
