// GEMV: the product of a weight matrix and a few rows of x.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// T is the type of x and out, W that of the weights: T, or int8_t with scales.
template <typename T, typename W>
struct MatrixVector {
  // out, (rows, count), of x, (rows, width), and `weight`, (count, width), whose scales are
  // (count, width / group).
  static cudaError_t run(cudaStream_t stream, const W* weight, const float* scales, int64_t group,
                         const T* x, T* out, int64_t rows, int64_t width, int64_t count);
};

}  // namespace jaxllm
