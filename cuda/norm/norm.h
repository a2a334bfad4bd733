// What the launchers of layer normalization and of RMS normalization take, alone and fused with the
// residual addition before the norm.
//
// Every array is dense. A call holds `groups` independent problems of `rows` rows each (the axis
// that jax.vmap adds), with its own weights for each group. T is the dtype of the rows, W that of
// the weights: T or float. RMS normalization has no mean and no biases: their pointers are null.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T, typename W>
struct NormForwardParams {
  // Where `residual` is not null, h = x + x_bias + residual is normalized instead of x, and stored.
  const T *x, *residual;           // (groups, rows, width)
  const W *x_bias, *scale, *bias;  // (groups, width); x_bias may be null
  float eps;
  T *out, *h;          // (groups, rows, width)
  float *mean, *rstd;  // (groups, rows), for the backward pass; both may be null
  int64_t groups, rows, width;
};

template <typename T, typename W>
struct NormBackwardParams {
  const T* x;                // (groups, rows, width)
  const W* scale;            // (groups, width)
  const float *mean, *rstd;  // (groups, rows)
  const T *dout, *dh;        // (groups, rows, width); dh is added to dx, or is null
  T* dx;                     // (groups, rows, width)
  // (groups, width): the sums over rows of n * dout, where n is the normalized row, of dout, and of
  // dx. dx_bias may be null.
  W *dscale, *dbias, *dx_bias;
  float* partial;  // a workspace: (groups, the number of these sums, partial_rows, width)
  int64_t groups, rows, width, partial_rows;
};

}  // namespace jaxllm
