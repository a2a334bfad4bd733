// Cross entropy of the softmax of each row of logits against a label, and its gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

struct CrossEntropyOptions {
  int64_t ignore_index;  // the label of rows with loss and gradient zero
  float label_smoothing, z_loss;
  int64_t vocab_size;  // columns from there on are padding
};

// T is the dtype of the logits.
template <typename T>
struct CrossEntropy {
  // losses = lse - (1 - smoothing) * logit[label] - smoothing * mean(logits) + z_loss * lse^2. A
  // row whose label is neither a column of the vocabulary nor ignore_index has loss and gradient
  // NaN.
  static cudaError_t forward(cudaStream_t stream, const T* logits, const int32_t* labels,
                             CrossEntropyOptions options, float* losses, int64_t rows,
                             int64_t width);

  // The same, and stores the gradient times a scale over the logits. Each of `scales` belongs to
  // rows_per_scale rows.
  static cudaError_t forward_with_gradient(cudaStream_t stream, T* logits, const int32_t* labels,
                                           const float* scales, CrossEntropyOptions options,
                                           float* losses, int64_t rows, int64_t width,
                                           int64_t rows_per_scale);

  // Multiplies `groups` runs of `size` elements in place, each by its factor.
  static cudaError_t backward(cudaStream_t stream, T* dlogits, const float* factors, int64_t groups,
                              int64_t size);
};

}  // namespace jaxllm
