// Matrix products by Hopper's tensor cores, with what precedes or follows them in a network.
//
// Widths are multiples of eight elements and pointers of 16 bytes, or the launchers return
// cudaErrorNotSupported; so they do on other GPUs than Hopper's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/matmul_call.h"

namespace jaxllm {

// What head_sums adds up: so many columns, and so many rows.
inline constexpr int64_t kHeadSumColumns = 64, kHeadSumRows = 128;

// The rows that share a row of the partial sums of scale.
inline constexpr int64_t kScaleRows = 128;

// What the end of a head's product works with, for each of its rows.
struct SoftmaxRows {
  const float* shifts;
  const int32_t* labels;  // columns that have no part in the sums; negative: all of the row
  int columns;            // of the vocabulary; those from there on are padding
  float* sums;            // (tiles of kSoftmaxColumns, rows)
  // The largest logit of a row with sums beyond kSoftmaxMost, as common/float_order.cuh has it.
  int32_t* largest;
  const int32_t* is_wanted;  // zero: nothing is done; null for always
};

// What the end of a product before a layer norm, or before its gradient, works with.
struct NormRows {
  const float *mean, *rstd;  // of each row; the gradient has no use for the mean
  // Two sums of each row of a tile, so many for each of four warps, of the tiles of a row one after
  // the other. One that is not there yet has kMissingRowSum's bits, each of its bytes 0xff.
  float* sums;
  // Of the rows that the norm has made.
  float *new_mean = nullptr, *new_rstd = nullptr;
  float eps = 0.0f;
};
inline constexpr uint32_t kMissingRowSum = 0xffffffff;
inline constexpr int64_t kNormColumns = 192, kNormPartialRows = 16;
inline constexpr int64_t kSoftmaxColumns = 192;
inline constexpr float kSoftmaxMost = 0x1p80f;

template <typename T>
struct MatmulHopper {
  // Any product, but for a float32 result of GELU. Widths are those of the arrays as they are
  // stored.
  static cudaError_t product(cudaStream_t stream, const MatmulCall<T>& call);

  // out = gelu(h + bias) with h = x weight: x (rows, width), weight (width, columns). `saved`
  // becomes gelu'(h + bias) with `slope`, in an order of its own, else h.
  static cudaError_t bias_gelu(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                               bool slope, T* saved, T* out, int64_t rows, int64_t width,
                               int64_t columns);

  // The elements of `saved` with `slope`. Their order: a tile of 128 x 192 after the other, along
  // the rows of the result first, of an even number of tiles. In a tile, what each of four warps
  // has of the result, 16 of any 64 rows; of that, three times the columns of 64, and of those the
  // first and the second 64 rows: a band of 16 x 64. In a band, of each 16 columns, 16 bytes for
  // each lane, what it has in a tensor core's accumulator: of each 8 columns, in row lane / 4 and
  // then in the row 8 below, columns 2 (lane % 4) and the next.
  static int64_t slope_elements(int64_t rows, int64_t columns);

  // out = (x weight^T) slopes, elementwise, and sums = the sums over rows of out before it is
  // rounded: x (rows, width), weight (columns, width), slopes as bias_gelu has saved them of (rows,
  // columns). `partial` is a workspace of a row of `columns` floats for every kScaleRows rows.
  static cudaError_t scale(cudaStream_t stream, const T* x, const T* weight, const T* slopes,
                           T* out, T* sums, float* partial, int64_t rows, int64_t width,
                           int64_t columns);

  // out = x weight + bias + residual, rounded once: x (rows, width), weight (width, columns),
  // residual (rows, columns).
  static cudaError_t residual(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                              const T* residual, T* out, int64_t rows, int64_t width,
                              int64_t columns);

  // out = x weight^T, and two sums of it: those over each kHeadSumColumns, a
  // head, of out * saved; and those over every kHeadSumRows. x (rows, width), weight (columns,
  // width), saved (rows, columns); sums (rows / tokens, columns / 64, tokens), partial (rows / 128,
  // columns). `tokens`, of a sequence, and `columns` are multiples of these two.
  static cudaError_t head_sums(cudaStream_t stream, const T* x, const T* weight, const T* saved,
                               T* out, float* sums, float* partial, int64_t tokens, int64_t rows,
                               int64_t width, int64_t columns);

  // out = xhat', new_mean and new_rstd = what x weight + bias + xhat / rstd + mean is once it is
  // normalized: xhat' = rstd' (that - mean'), rstd' = 1 / sqrt(variance + eps). x (rows, width),
  // weight (width, columns), xhat (rows, columns), mean and rstd (rows). A workspace: row_sums, of
  // norm_row_sums(). The tiles of a row wait for one another: cudaErrorNotSupported where they are
  // more than norm_clusters().
  static cudaError_t norm(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                          const T* xhat, const float* mean, const float* rstd, float eps, T* out,
                          float* new_mean, float* new_rstd, float* row_sums, int64_t rows,
                          int64_t width, int64_t columns);

  // dtotal += the gradient of a layer norm's input, where that of its output, without scale and
  // bias, is p = dout weight^T; dtotal_sum = the sums over rows of dtotal as it came. dout (rows,
  // width), weight (columns, width), xhat and dtotal (rows, columns), rstd (rows). Two workspaces:
  // row_sums, as above, and `partial`: with kNormPartialRows rows of `columns` floats for each
  // group of clusters that has the tiles of a row between it. The launch has no more groups than
  // that.
  static cudaError_t norm_gradient(cudaStream_t stream, const T* dout, const T* weight,
                                   const T* xhat, const float* rstd, T* dtotal, T* dtotal_sum,
                                   float* partial, int64_t partial_floats, float* row_sums,
                                   int64_t rows, int64_t width, int64_t columns);

  // The floats of the workspace of row sums.
  static int64_t norm_row_sums(int64_t rows, int64_t columns);

  // How many clusters of norm and norm_gradient run at once on the current device; 0 where these do
  // not run. A row may have as many tiles of kNormColumns.
  static cudaError_t norm_clusters(int* clusters);

  // out = e^(p - shift of the row), of p = x weight, and zero in columns of padding and in the
  // row's label; and of out, before it is rounded, the sums over every kSoftmaxColumns. x (rows,
  // width), weight (width, columns) or turned, out (rows, columns).
  static cudaError_t softmax(cudaStream_t stream, const T* x, const T* weight, bool turned, T* out,
                             const SoftmaxRows& softmax, int64_t rows, int64_t width,
                             int64_t columns);
};

}  // namespace jaxllm
