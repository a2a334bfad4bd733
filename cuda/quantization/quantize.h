// Quantization to int8 with a scale for each group of neighbours, and back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// `groups` groups of `width` elements of T.
template <typename T>
struct GroupQuantization {
  static cudaError_t quantize(cudaStream_t stream, const T* w, int8_t* q, float* scales,
                              int64_t groups, int64_t width);
  static cudaError_t dequantize(cudaStream_t stream, const int8_t* q, const float* scales, T* w,
                                int64_t groups, int64_t width);
};

}  // namespace jaxllm
