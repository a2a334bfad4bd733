// GEMV of one row of x on CUDA cores. The weights go from global memory straight to registers.
#pragma once

#include "common/convert_int8.cuh"
#include "common/dependent_launch.cuh"
#include "gemm/matvec/epilogue.cuh"
#include "gemm/matvec/params.cuh"

namespace jaxllm {

// kWarpsPerPair warps share a pair of weight rows, 32 times 16 bytes of each at a time. int8 has
// half the loads in flight, because a load has twice the elements to convert.
template <int kWarpsPerPair, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256, 4)
    matvec_kernel(const MatvecParams<T, W> p, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W), kLoads = sizeof(W) == 1 ? 2 : 4;
  constexpr int kWarps = 8, kStride = 32 * kWarpsPerPair;
  __shared__ float partial[kWarps][2];
  __shared__ float squares[kWarps];
  extern __shared__ __align__(128) char smem[];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp % kWarpsPerPair;
  const int64_t own = int64_t{blockIdx.x} * (kWarps / kWarpsPerPair) + warp / kWarpsPerPair;
  const int64_t pair = min(own, epilogue.pairs() - 1);
  const int width = p.width, packs = width / kPerLane;
  const int groups = sizeof(W) == 1 ? width / p.group : 0, group_shift = __ffsll(p.group) - 1;
  const W* weight[2];
  const float* row_scales[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = weight_row(epilogue, pair, h);
    weight[h] = p.weight + row * width;
    row_scales[h] = sizeof(W) == 1 ? p.scales + row * groups : nullptr;
  }
  launch_dependent_grids();

  int4 words[kLoads][2];
  float scales[kLoads][2];
  const auto load_weights = [&](int first) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int at = first + u * kStride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[u][h] = {0, 0, 0, 0};
        if (at < packs) words[u][h] = __ldcs(reinterpret_cast<const int4*>(weight[h]) + at);
        if constexpr (sizeof(W) == 1) {
          scales[u][h] = at < packs ? __ldg(row_scales[h] + (at * kPerLane >> group_shift)) : 0.0f;
        }
      }
    }
  };
  int first = slice * 32 + lane;
  load_weights(first);
  wait_on_dependent_grids();
  const T* x = p.x;
  if (p.norm != nullptr) x = scale_rows(p, reinterpret_cast<T*>(smem), squares, kWarps);

  float sums[2] = {};
  while (true) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int at = min(first + u * kStride, packs - 1);  // past the end the weights are zeros
      const Pack<T, kPerLane> factors = load<kPerLane>(x + at * kPerLane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.0f;
        if constexpr (sizeof(W) == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float weights[4];
            convert_int8x4(reinterpret_cast<const uint32_t (&)[4]>(words[u][h])[i], weights);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += weights[j] * factors[4 * i + j];
          }
          sum *= scales[u][h];
        } else {
          const Pack<T, 8>& weights = reinterpret_cast<const Pack<T, 8>&>(words[u][h]);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += weights[i] * factors[i];
        }
        sums[h] += sum;
      }
    }
    first += kLoads * kStride;
    if (first - lane >= packs) break;
    load_weights(first);
  }

  sum_over_lanes<32>(sums);
  if (lane == 0) {
    partial[warp][0] = sums[0];
    partial[warp][1] = sums[1];
  }
  __syncthreads();
  if (slice != 0 || lane != 0 || own >= epilogue.pairs()) return;
  float products[2] = {};
#pragma unroll
  for (int w = 0; w < kWarpsPerPair; ++w) {
    products[0] += partial[warp + w][0];
    products[1] += partial[warp + w][1];
  }
  const float factor = p.norm == nullptr ? 1.0f : rstd(p, squares, kWarps);
  epilogue.store(own, 0, products[0] * factor, products[1] * factor);
}

// Fallback for any type, width, group and alignment: a warp for each pair, element by element.
template <typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256)
    matvec_fallback_kernel(const MatvecParams<T, W> p, const Epilogue epilogue) {
  const int lane = threadIdx.x % 32;
  const int64_t pair = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  launch_dependent_grids();
  wait_on_dependent_grids();
  if (pair >= epilogue.pairs()) return;
  const int64_t weight_rows[2] = {weight_row(epilogue, pair, 0), weight_row(epilogue, pair, 1)};
  for (int64_t row = 0; row < p.rows; ++row) {
    float sums[3] = {};  // the two products, and the squares of x
    for (int64_t i = lane; i < p.width; i += 32) {
      float x = to_float(p.x[row * p.width + i]);
      sums[2] += x * x;
      if (p.norm != nullptr) x *= to_float(p.norm[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weight = to_float(p.weight[weight_rows[h] * p.width + i]);
        if constexpr (sizeof(W) == 1) {
          weight *= p.scales[weight_rows[h] * (p.width / p.group) + i / p.group];
        }
        sums[h] += weight * x;
      }
    }
    sum_over_lanes<32>(sums);
    const float rstd = p.norm == nullptr ? 1.0f : rsqrtf(sums[2] / p.width + p.eps);
    if (lane == 0) epilogue.store(pair, row, sums[0] * rstd, sums[1] * rstd);
  }
}

}  // namespace jaxllm
