// Root-mean-square normalization: out = n * scale, where n = x * rstd, with
// rstd = 1 / sqrt(mean(x^2) + eps).
//
// dx = rstd * (g - n * mean(g * n)), where g = scale * dout.
#pragma once

#include "norm/norm.h"

namespace jaxllm {

template <typename T, typename W>
struct RmsNorm {
  static constexpr bool kCenters = false;

  static cudaError_t forward(cudaStream_t stream, const NormForwardParams<T, W>& params);
  static cudaError_t backward(cudaStream_t stream, const NormBackwardParams<T, W>& params);
};

}  // namespace jaxllm
