// Root-mean-square normalization, alone and fused with the residual addition before it.
//
// Groups, T and W as in layer_norm.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T, typename W>
struct RmsNorm {
  // out = x * rstd * scale, with rstd = 1 / sqrt(mean(x^2) + eps).
  // Where `residual` is not null, x + residual takes the place of x and is written to `h`. `rstd`,
  // of which nobody asks without a backward, may be null.
  static cudaError_t forward(cudaStream_t stream, const T* x, const T* residual, const W* scale,
                             float eps, T* out, T* h, float* rstd, int64_t groups, int64_t rows,
                             int64_t width);

  // dx = rstd * (g - n * mean(g * n)), where n = x * rstd and g = scale * dout, plus `dh` where
  // that is not null; dscale is the sum over rows of n * dout. `partial` is a workspace of
  // (groups, 1, partial_rows, width) floats.
  static cudaError_t backward(cudaStream_t stream, const T* x, const W* scale, const float* rstd,
                              const T* dout, const T* dh, T* dx, W* dscale, float* partial,
                              int64_t groups, int64_t rows, int64_t width, int64_t partial_rows);
};

}  // namespace jaxllm
