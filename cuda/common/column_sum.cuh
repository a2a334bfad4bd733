// The second stage of a deterministic column sum: adds the partial rows that the CTAs of the first
// stage stored.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

inline constexpr int kColumnSumThreads = 1024;

template <typename T, int kOutputs>
struct ColumnSumOutputs {
  T* arrays[kOutputs];
};

// The sum of column `first_column + warp` of a (rows, width) matrix, in each lane of the warp. Warp
// w of the CTA's 32 adds rows w, w + 32, ..., a column in each lane; the sums of the warps meet in
// shared memory. The order of the additions depends on the shape alone.
__device__ __forceinline__ float sum_column_of_warp(const float* partial, int64_t rows,
                                                    int64_t width, int64_t first_column) {
  __shared__ float sums[32][33];  // 33: no bank conflict where a warp loads a column
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = first_column + lane;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 8  // several loads in flight
    for (int64_t row = warp; row < rows; row += 32) sum += partial[row * width + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  float total[1] = {sums[lane][warp]};
  sum_over_lanes<32>(total);
  return total[0];
}

// CTA (x, y) adds 32 columns of matrix y.
template <typename T, int kOutputs>
__global__ void __launch_bounds__(kColumnSumThreads)
    column_sum_kernel(const float* partial, ColumnSumOutputs<T, kOutputs> outputs, int64_t rows,
                      int64_t row_stride, int64_t width) {
  wait_on_dependent_grids();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_column = int64_t{blockIdx.x} * 32, my_column = first_column + warp;
  const float total = sum_column_of_warp(partial + int64_t{blockIdx.y} * row_stride * width, rows,
                                         width, first_column);
  if (lane == 0 && my_column < width) {
    // Matrix y belongs to output y % kOutputs.
    T* out = outputs.arrays[blockIdx.y % kOutputs];
    out[blockIdx.y / kOutputs * width + my_column] = from_float<T>(total);
  }
}

// Adds the first `rows` rows of each (row_stride, width) matrix in `partial`: (groups, kOutputs,
// row_stride, width).
template <typename T, int kOutputs>
cudaError_t column_sum(cudaStream_t stream, const float* partial, T* const (&outputs)[kOutputs],
                       int64_t groups, int64_t rows, int64_t row_stride, int64_t width) {
  ColumnSumOutputs<T, kOutputs> columns;
  std::copy(outputs, outputs + kOutputs, columns.arrays);
  Launch launch;
  launch.grid = dim3(divide_up(width, 32), groups * kOutputs);
  launch.block = dim3(kColumnSumThreads);
  launch.pdl = true;
  return launch_kernel(stream, column_sum_kernel<T, kOutputs>, launch, partial, columns, rows,
                       row_stride, width);
}

}  // namespace jaxllm
