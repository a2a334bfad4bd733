// Epilogue of the float32 GEMMs: the auxiliary output, bias and GELU.
#pragma once

#include "activation/functions.cuh"
#include "gemm/gemm_params.cuh"

namespace jaxllm {
namespace {

// Stores four neighbours of a row, of which `left` lie in the output.
__device__ __forceinline__ void store_quad(float* target, const float (&values)[4], int64_t left,
                                           bool aligned) {
  if (aligned && left >= 4) {
    *reinterpret_cast<float4*>(target) = reinterpret_cast<const float4&>(values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) target[i] = values[i];
    }
  }
}

// Row i of a thread's accumulator is row first_row + row_offset(i) of the output; its quads of
// columns are 16 apart.
template <int kRows, int kColumnQuads, class RowOffset>
__device__ __forceinline__ void float32_epilogue(const GemmParams<float>& params,
                                                 float (&accumulator)[kRows][kColumnQuads][4],
                                                 int64_t first_row, int64_t first_column,
                                                 RowOffset row_offset) {
  float* const h = static_cast<float*>(params.h);
#pragma unroll
  for (int quad = 0; quad < kColumnQuads; ++quad) {
    const int64_t column = first_column + quad * 16, left = params.b.extent - column;
    if (left <= 0) break;
    float bias[4] = {};
    if (params.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[i] = i < left ? params.bias[column + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + row_offset(i);
      if (row >= params.a.extent) break;
      float (&values)[4] = accumulator[i][quad];
      const int64_t offset = row * params.b.extent + column;
      if (h != nullptr) store_quad(h + offset, values, left, params.aligned);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[j] += bias[j];
        if (params.gelu) values[j] = gelu(values[j]);
      }
      store_quad(static_cast<float*>(params.out) + offset, values, left, params.aligned);
    }
  }
}

}  // namespace
}  // namespace jaxllm
