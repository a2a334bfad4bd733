// What the kernels for a matrix and a few rows of x are given, and the norm of x.
#pragma once

#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// T is the type of x, W that of the matrix: T, or int8_t with a scale for each `group` of a row.
template <typename T, typename W>
struct MatvecArguments {
  const T* x;           // (rows, width)
  const W* matrix;      // (out, width)
  const float* scales;  // (out, width / group)
  const T* norm;        // x is divided by its root mean square and multiplied by this; may be null
  float eps;
  int64_t rows, width, group;
};

// Multiplies x by the norm's factors, and leaves the division by its root mean square to the
// products: `squares` gets each warp's share of the sum of squares, `stride` floats a row of x.
template <class Arguments, typename T>
__device__ const T* normalize(const Arguments& a, T* normed, float* squares, int stride) {
  const int width = a.width;
  for (int row = 0; row < a.rows; ++row) {
    float square[1] = {0.0f};
    for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
      const Pack<T, 8> pack = load_cached<8>(a.x + row * width + i);
      const Pack<T, 8> factor = load_cached<8>(a.norm + i);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square[0] += pack[j] * pack[j];
        values[j] = pack[j] * factor[j];
      }
      store(normed + row * width + i, Pack<T, 8>::of(values));
    }
    sum_over_lanes<32>(square);
    if (threadIdx.x % 32 == 0) squares[row * stride + threadIdx.x / 32] = square[0];
  }
  __syncthreads();
  return normed;
}

// One over the root mean square of a row of x.
template <class Arguments>
__device__ float rstd(const Arguments& a, const float* squares, int warps) {
  float square = 0.0f;
  for (int w = 0; w < warps; ++w) square += squares[w];
  return rsqrtf(square / a.width + a.eps);
}

}  // namespace jaxllm
