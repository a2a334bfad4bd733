// Layer normalization, alone and fused with the residual addition before it.
//
// Every array is dense. A call holds `groups` independent problems of `rows` rows each (the axis
// that jax.vmap adds), with a scale and a bias for each group. T is the dtype of the rows, W that
// of the weights: T or float.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T, typename W>
struct LayerNorm {
  // out = (x - mean) * rstd * scale + bias, with the row's mean and 1 / sqrt(variance + eps).
  // Where `residual` is not null, x + x_bias + residual takes the place of x and is written to `h`;
  // `x_bias`, one number a column, may be null, and so may `mean` and `rstd`, of whom nobody asks
  // without a backward.
  static cudaError_t forward(cudaStream_t stream, const T* x, const T* residual, const W* x_bias,
                             const W* scale, const W* bias, float eps, T* out, T* h, float* mean,
                             float* rstd, int64_t groups, int64_t rows, int64_t width);

  // dx = rstd * (g - mean(g) - n * mean(g * n)), where n is the normalized row and
  // g = scale * dout, plus `dh` where that is not null; dscale and dbias are the sums over rows of
  // n * dout and dout. Where `dx_bias` is not null, it gets the sum of dx.
  // `partial` is a workspace of (groups, sums, partial_rows, width) floats, two sums or three.
  static cudaError_t backward(cudaStream_t stream, const T* x, const W* scale, const float* mean,
                              const float* rstd, const T* dout, const T* dh, T* dx, W* dscale,
                              W* dbias, W* dx_bias, float* partial, int64_t groups, int64_t rows,
                              int64_t width, int64_t partial_rows);
};

}  // namespace jaxllm
