// The second stage of a deterministic column sum: adds the partial rows that blocks left behind.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

inline constexpr int kColumnSumThreads = 1024;

// Block (x, y) adds 32 columns of matrix y: 32 warps take the rows in turn, then meet in shared
// memory. The order of the additions depends on the shape alone.
template <typename T>
__global__ void __launch_bounds__(kColumnSumThreads)
    column_sum_kernel(const float* partial, T* first, T* second, int64_t rows, int64_t row_stride,
                      int64_t width) {
  __shared__ float sums[32][33];  // 33: a warp that reads a column meets no bank twice
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  partial += int64_t{blockIdx.y} * row_stride * width;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 8  // several loads on their way at once
    for (int64_t row = warp; row < rows; row += 32) sum += partial[row * width + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  // Warp w finishes column w of the 32.
  float total[1] = {sums[lane][warp]};
  sum_over_lanes<32>(total);
  const int64_t my_column = int64_t{blockIdx.x} * 32 + warp;
  if (lane == 0 && my_column < width) {
    // Matrices alternate between the two outputs, where there are two.
    const int64_t matrix = second ? blockIdx.y / 2 : blockIdx.y;
    T* out = second && blockIdx.y % 2 ? second : first;
    out[matrix * width + my_column] = from_float<T>(total[0]);
  }
}

// Adds the first `rows` of each (row_stride, width) matrix in `partial`, `groups` of them, or twice
// as many where there is a `second` output: then each group holds a matrix for either output.
template <typename T>
cudaError_t column_sum(cudaStream_t stream, const float* partial, T* first, T* second,
                       int64_t groups, int64_t rows, int64_t row_stride, int64_t width) {
  const dim3 grid(divide_up(width, 32), groups * (second ? 2 : 1));
  column_sum_kernel<<<grid, kColumnSumThreads, 0, stream>>>(partial, first, second, rows,
                                                            row_stride, width);
  return cudaGetLastError();
}

}  // namespace jaxllm
