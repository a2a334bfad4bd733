// The softmax along the rows of a (rows, width) array.
//
// Each `length` rows are the queries of a causal mask, over `width` keys: query t sees the keys up
// to t + width - length, and all else is zero. With a length of 1 every row sees all keys. At most
// 2^30 columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

template <typename T>
struct Softmax {
  // out = e^(scale * x - m) / sum(e^(scale * x - m)), where m is the row's largest scale * x.
  static cudaError_t forward(cudaStream_t stream, const T* x, float scale, T* out, int64_t rows,
                             int64_t width, int64_t length);

  // dx = scale * out * (dout - sum(out * dout)).
  static cudaError_t backward(cudaStream_t stream, const T* out, const T* dout, float scale, T* dx,
                              int64_t rows, int64_t width, int64_t length);
};

}  // namespace jaxllm
