// SwiGLU and its gradients, rounded to 8-bit floats with a given scale, in the layouts that a GEMM
// on Hopper reads.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// gate_up is (rows, 2 width): the gates, then what they gate. What is finite does not overflow.
//
// cudaErrorNotSupported where the width is no multiple of 8, where a transposed matrix is wanted
// and the rows are no multiple of 16, and where a pointer is not a multiple of 16 bytes.
template <typename T>
struct Float8Swiglu {
  const T* gate_up;
  const float* scale;
  int64_t rows, width;

  // values = round(silu(gate) up / scale), (rows, width); transposed (width, rows), nullptr where
  // it is not wanted.
  cudaError_t forward(cudaStream_t stream, __nv_fp8_e4m3* values, __nv_fp8_e4m3* transposed) const;

  // The gradient of gate_up, given that of the result, (rows, width), over scale: values (rows, 2
  // width) and transposed (2 width, rows).
  cudaError_t backward(cudaStream_t stream, const T* dout, __nv_fp8_e5m2* values,
                       __nv_fp8_e5m2* transposed) const;
};

}  // namespace jaxllm
