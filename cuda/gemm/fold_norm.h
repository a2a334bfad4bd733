// A norm's scale and bias folded into the linear layer after it, and the gradients of all four from
// those of the folded layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// A layer's weight (width, columns) and bias (columns), and its norm's scale and bias (width).
template <typename T>
struct NormAndLinear {
  const T *scale, *norm_bias, *weight, *bias;
  int64_t width, columns;
};

// The columns are a multiple of eight and pointers of 16 bytes, or the launchers return
// cudaErrorNotSupported.
template <typename T>
struct FoldNormLayer {
  // folded_weight = diag(scale) weight, folded_bias = bias + norm_bias weight.
  static cudaError_t forward(cudaStream_t stream, const NormAndLinear<T>& layer, T* folded_weight,
                             T* folded_bias);

  // From the gradients of these two: dweight = diag(scale) dfolded_weight + norm_bias
  // dfolded_bias^T, dscale = the sums over columns of weight dfolded_weight, elementwise, and
  // dnorm_bias = weight dfolded_bias. That of the layer's bias is dfolded_bias. The layer's bias is
  // not read.
  static cudaError_t backward(cudaStream_t stream, const NormAndLinear<T>& layer,
                              const T* dfolded_weight, const T* dfolded_bias, T* dscale,
                              T* dnorm_bias, T* dweight);
};

}  // namespace jaxllm
