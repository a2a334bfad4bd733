// The product of a matrix and one row of x, the matrix straight into registers.
#pragma once

#include "common/dependent_launch.cuh"
#include "gemm/matvec_arguments.cuh"

namespace jaxllm {

// Four int8 numbers as floats, exactly: offset by 128 they are the last bits of a number of 2^23.
__device__ __forceinline__ void widen_four(uint32_t word, float (&floats)[4]) {
  word ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    floats[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
  }
}

// kWarpsPerPair warps share a pair of rows, 32 times 16 bytes of each at a time.
// int8 has half the loads in flight, since it has twice the numbers to widen.
template <int kWarpsPerPair, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256, 4)
    matvec_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W), kSteps = sizeof(W) == 1 ? 2 : 4;
  constexpr int kWarps = 8, kStride = 32 * kWarpsPerPair;
  __shared__ float partial[kWarps][2];
  __shared__ float squares[kWarps];
  extern __shared__ __align__(128) char memory[];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % kWarpsPerPair;
  const int64_t own = int64_t{blockIdx.x} * (kWarps / kWarpsPerPair) + warp / kWarpsPerPair;
  const int64_t pair = min(own, epilogue.pairs() - 1);
  const int width = a.width, packs = width / kPerLane;
  const int groups = sizeof(W) == 1 ? width / a.group : 0, shift = __ffsll(a.group) - 1;
  const W* matrix[2];
  const float* scale_of[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row =
        min(h == 0 ? epilogue.first(pair) : epilogue.second(pair), epilogue.rows() - 1);
    matrix[h] = a.matrix + row * width;
    scale_of[h] = sizeof(W) == 1 ? a.scales + row * groups : nullptr;
  }
  launch_dependent_grids();

  uint32_t words[kSteps][2][4];
  float scales[kSteps][2];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = first + u * kStride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int4 found = {0, 0, 0, 0};
        if (at < packs) found = __ldcs(reinterpret_cast<const int4*>(matrix[h]) + at);
        words[u][h][0] = found.x, words[u][h][1] = found.y;
        words[u][h][2] = found.z, words[u][h][3] = found.w;
        if constexpr (sizeof(W) == 1) {
          scales[u][h] = at < packs ? __ldg(scale_of[h] + (at * kPerLane >> shift)) : 0.0f;
        }
      }
    }
  };
  int first = part * 32 + lane;
  fetch(first);
  wait_on_dependent_grids();
  const T* x = a.x;
  if (a.norm != nullptr) x = normalize(a, reinterpret_cast<T*>(memory), squares, kWarps);

  float sums[2] = {};
  while (true) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = min(first + u * kStride, packs - 1);  // past the end the matrix reads as zeros
      float factors[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane / 8; ++i) {
        const Pack<T, 8> pack = load<8>(x + at * kPerLane + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) factors[8 * i + j] = pack[j];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.0f;
        if constexpr (sizeof(W) == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float weights[4];
            widen_four(words[u][h][i], weights);
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
    first += kSteps * kStride;
    if (first - lane >= packs) break;
    fetch(first);
  }

  sum_over_lanes<32>(sums);
  if (lane == 0) {
    partial[warp][0] = sums[0];
    partial[warp][1] = sums[1];
  }
  __syncthreads();
  if (part != 0 || lane != 0 || own >= epilogue.pairs()) return;
  float products[2] = {};
#pragma unroll
  for (int w = 0; w < kWarpsPerPair; ++w) {
    products[0] += partial[warp + w][0];
    products[1] += partial[warp + w][1];
  }
  const float factor = a.norm == nullptr ? 1.0f : rstd(a, squares, kWarps);
  epilogue.store(own, 0, products[0] * factor, products[1] * factor);
}

}  // namespace jaxllm
