#include <algorithm>

#include "common/launch.h"
#include "common/reduce_max.cuh"
#include "common/vector.cuh"
#include "quantization/quantize.h"

namespace jaxllm {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kMaxBlocks = 1 << 20;

// A warp a group.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    quantize_kernel(const T* w, int8_t* q, float* scales, int64_t groups, int64_t width) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t group = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; group < groups;
       group += step) {
    const T* from = w + group * width;
    float largest = 0.0f;
    for (int64_t i = lane; i < width; i += 32) largest = fmaxf(largest, fabsf(to_float(from[i])));
    const float scale = __fdiv_rn(max_over_lanes<32>(largest), 127.0f);
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = lane; i < width; i += 32) {
      // Ties go to even.
      const float rounded = rintf(__fdiv_rn(to_float(from[i]), divisor));
      q[group * width + i] = static_cast<int8_t>(fminf(fmaxf(rounded, -127.0f), 127.0f));
    }
    if (lane == 0) scales[group] = scale;
  }
}

// A thread an element.
template <typename T>
__global__ void dequantize_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                                  int64_t width) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    w[i] = from_float<T>(q[i] * scales[i / width]);
  }
}

// The same for as many neighbours of a group as make a pack; `count` and `width` are of packs.
template <typename T>
__global__ void dequantize_packs_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                                        int64_t width) {
  constexpr int kSize = kPackSize<T>;
  using Words = std::conditional_t<kSize == 4, int, int2>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const Words words = reinterpret_cast<const Words*>(q)[i];
    const float scale = __ldg(scales + i / width);
    float values[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const int word = reinterpret_cast<const int (&)[kSize / 4]>(words)[j / 4];
      values[j] = static_cast<int8_t>(word >> j % 4 * 8) * scale;
    }
    store(w + kSize * i, Pack<T>::of(values));
  }
}

}  // namespace

template <typename T>
cudaError_t GroupQuantization<T>::quantize(cudaStream_t stream, const T* w, int8_t* q,
                                           float* scales, int64_t groups, int64_t width) {
  if (groups == 0) return cudaSuccess;
  const int64_t blocks = std::min(divide_up(groups, kWarps), kMaxBlocks);
  quantize_kernel<<<blocks, 32 * kWarps, 0, stream>>>(w, q, scales, groups, width);
  return cudaGetLastError();
}

template <typename T>
cudaError_t GroupQuantization<T>::dequantize(cudaStream_t stream, const int8_t* q,
                                             const float* scales, T* w, int64_t groups,
                                             int64_t width) {
  const int64_t count = groups * width;
  if (count == 0) return cudaSuccess;
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>(std::min(divide_up(threads, 256), kMaxBlocks));
  };
  constexpr int kSize = kPackSize<T>;
  if (width % kSize == 0 && aligned_16(q, w)) {
    dequantize_packs_kernel<<<blocks(count / kSize), 256, 0, stream>>>(q, scales, w, count / kSize,
                                                                       width / kSize);
  } else {
    dequantize_kernel<<<blocks(count), 256, 0, stream>>>(q, scales, w, count, width);
  }
  return cudaGetLastError();
}

template struct GroupQuantization<float>;
template struct GroupQuantization<__nv_bfloat16>;
template struct GroupQuantization<__half>;

}  // namespace jaxllm
