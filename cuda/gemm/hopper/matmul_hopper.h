// GEMMs of Hopper's tensor cores, with what precedes or follows them in a network in the epilogue.
//
// Widths are multiples of eight elements and pointers of 16 bytes, or the launchers return
// cudaErrorNotSupported; so they do on other GPUs than Hopper's. A shape's depth is the `width` of
// the comments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/matmul_call.h"

namespace jaxllm {

// What `delta` adds up: the columns of a head, and the rows of a partial sum.
inline constexpr int64_t kDeltaColumns = 64, kDeltaRows = 128;

// The rows that share a row of dgelu's partial sums.
inline constexpr int64_t kDgeluRows = 128;

// The columns of a tile of residual_norm and norm_backward, and the rows of partial sums of the
// latter for each group of clusters that has the tiles of a row between it.
inline constexpr int64_t kRowTileColumns = 192, kNormPartialRows = 16;

// The columns of a sum of softmax, and the largest sum that is taken for good.
inline constexpr int64_t kSoftmaxColumns = 192;
inline constexpr float kSoftmaxMaxSum = 0x1p80f;

// What the epilogue of the LM head's GEMM reads and writes for each row of logits.
struct LogitRows {
  const float* shifts;
  const int32_t* labels;  // columns that have no part in the sums; negative: all of the row
  int columns;            // of the vocabulary; those from there on are padding
  float* sums;            // (tiles of kSoftmaxColumns, rows)
  // The largest logit of a row with sums beyond kSoftmaxMaxSum, as common/float_order.cuh has it.
  int32_t* largest;
  const int32_t* is_wanted;  // zero: nothing is done; null for always
};

template <typename T>
struct MatmulHopper {
  // Any GEMM, but for a float32 result of GELU. Widths are those of the arrays as they are stored.
  static cudaError_t matmul(cudaStream_t stream, const MatmulCall<T>& call);

  // out = gelu(p + bias) with p = x weight: x (rows, width), weight (width, columns). `saved`
  // becomes gelu'(p + bias) with `save_dgelu`, in the order of gemm/hopper/dgelu_order.cuh, else p.
  static cudaError_t bias_gelu(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                               bool save_dgelu, T* saved, T* out, const GemmShape& shape);

  // The elements of `saved` with `save_dgelu`.
  static int64_t dgelu_elements(const GemmShape& shape);

  // out = (x weight^T) dgelu, elementwise, and sums = the sums over rows of out before it is
  // rounded: x (rows, width), weight (columns, width), dgelu as bias_gelu has saved it. `partial`
  // is a workspace of a row of `columns` floats for every kDgeluRows rows.
  static cudaError_t dgelu(cudaStream_t stream, const T* x, const T* weight, const T* dgelu, T* out,
                           T* sums, float* partial, const GemmShape& shape);

  // out = x weight + bias + residual, rounded once: x (rows, width), weight (width, columns),
  // residual (rows, columns).
  static cudaError_t residual(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                              const T* residual, T* out, const GemmShape& shape);

  // dout = x weight^T, and two sums of it: delta = rowsum(dout * out) over each head of
  // kDeltaColumns, and `partial`, the sums over every kDeltaRows rows. x (rows, width), weight
  // (columns, width), out (rows, columns); delta (rows / tokens, columns / 64, tokens), partial
  // (rows / 128, columns). `tokens`, of a sequence, and `columns` are multiples of these two.
  static cudaError_t delta(cudaStream_t stream, const T* x, const T* weight, const T* out, T* dout,
                           float* delta, float* partial, int64_t tokens, const GemmShape& shape);

  // out = xhat', new_mean and new_rstd = what x weight + bias + xhat / rstd + mean is once it is
  // normalized: xhat' = rstd' (that - mean'), rstd' = 1 / sqrt(variance + eps). x (rows, width),
  // weight (width, columns), xhat (rows, columns), mean and rstd (rows). A workspace: row_sums, of
  // row_sum_floats(). The tiles of a row wait for one another: cudaErrorNotSupported where they are
  // more than row_clusters().
  static cudaError_t residual_norm(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                                   const T* xhat, const float* mean, const float* rstd, float eps,
                                   T* out, float* new_mean, float* new_rstd, float* row_sums,
                                   const GemmShape& shape);

  // dtotal += the gradient of a layer norm's input, where that of its output, without scale and
  // bias, is dout weight^T; dtotal_sum = the sums over rows of dtotal as it came. dout (rows,
  // width), weight (columns, width), xhat and dtotal (rows, columns), rstd (rows). Two workspaces:
  // row_sums, as above, and `partial`, with kNormPartialRows rows of `columns` floats for each
  // group of clusters. The launch has no more groups than that.
  static cudaError_t norm_backward(cudaStream_t stream, const T* dout, const T* weight,
                                   const T* xhat, const float* rstd, T* dtotal, T* dtotal_sum,
                                   float* partial, int64_t partial_floats, float* row_sums,
                                   const GemmShape& shape);

  // The floats of the workspace of row sums.
  static int64_t row_sum_floats(const GemmShape& shape);

  // How many clusters of residual_norm and norm_backward run at once on the current device; 0 where
  // these do not run. A row may have as many tiles of kRowTileColumns.
  static cudaError_t row_clusters(int* clusters);

  // out = e^(p - shift of the row), of p = x weight, and zero in columns of padding and in the
  // row's label; and of out, before it is rounded, the sums over every kSoftmaxColumns. x (rows,
  // width), weight (width, columns), or (columns, width) with `transpose_weight`, out (rows,
  // columns).
  static cudaError_t softmax(cudaStream_t stream, const T* x, const T* weight,
                             bool transpose_weight, T* out, const LogitRows& logits,
                             const GemmShape& shape);
};

}  // namespace jaxllm
