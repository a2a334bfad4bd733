// The LM head's softmax: out = e^(p - shift) of a row's logits p, and its sums over the columns of
// a tile.
//
// With a shift that is known beforehand and keeps both in range, no pass over the logits is left:
// whoever multiplies by the exponentials next divides by their sum. In bfloat16, which has
// float32's exponents, a shift within some 50 of the largest logit will do. Of other rows the
// largest logit is left for a second attempt (loss/ has the whole of it).
#pragma once

#include "common/fast_math.cuh"
#include "common/float_order.cuh"
#include "gemm/hopper/epilogue.cuh"
#include "gemm/hopper/matmul_hopper.h"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueSoftmax : EpilogueWarp<Tile, T> {
  struct Arguments {
    T* out;
    LogitRows logits;
  };
  struct Params {
    CUtensorMap out;
    LogitRows logits;
    int rows, columns;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->logits = arguments.logits;
    params->rows = static_cast<int>(shape.rows);
    params->columns = static_cast<int>(shape.columns);
    return EpilogueSoftmax::encode_subtiles(arguments.out, shape, &params->out);
  }

  __device__ __forceinline__ static bool is_wanted(const Params& params) {
    return params.logits.is_wanted == nullptr || *params.logits.is_wanted != 0;
  }

  // Takes -inf for the p of labels, of padding and of ignored rows, whose labels are negative: so
  // these are zeros, even of a p that is not finite.
  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    const LogitRows& logits = params.logits;
    const int first_row = this->row(work, {0}) + this->lane / 4;
    float offsets[Tile::kRowBlocks][2], totals[Tile::kRowBlocks][2] = {};
    int labels[Tile::kRowBlocks][2];
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 64 * block + 8 * half;
        const bool inside = row < params.rows;
        offsets[block][half] = inside ? logits.shifts[row] * kLog2E : 0.0f;
        labels[block][half] = inside ? logits.labels[row] : 0;
      }
    }
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int block = subtile.row_block(), first_column = this->column(work, subtile);
      const auto has_label = [&](int half) {
        const int label = labels[block][half];
        return (label >= first_column || label < 0) && label < first_column + kSwizzleColumns;
      };
      if (__any_sync(0xffffffff, has_label(0) || has_label(1)) ||
          first_column + kSwizzleColumns > logits.columns) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int column = first_column + this->lane % 4 * 2 + i / 4 * 8 + i % 2;
          const int label = labels[block][i / 2 % 2];
          if (column == label || column >= logits.columns || label < 0) {
            accumulators[block][32 * subtile.column_block() + i] = -INFINITY;
          }
        }
      }
      T* const out = this->acquire_buffer(subtile);
      write_subtile<T>(this->matrix_row(out), [&](int j, int half) {
        const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
        const float low = exp2_fast(fmaf(p.x, kLog2E, -offsets[block][half]));
        const float high = exp2_fast(fmaf(p.y, kLog2E, -offsets[block][half]));
        totals[block][half] += low + high;
        return float2{low, high};
      });
      this->store_buffer(params.out, out, work, subtile);
    });
    const int64_t column_tile = work.column / Tile::kBlockN;
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = totals[block][half];
        total += __shfl_xor_sync(0xffffffff, total, 1);
        total += __shfl_xor_sync(0xffffffff, total, 2);
        const int row = first_row + 64 * block + 8 * half;
        const bool writes =
            this->lane % 4 == 0 && row < params.rows && work.column < params.columns;
        if (writes) logits.sums[column_tile * params.rows + row] = total;
        const bool is_large = writes && !(total <= kSoftmaxMaxSum);
        if (__any_sync(0xffffffff, is_large)) {
          const float largest = largest_of_row(accumulators[block], half);
          if (is_large) atomicMax(logits.largest + row, to_ordered(largest));
        }
      }
    }
  }

 private:
  // The largest of a row of a tile, in the four lanes that have it.
  template <int kCount>
  __device__ __forceinline__ static float largest_of_row(const float (&accumulators)[kCount],
                                                         int half) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      largest = fmaxf(largest, fmaxf(accumulators[i], accumulators[i + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
  }
};

}  // namespace jaxllm::hopper
