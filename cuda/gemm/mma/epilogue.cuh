// Epilogue of the tensor-core GEMM for sm_80: the auxiliary output, bias and GELU.
#pragma once

#include "activation/functions.cuh"
#include "gemm/mma/mainloop.cuh"

namespace jaxllm {
namespace {

// Stores two neighbours of a row, of which `left` lie in the output.
template <typename T>
__device__ __forceinline__ void store_pair(T* target, float first, float second, int64_t left,
                                           bool aligned) {
  if (left >= 2 && aligned) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(target) = {first, second};
    } else {
      *reinterpret_cast<uint32_t*>(target) = pack_pair<T>(first, second);
    }
  } else {
    if (left >= 1) target[0] = from_float<T>(first);
    if (left >= 2) target[1] = from_float<T>(second);
  }
}

// `first_row` and `first_column` are those of this lane's accumulator.
template <typename T>
__device__ __forceinline__ void mma_epilogue(const GemmParams<T>& params,
                                             const typename MmaTile<T>::Accumulator& accumulator,
                                             int64_t first_row, int64_t first_column) {
  using Tile = MmaTile<T>;
  const int64_t rows = params.a.extent, columns = params.b.extent;
  const auto store = [&](void* target, int64_t offset, float first, float second, int64_t left) {
    if (params.float32_out) {
      store_pair(static_cast<float*>(target) + offset, first, second, left, params.aligned);
    } else {
      store_pair(static_cast<T*>(target) + offset, first, second, left, params.aligned);
    }
  };
#pragma unroll
  for (int j = 0; j < Tile::kMmasN; ++j) {
    const int64_t column = first_column + 8 * j, left = columns - column;
    if (left <= 0) break;
    float bias[2] = {};
    if (params.bias != nullptr) {
      bias[0] = to_float(params.bias[column]);
      if (left >= 2) bias[1] = to_float(params.bias[column + 1]);
    }
#pragma unroll
    for (int i = 0; i < Tile::kMmasM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + 16 * i + 8 * half;
        if (row >= rows) break;
        float first = accumulator[i][j][2 * half], second = accumulator[i][j][2 * half + 1];
        const int64_t offset = row * columns + column;
        if (params.h != nullptr) store(params.h, offset, first, second, left);
        first += bias[0], second += bias[1];
        if (params.gelu) first = gelu(first), second = gelu(second);
        store(params.out, offset, first, second, left);
      }
    }
  }
}

}  // namespace
}  // namespace jaxllm
