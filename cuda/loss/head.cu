#include <type_traits>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "common/float_order.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "gemm/matmul_hopper.h"
#include "loss/head.h"

namespace jaxllm {
namespace {

using T = __nv_bfloat16;

constexpr int kDotWarps = 8;  // of a block, a row each

// What is known of each row beside its sums.
struct HeadRows {
  float* label_logits;
  float* shifts;
  int32_t*
      columns;  // of the labels, those outside of the vocabulary moved to its nearest; -1: ignored
  int32_t* largest;  // kLeastFloat where the shift will do
  int32_t* is_redone;
};

// The logit of each row's label: a dot product of `hidden` and a column of the weight, by a warp.
// Ignored rows have none: the epilogue of the product leaves zeros there, whatever their logits
// are.
__global__ void __launch_bounds__(32 * kDotWarps)
    head_label_logit_kernel(const T* hidden, const T* weight, bool transpose_weight,
                            const int32_t* labels, int64_t ignore_index, HeadRows of_rows,
                            int64_t rows, int64_t width, int64_t columns, int vocab_size) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kDotWarps + threadIdx.x / 32;
  if (row == 0 && lane == 0) *of_rows.is_redone = 0;
  if (row >= rows) return;
  const bool is_ignored = labels[row] == ignore_index;
  const int label = is_ignored ? -1 : min(max(labels[row], 0), vocab_size - 1);
  if (lane == 0) {
    of_rows.columns[row] = label;
    of_rows.largest[row] = kLeastFloat;
  }
  if (is_ignored) {
    if (lane == 0) of_rows.label_logits[row] = of_rows.shifts[row] = 0.0f;
    return;
  }
  const T* const x = hidden + row * width;
  float sum[1] = {};
  for (int64_t i = lane * kPackSize<T>; i < width; i += 32 * kPackSize<T>) {
    const Pack<T> of_hidden = load<kPackSize<T>>(x + i);
    if (transpose_weight) {
      const Pack<T> of_weight = load<kPackSize<T>>(weight + int64_t{label} * width + i);
#pragma unroll
      for (int j = 0; j < kPackSize<T>; ++j) sum[0] += of_hidden[j] * of_weight[j];
    } else {
#pragma unroll
      for (int j = 0; j < kPackSize<T>; ++j) {
        sum[0] += of_hidden[j] * to_float(weight[(i + j) * columns + label]);
      }
    }
  }
  sum_over_lanes<32>(sum);
  if (lane == 0) of_rows.label_logits[row] = of_rows.shifts[row] = sum[0];
}

// Losses, factors, and the exponentials of the labels, from the sums of the others over tiles of
// columns. The first time rows with exponentials too large get another shift instead; the second
// time, where there were any, all are done again.
template <bool kAgain>
__global__ void __launch_bounds__(kColumnSumThreads)
    head_loss_kernel(const float* sums, HeadRows of_rows, const float* scale, T* exponentials,
                     float* factors, float* losses, int64_t tiles, int64_t rows, int64_t columns) {
  if (kAgain && *of_rows.is_redone == 0) return;
  const int64_t first_row = int64_t{blockIdx.x} * 32, row = first_row + threadIdx.x / 32;
  const float others = sum_column_of_warp(sums, tiles, rows, first_row);
  if (threadIdx.x % 32 > 0 || row >= rows) return;
  const int label = of_rows.columns[row];
  if (label < 0) {  // ignored
    losses[row] = factors[row] = 0.0f;
    return;
  }
  const float label_logit = of_rows.label_logits[row];
  if (!kAgain && of_rows.largest[row] != kLeastFloat) {
    const float largest = from_ordered(of_rows.largest[row]);
    of_rows.shifts[row] = fmaxf(largest, label_logit);
    *of_rows.is_redone = 1;
    return;
  }
  const float above = of_rows.shifts[row] - label_logit, of_label = expf(-above);
  const float total = others + of_label;
  // Where the label is the shift, to the precision of a small loss.
  losses[row] = above == 0.0f ? log1pf(others) : above + logf(total);
  factors[row] = *scale / total;
  exponentials[row * columns + label] = from_float<T>(-others);
}

}  // namespace

int64_t HeadLoss::sum_tiles(int64_t columns) { return divide_up(columns, kSoftmaxColumns); }

cudaError_t HeadLoss::run(cudaStream_t stream, HeadSizes sizes) const {
  const int64_t rows = sizes.rows, width = sizes.width, columns = sizes.columns;
  if (rows == 0 || columns == 0) return cudaSuccess;
  // What the product will ask for, before the label's logits are read in packs.
  if (width % kPackSize<T> != 0 || columns % kPackSize<T> != 0 || !aligned_16(hidden, weight)) {
    return cudaErrorNotSupported;
  }
  const int64_t tiles = sum_tiles(columns);
  const auto vocab = static_cast<int>(vocab_size);
  const HeadRows of_rows{statistics, statistics + rows, counts, counts + rows, counts + 2 * rows};
  const auto blocks = [rows](int64_t rows_of_block) {
    return dim3(static_cast<unsigned>(divide_up(rows, rows_of_block)));
  };
  JAXLLM_RETURN_IF_ERROR(launch_kernel(
      stream, head_label_logit_kernel, {blocks(kDotWarps), dim3(32 * kDotWarps)}, hidden, weight,
      transpose_weight, labels, ignore_index, of_rows, rows, width, columns, vocab));
  const auto multiply_and_finish = [&](auto again) -> cudaError_t {
    const SoftmaxRows softmax{of_rows.shifts, of_rows.columns, vocab,
                              sums,           of_rows.largest, again ? of_rows.is_redone : nullptr};
    JAXLLM_RETURN_IF_ERROR(MatmulHopper<T>::softmax(stream, hidden, weight, transpose_weight,
                                                    exponentials, softmax, rows, width, columns));
    return launch_kernel(stream, head_loss_kernel<again>, {blocks(32), dim3(kColumnSumThreads)},
                         sums, of_rows, scale, exponentials, factors, losses, tiles, rows, columns);
  };
  JAXLLM_RETURN_IF_ERROR(multiply_and_finish(std::false_type{}));
  return multiply_and_finish(std::true_type{});
}

}  // namespace jaxllm
