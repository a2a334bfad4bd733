#include <algorithm>
#include <type_traits>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "quantization/quantize.h"

namespace jaxllm {
namespace {

constexpr int64_t kMaxCtas = 1 << 20;

// The int8 elements of a pack of T.
template <typename T>
using Int8Pack = std::conditional_t<kPackSize<T> == 4, uint32_t, uint2>;

// Rounds w / divisor to the nearest int8; ties go to even. Where a weight is not finite, its scale
// is not either, and the whole group is 0: a NaN converts to 0.
__device__ __forceinline__ int8_t quantize_one(float w, float divisor) {
  const int rounded = __float2int_rn(__fdiv_rn(w, divisor));
  return static_cast<int8_t>(min(max(rounded, -127), 127));
}

// Added to a float, it leaves the nearest integer in the lowest bits; ties go to even.
constexpr float kRounder = 0x1.8p23f;

// Quantizes a pack, multiplied by the reciprocal of the divisor. Where a product is not finite, or
// so near a tie that the quotient may round to another integer, the pack is divided instead.
template <typename T>
__device__ __forceinline__ Int8Pack<T> quantize_pack(const Pack<T>& pack, float divisor) {
  constexpr int kSize = kPackSize<T>;
  const float reciprocal = __frcp_rn(divisor);
  uint32_t rounded[kSize];
  bool sure = true;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float x = pack[i] * reciprocal, sum = x + kRounder;
    sure = sure && fabsf(x - (sum - kRounder)) < 0.4999f;
    rounded[i] = __float_as_uint(sum);
  }
  if (!sure) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) rounded[i] = quantize_one(pack[i], divisor);
  }
  uint32_t words[kSize / 4];
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const uint32_t low = __byte_perm(rounded[i], rounded[i + 1], 0x0040);
    const uint32_t high = __byte_perm(rounded[i + 2], rounded[i + 3], 0x0040);
    words[i / 4] = __byte_perm(low, high, 0x5410);
  }
  return reinterpret_cast<const Int8Pack<T>&>(words);
}

constexpr int kThreads = 128;
constexpr int kPacks = 2;  // for each thread

// kLanes lanes share a group, a pack each.
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
    __stcs(reinterpret_cast<Int8Pack<T>*>(q) + i,
           quantize_pack(packs[p], scale == 0.0f ? 1.0f : scale));
    if (i % kLanes == 0) scales[i / kLanes] = scale;
  }
}

constexpr int kWarps = 8;

// Fallback for any width: a warp for each group.
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
      q[group * width + i] = quantize_one(to_float(from[i]), divisor);
    }
    if (lane == 0) scales[group] = scale;
  }
}

// Maps the index of an element, or of a pack, to its group of `width` of them.
struct GroupOf {
  int64_t width;
  int shift;  // log2 of a width that is a power of two, and else -1

  explicit GroupOf(int64_t width_) : width(width_), shift(-1) {
    if ((width & (width - 1)) == 0) {
      for (shift = 0; int64_t{1} << shift < width;) ++shift;
    }
  }
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return shift < 0 ? i / width : i >> shift;
  }
};

// Fallback for any width: element by element.
template <typename T>
__global__ void dequantize_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                                  GroupOf group_of) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    w[i] = from_float<T>(q[i] * scales[group_of(i)]);
  }
}

// Two packs for each thread, of `count` in all.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_packs_kernel(const int8_t* q, const float* scales, T* w, int64_t count,
                            GroupOf group_of) {
  constexpr int kSize = kPackSize<T>;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kPacks + threadIdx.x;
  Int8Pack<T> bytes[kPacks];
  float scale[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t i = first + p * kThreads;
    if (i >= count) continue;
    bytes[p] = __ldg(reinterpret_cast<const Int8Pack<T>*>(q) + i);
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

// Calls launch(std::integral_constant<int, lanes>) where `lanes` is one of kLanes, and returns
// whether it is.
template <int... kLanes, class Launch>
bool launch_with_lanes(int64_t lanes, Launch launch) {
  return ((lanes == kLanes && (launch(std::integral_constant<int, kLanes>{}), true)) || ...);
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
  if (width % kSize == 0 && aligned_16(w, q) &&
      launch_with_lanes<1, 2, 4, 8, 16, 32>(width / kSize, launch)) {
    return status;
  }
  const int64_t ctas = std::min(divide_up(groups, kWarps), kMaxCtas);
  return launch_kernel(stream, quantize_kernel<T>, {ctas, 32 * kWarps}, w, q, scales, groups,
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
    const int64_t ctas = divide_up(count / kSize, kThreads * kPacks);
    return launch_kernel(stream, dequantize_packs_kernel<T>, {ctas, kThreads}, q, scales, w,
                         count / kSize, GroupOf(width / kSize));
  }
  const int64_t ctas = std::min(divide_up(count, 256), kMaxCtas);
  return launch_kernel(stream, dequantize_kernel<T>, {ctas, 256}, q, scales, w, count,
                       GroupOf(width));
}

template struct GroupQuantization<float>;
template struct GroupQuantization<__nv_bfloat16>;
template struct GroupQuantization<__half>;

}  // namespace jaxllm
