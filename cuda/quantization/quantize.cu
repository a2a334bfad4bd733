#include <algorithm>
#include <type_traits>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce_max.cuh"
#include "common/vector.cuh"
#include "quantization/quantize.h"

namespace jaxllm {
namespace {

constexpr int64_t kMaxBlocks = 1 << 20;

// As many neighbours as make a pack, in int8.
template <typename T>
using Bytes = std::conditional_t<kPackSize<T> == 4, uint32_t, uint2>;

// Ties go to even. Where a weight is not finite, nor is the scale, and all numbers of the group are
// 0: what is NaN becomes 0 on its way to an integer.
__device__ __forceinline__ int8_t quotient(float w, float divisor) {
  const int number = __float2int_rn(__fdiv_rn(w, divisor));
  return static_cast<int8_t>(min(max(number, -127), 127));
}

// Added to a number, it leaves the nearest integer in the lowest bits, and ties go to even.
constexpr float kRounder = 0x1.8p23f;

// The quotients of a pack. Products with the reciprocal are near enough to round to the same
// integer, unless they lie beside a tie; or the reciprocal, or a number, is not finite.
template <typename T>
__device__ __forceinline__ Bytes<T> quotients(const Pack<T>& pack, float divisor) {
  constexpr int kSize = kPackSize<T>;
  const float reciprocal = __frcp_rn(divisor);
  uint32_t numbers[kSize];
  bool sure = true;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float x = pack[i] * reciprocal, rounded = x + kRounder;
    sure = sure && fabsf(x - (rounded - kRounder)) < 0.4999f;
    numbers[i] = __float_as_uint(rounded);
  }
  if (!sure) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) numbers[i] = quotient(pack[i], divisor);
  }
  uint32_t words[kSize / 4];
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const uint32_t low = __byte_perm(numbers[i], numbers[i + 1], 0x0040);
    const uint32_t high = __byte_perm(numbers[i + 2], numbers[i + 3], 0x0040);
    words[i / 4] = __byte_perm(low, high, 0x5410);
  }
  return reinterpret_cast<const Bytes<T>&>(words);
}

constexpr int kThreads = 128;
constexpr int kPacks = 2;  // of a thread

// A pack a lane: kLanes of them have a group.
template <int kLanes, typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_packs_kernel(const T* w, int8_t* q, float* scales, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kPacks + threadIdx.x;
  Pack<T> packs[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = first + p * kThreads;
    packs[p] = i < count ? load_cached<kPackSize<T>>(w + i * kPackSize<T>) : Pack<T>{};
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = first + p * kThreads;
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kPackSize<T>; ++j) largest = max_or_nan(largest, fabsf(packs[p][j]));
    const float scale = __fdiv_rn(max_over_lanes<kLanes>(largest), 127.0f);
    if (i >= count) continue;
    __stcs(reinterpret_cast<Bytes<T>*>(q) + i, quotients(packs[p], scale == 0.0f ? 1.0f : scale));
    if (i % kLanes == 0) scales[i / kLanes] = scale;
  }
}

constexpr int kWarps = 8;

// A warp a group, of any width.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    quantize_kernel(const T* w, int8_t* q, float* scales, int64_t groups, int64_t width) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t group = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; group < groups;
       group += step) {
    const T* from = w + group * width;
    float largest = 0.0f;
    for (int64_t i = lane; i < width; i += 32) {
      largest = max_or_nan(largest, fabsf(to_float(from[i])));
    }
    const float scale = __fdiv_rn(max_over_lanes<32>(largest), 127.0f);
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = lane; i < width; i += 32) {
      q[group * width + i] = quotient(to_float(from[i]), divisor);
    }
    if (lane == 0) scales[group] = scale;
  }
}

// Which group an element or a pack is of: there are `width` to a group.
struct GroupOf {
  int64_t width;
  int shift;  // where the width is a power of two, its logarithm, and else -1

  explicit GroupOf(int64_t width_) : width(width_), shift(-1) {
    if ((width & (width - 1)) == 0) {
      for (shift = 0; int64_t{1} << shift < width; ++shift) {
      }
    }
  }
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return shift < 0 ? i / width : i >> shift;
  }
};

// A thread an element.
template <typename T>
__global__ void dequantize_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                                  GroupOf group_of) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    w[i] = from_float<T>(q[i] * scales[group_of(i)]);
  }
}

// The same for packs, of which there are `count`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_packs_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                            GroupOf group_of) {
  constexpr int kSize = kPackSize<T>;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kPacks + threadIdx.x;
  Bytes<T> bytes[kPacks];
  float scale[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = first + p * kThreads;
    if (i >= count) continue;
    bytes[p] = __ldg(reinterpret_cast<const Bytes<T>*>(q) + i);
    scale[p] = __ldg(scales + group_of(i));
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = first + p * kThreads;
    if (i >= count) continue;
    float values[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const uint32_t word = reinterpret_cast<const uint32_t (&)[kSize / 4]>(bytes[p])[j / 4];
      values[j] = static_cast<int8_t>(word >> j % 4 * 8) * scale[p];
    }
    store_streaming(w + kSize * i, Pack<T>::of(values));
  }
}

// Calls launch(std::integral_constant<int, lanes>) if so many lanes can have a group: 1, 2, ... 32.
template <int kLanes = 1, class Launch>
bool launch_with_lanes(int64_t lanes, Launch launch) {
  if (lanes == kLanes) {
    launch(std::integral_constant<int, kLanes>{});
    return true;
  }
  if constexpr (kLanes < 32) {
    return launch_with_lanes<2 * kLanes>(lanes, launch);
  } else {
    return false;
  }
}

}  // namespace

template <typename T>
cudaError_t GroupQuantization<T>::quantize(cudaStream_t stream, const T* w, int8_t* q,
                                           float* scales, int64_t groups, int64_t width) {
  if (groups == 0) return cudaSuccess;
  constexpr int kSize = kPackSize<T>;
  const int64_t count = groups * width / kSize;  // of packs
  cudaError_t status = cudaSuccess;
  const auto launch = [&](auto lanes) {
    status = launch_kernel(stream, quantize_packs_kernel<lanes, T>,
                           {divide_up(count, kThreads * kPacks), kThreads}, w, q, scales, count);
  };
  if (width % kSize == 0 && aligned_16(w, q) && launch_with_lanes(width / kSize, launch)) {
    return status;
  }
  const int64_t blocks = std::min(divide_up(groups, kWarps), kMaxBlocks);
  return launch_kernel(stream, quantize_kernel<T>, {blocks, 32 * kWarps}, w, q, scales, groups,
                       width);
}

template <typename T>
cudaError_t GroupQuantization<T>::dequantize(cudaStream_t stream, const int8_t* q,
                                             const float* scales, T* w, int64_t groups,
                                             int64_t width) {
  const int64_t count = groups * width;
  if (count == 0) return cudaSuccess;
  constexpr int kSize = kPackSize<T>;
  if (width % kSize == 0 && aligned_16(q, w)) {
    const int64_t blocks = divide_up(count / kSize, kThreads * kPacks);
    return launch_kernel(stream, dequantize_packs_kernel<T>, {blocks, kThreads}, q, scales, w,
                         count / kSize, GroupOf(width / kSize));
  }
  const int64_t blocks = std::min(divide_up(count, 256), kMaxBlocks);
  return launch_kernel(stream, dequantize_kernel<T>, {blocks, 256}, q, scales, w, count,
                       GroupOf(width));
}

template struct GroupQuantization<float>;
template struct GroupQuantization<__nv_bfloat16>;
template struct GroupQuantization<__half>;

}  // namespace jaxllm
