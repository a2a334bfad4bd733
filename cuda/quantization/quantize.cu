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
__global__ void dequantize_kernel(const int8_t* q, const float* scales, float* w, int64_t count,
                                  int64_t width) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    w[i] = q[i] * scales[i / width];
  }
}

// The same for four neighbours of a group at a time.
__global__ void dequantize_fours_kernel(const char4* q, const float* scales, float4* w,
                                        int64_t count, int64_t width) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const char4 four = q[i];
    const float scale = __ldg(scales + i / width);
    w[i] = make_float4(four.x * scale, four.y * scale, four.z * scale, four.w * scale);
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

cudaError_t dequantize(cudaStream_t stream, const int8_t* q, const float* scales, float* w,
                       int64_t groups, int64_t width) {
  const int64_t count = groups * width;
  if (count == 0) return cudaSuccess;
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>(std::min(divide_up(threads, 256), kMaxBlocks));
  };
  if (width % 4 == 0 && aligned_16(q, w)) {
    dequantize_fours_kernel<<<blocks(count / 4), 256, 0, stream>>>(
        reinterpret_cast<const char4*>(q), scales, reinterpret_cast<float4*>(w), count / 4,
        width / 4);
  } else {
    dequantize_kernel<<<blocks(count), 256, 0, stream>>>(q, scales, w, count, width);
  }
  return cudaGetLastError();
}

template struct GroupQuantization<float>;
template struct GroupQuantization<__nv_bfloat16>;
template struct GroupQuantization<__half>;

}  // namespace jaxllm
