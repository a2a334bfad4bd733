// The RMS norm of query heads and key heads, of a model like Qwen3, between the qkv GEMV and decode
// attention.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "gemm/matvec/epilogue.cuh"

namespace jaxllm {

constexpr int kHeadNormThreads = 128;

// A warp has a head of a row. The epilogue rotates the normalized heads, and appends to the caches;
// values go to it as they are.
template <typename T>
__global__ void __launch_bounds__(kHeadNormThreads)
    decode_block_head_norm_kernel(const T* qkv, const T* q_norm, const T* k_norm, float eps,
                                  int64_t rows, QkvRopeEpilogue<T> epilogue) {
  launch_dependent_grids();
  const int64_t heads = epilogue.heads + 2 * epilogue.kv_heads;
  const int64_t item = blockIdx.x * int64_t{kHeadNormThreads / 32} + threadIdx.x / 32;
  wait_on_dependent_grids();
  if (item >= rows * heads) return;
  const int64_t row = item / heads, head = item % heads;
  const int half = static_cast<int>(epilogue.width / 2), lane = threadIdx.x % 32;
  const T* const first = qkv + item * epilogue.width;
  const T* const second = first + half;
  const bool is_value = head >= epilogue.heads + epilogue.kv_heads;
  const T* const scale = is_value ? nullptr : head < epilogue.heads ? q_norm : k_norm;
  float squares[1] = {0.0f};
  for (int j = lane; j < half; j += 32) {
    const float a = to_float(first[j]), b = to_float(second[j]);
    squares[0] += a * a + b * b;
  }
  sum_over_lanes<32>(squares);
  const float rstd = rsqrtf(squares[0] / (2 * half) + eps);
  for (int j = lane; j < half; j += 32) {
    float a = to_float(first[j]), b = to_float(second[j]);
    if (scale != nullptr) {
      a *= rstd * to_float(scale[j]);
      b *= rstd * to_float(scale[j + half]);
    }
    epilogue.store(head * half + j, row, a, b);
  }
}

}  // namespace jaxllm
