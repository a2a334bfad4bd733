// Layer normalization: out = n * scale + bias, where n = (x - mean) * rstd, with the row's mean and
// rstd = 1 / sqrt(variance + eps).
//
// dx = rstd * (g - mean(g) - n * mean(g * n)), where g = scale * dout.
#pragma once

#include "norm/norm.h"

namespace jaxllm {

template <typename T, typename W>
struct LayerNorm {
  static constexpr bool kCenters = true;

  static cudaError_t forward(cudaStream_t stream, const NormForwardParams<T, W>& params);
  static cudaError_t backward(cudaStream_t stream, const NormBackwardParams<T, W>& params);
};

}  // namespace jaxllm
