// The scale and the bias of a norm made part of the linear layer after it, and the gradients of all
// four given those of that layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// A layer's weight (width, columns) and bias (columns), and its norm's scale and bias (width).
template <typename T>
struct NormAndLayer {
  const T *scale, *norm_bias, *weight, *bias;
  int64_t width, columns;
};

// The columns are a multiple of eight and pointers of 16 bytes, or the launchers return
// cudaErrorNotSupported.
template <typename T>
struct NormLayer {
  // with_weight = diag(scale) weight, with_bias = bias + norm_bias weight.
  static cudaError_t forward(cudaStream_t stream, const NormAndLayer<T>& layer, T* with_weight,
                             T* with_bias);

  // With dweight and dbias of that weight and that bias: of_weight = diag(scale) dweight +
  // norm_bias dbias^T, of_scale = the sums over columns of weight dweight, elementwise, and of_bias
  // = weight dbias, which is the gradient of the norm's bias. That of the layer's is dbias. The
  // layer's bias is not read.
  static cudaError_t backward(cudaStream_t stream, const NormAndLayer<T>& layer, const T* dweight,
                              const T* dbias, T* of_scale, T* of_bias, T* of_weight);
};

}  // namespace jaxllm
