// Parameters of the GEMV kernels, and the RMS norm of x that they fuse.
#pragma once

#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// T is the type of x, W that of the weights: T, or int8_t with a scale for each `group` of a row.
template <typename T, typename W>
struct MatvecParams {
  const T* x;           // (rows, width)
  const W* weight;      // (outputs, width)
  const float* scales;  // (outputs, width / group)
  const T* norm;        // the RMS norm's scale, (width,); null for no norm
  float eps;
  int64_t rows, width, group;
};

// Writes x times the norm's scale to shared memory; the epilogue multiplies by rstd. `squares` gets
// each warp's share of a row's sum of squares, `stride` floats a row.
template <class Params, typename T>
__device__ const T* scale_rows(const Params& p, T* scaled, float* squares, int stride) {
  const int width = p.width;
  for (int row = 0; row < p.rows; ++row) {
    float square[1] = {0.0f};
    for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
      const Pack<T, 8> pack = load_cached<8>(p.x + row * width + i);
      const Pack<T, 8> scale = load_cached<8>(p.norm + i);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square[0] += pack[j] * pack[j];
        values[j] = pack[j] * scale[j];
      }
      store(scaled + row * width + i, Pack<T, 8>::of(values));
    }
    sum_over_lanes<32>(square);
    if (threadIdx.x % 32 == 0) squares[row * stride + threadIdx.x / 32] = square[0];
  }
  __syncthreads();
  return scaled;
}

template <class Params>
__device__ float rstd(const Params& p, const float* squares, int warps) {
  float square = 0.0f;
  for (int w = 0; w < warps; ++w) square += squares[w];
  return rsqrtf(square / p.width + p.eps);
}

}  // namespace jaxllm
