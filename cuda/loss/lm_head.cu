#include <type_traits>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "common/float_order.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "gemm/hopper/matmul_hopper.h"
#include "loss/lm_head.h"

namespace jaxllm {
namespace {

using T = __nv_bfloat16;

constexpr int kDotWarps = 8;  // of a CTA, each with one row

// The state of the rows, in the workspaces.
struct RowState {
  float* label_logits;
  float* shifts;           // m
  int32_t* columns;        // of the labels, clamped to the vocabulary; -1: ignored
  int32_t* largest;        // of the logits, ordered; kLeastFloat where the shift suffices
  int32_t* is_recomputed;  // whether any row gets another shift
};

// The logit of each row's label: a warp's dot product of `hidden` and a column of the weight.
// Ignored rows have none: the GEMM's epilogue stores zeros there.
__global__ void __launch_bounds__(32 * kDotWarps)
    lm_head_label_logit_kernel(const T* hidden, const T* weight, bool transpose_weight,
                               const int32_t* labels, int64_t ignore_index, RowState state,
                               int64_t rows, int64_t width, int64_t columns, int vocab_size) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kDotWarps + threadIdx.x / 32;
  if (row == 0 && lane == 0) *state.is_recomputed = 0;
  if (row >= rows) return;
  const bool is_ignored = labels[row] == ignore_index;
  const int label = is_ignored ? -1 : min(max(labels[row], 0), vocab_size - 1);
  if (lane == 0) {
    state.columns[row] = label;
    state.largest[row] = kLeastFloat;
  }
  if (is_ignored) {
    if (lane == 0) state.label_logits[row] = state.shifts[row] = 0.0f;
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
  if (lane == 0) state.label_logits[row] = state.shifts[row] = sum[0];
}

// Losses, factors, and the exponentials of the labels, from the sums of the other exponentials over
// tiles of columns. After the first GEMM, rows whose exponentials are too large get another shift
// instead. After the second one (kRecomputed), which runs only where there is such a row, all rows
// are computed.
template <bool kRecomputed>
__global__ void __launch_bounds__(kColumnSumThreads)
    lm_head_loss_kernel(const float* sums, RowState state, const float* scale, T* exponentials,
                        float* factors, float* losses, int64_t tiles, int64_t rows,
                        int64_t columns) {
  if (kRecomputed && *state.is_recomputed == 0) return;
  const int64_t first_row = int64_t{blockIdx.x} * 32, row = first_row + threadIdx.x / 32;
  const float others = sum_column_of_warp(sums, tiles, rows, first_row);
  if (threadIdx.x % 32 > 0 || row >= rows) return;
  const int label = state.columns[row];
  if (label < 0) {  // ignored
    losses[row] = factors[row] = 0.0f;
    return;
  }
  const float label_logit = state.label_logits[row];
  if (!kRecomputed && state.largest[row] != kLeastFloat) {
    const float largest = from_ordered(state.largest[row]);
    state.shifts[row] = fmaxf(largest, label_logit);
    *state.is_recomputed = 1;
    return;
  }
  const float above = state.shifts[row] - label_logit, of_label = expf(-above);
  const float total = others + of_label;
  // Where the shift is the label's logit, log1p keeps the precision of a small loss.
  losses[row] = above == 0.0f ? log1pf(others) : above + logf(total);
  factors[row] = *scale / total;
  exponentials[row * columns + label] = from_float<T>(-others);
}

}  // namespace

int64_t LmHeadLoss::sum_tiles(int64_t columns) { return divide_up(columns, kSoftmaxColumns); }

cudaError_t LmHeadLoss::run(cudaStream_t stream, LmHeadSizes sizes) const {
  const int64_t rows = sizes.rows, width = sizes.width, columns = sizes.columns;
  if (rows == 0 || columns == 0) return cudaSuccess;
  // The GEMM's conditions, checked before lm_head_label_logit_kernel loads packs.
  if (width % kPackSize<T> != 0 || columns % kPackSize<T> != 0 || !aligned_16(hidden, weight)) {
    return cudaErrorNotSupported;
  }
  const int64_t tiles = sum_tiles(columns);
  const auto vocab = static_cast<int>(vocab_size);
  const RowState state{statistics, statistics + rows, counts, counts + rows, counts + 2 * rows};
  const auto grid = [rows](int64_t rows_per_cta) {
    return dim3(static_cast<unsigned>(divide_up(rows, rows_per_cta)));
  };
  JAXLLM_RETURN_IF_ERROR(launch_kernel(
      stream, lm_head_label_logit_kernel, {grid(kDotWarps), dim3(32 * kDotWarps)}, hidden, weight,
      transpose_weight, labels, ignore_index, state, rows, width, columns, vocab));
  const auto gemm_and_loss = [&](auto recomputed) -> cudaError_t {
    const LogitRows logits{state.shifts, state.columns, vocab,
                           sums,         state.largest, recomputed ? state.is_recomputed : nullptr};
    JAXLLM_RETURN_IF_ERROR(MatmulHopper<T>::softmax(stream, hidden, weight, transpose_weight,
                                                    exponentials, logits, {rows, columns, width}));
    return launch_kernel(stream, lm_head_loss_kernel<recomputed>,
                         {grid(32), dim3(kColumnSumThreads)}, sums, state, scale, exponentials,
                         factors, losses, tiles, rows, columns);
  };
  JAXLLM_RETURN_IF_ERROR(gemm_and_loss(std::false_type{}));
  return gemm_and_loss(std::true_type{});
}

}  // namespace jaxllm
