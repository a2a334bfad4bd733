#include <algorithm>
#include <climits>
#include <type_traits>

#include "attention/repeat_kv.h"
#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

inline constexpr int kThreads = 256;

// A row of threads reads a head once and writes it `groups` times. A Word is 16 bytes, or an
// element where heads do not begin at multiples of 16 bytes.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    repeat_kv_forward_kernel(const Word* x, Word* out, int64_t heads, int64_t words,
                             int64_t groups) {
  for (int64_t head = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; head < heads;
       head += int64_t{gridDim.x} * blockDim.y) {
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
      const Word word = __ldcs(x + head * words + i);
      Word* target = out + head * groups * words + i;
#pragma unroll 4
      for (int64_t g = 0; g < groups; ++g) __stcs(target + g * words, word);
    }
  }
}

// The same threads add up `groups` rows of dout, in order; each has kVector columns. A store
// without a cache hint leaves dx, which is small, in the L2 cache.
template <int kVector, typename T>
__global__ void __launch_bounds__(kThreads)
    repeat_kv_backward_kernel(const T* dout, T* dx, int64_t heads, int64_t width, int64_t groups) {
  for (int64_t head = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; head < heads;
       head += int64_t{gridDim.x} * blockDim.y) {
    for (int64_t column = threadIdx.x * kVector; column < width; column += blockDim.x * kVector) {
      const T* source = dout + head * groups * width + column;
      float sums[kVector] = {};
#pragma unroll 4  // several loads in flight
      for (int64_t g = 0; g < groups; ++g) {
        const auto pack = load_cached<kVector>(source + g * width);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[i] += pack[i];
      }
      store(dx + head * width + column, Pack<T, kVector>::of(sums));
    }
  }
}

// A CTA has a thread for each word of a head, and as many heads as fit.
Launch launch_of(int64_t heads, int64_t words) {
  const int threads = static_cast<int>(std::min<int64_t>(words, kThreads));
  const dim3 block(threads, kThreads / threads);
  const int64_t ctas = std::min<int64_t>(divide_up(heads, block.y), INT_MAX);
  return {dim3(static_cast<unsigned>(ctas)), block};
}

}  // namespace

template <typename T>
cudaError_t RepeatKv<T>::forward(cudaStream_t stream, const T* x, T* out, int64_t heads,
                                 int64_t width, int64_t groups) {
  if (heads * width * groups == 0) return cudaSuccess;
  const auto launch = [&](const auto* source, auto* target, int64_t words) {
    using Word = std::remove_pointer_t<decltype(target)>;
    return launch_kernel(stream, repeat_kv_forward_kernel<Word>, launch_of(heads, words), source,
                         target, heads, words, groups);
  };
  if (width % kPackSize<T> == 0 && aligned_16(x, out)) {
    return launch(reinterpret_cast<const int4*>(x), reinterpret_cast<int4*>(out),
                  width / kPackSize<T>);
  }
  return launch(x, out, width);
}

template <typename T>
cudaError_t RepeatKv<T>::backward(cudaStream_t stream, const T* dout, T* dx, int64_t heads,
                                  int64_t width, int64_t groups) {
  if (heads * width == 0) return cudaSuccess;
  const auto launch = [&](auto vector) {
    constexpr int kVector = decltype(vector)::value;
    return launch_kernel(stream, repeat_kv_backward_kernel<kVector, T>,
                         launch_of(heads, width / kVector), dout, dx, heads, width, groups);
  };
  if (width % kPackSize<T> == 0 && aligned_16(dout, dx)) {
    return launch(std::integral_constant<int, kPackSize<T>>{});
  }
  return launch(std::integral_constant<int, 1>{});
}

template struct RepeatKv<float>;
template struct RepeatKv<__nv_bfloat16>;
template struct RepeatKv<__half>;

}  // namespace jaxllm
