#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention/repeat_kv.h"
#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

inline constexpr int kThreads = 256;

// A row of threads has a head: it is read once and written `groups` times. A Word is 16 bytes, or
// an element where heads do not begin at multiples of 16 bytes.
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

// The same threads read `groups` rows of dout and add them up in order; each has kVector columns.
// An ordinary store leaves dx in the L2 cache, where as a rule there is room for it.
template <int kVector, typename T>
__global__ void __launch_bounds__(kThreads)
    repeat_kv_backward_kernel(const T* dout, T* dx, int64_t heads, int64_t width, int64_t groups) {
  for (int64_t head = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; head < heads;
       head += int64_t{gridDim.x} * blockDim.y) {
    for (int64_t column = threadIdx.x * kVector; column < width; column += blockDim.x * kVector) {
      const T* source = dout + head * groups * width + column;
      float sums[kVector] = {};
#pragma unroll 4  // several loads on their way at once
      for (int64_t g = 0; g < groups; ++g) {
        if constexpr (kVector == 1) {
          sums[0] += to_float(source[g * width]);
        } else {
          const Pack<T> pack = load_cached<kVector>(source + g * width);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sums[i] += pack[i];
        }
      }
      T* target = dx + head * width + column;
      if constexpr (kVector == 1) {
        *target = from_float<T>(sums[0]);
      } else {
        store(target, Pack<T>::of(sums));
      }
    }
  }
}

// As many threads beside each other as a head has words, and as many heads as fit into the block.
dim3 block_for(int64_t words) {
  const int threads = static_cast<int>(std::min<int64_t>(words, kThreads));
  return dim3(threads, kThreads / threads);
}

unsigned grid_for(int64_t heads, dim3 block) {
  const int64_t blocks = divide_up(heads, block.y);
  return static_cast<unsigned>(std::min<int64_t>(blocks, std::numeric_limits<int>::max()));
}

}  // namespace

template <typename T>
cudaError_t RepeatKv<T>::forward(cudaStream_t stream, const T* x, T* out, int64_t heads,
                                 int64_t width, int64_t groups) {
  if (heads * width * groups == 0) return cudaSuccess;
  const auto launch = [&](const auto* source, auto* target, int64_t words) {
    using Word = std::remove_pointer_t<decltype(target)>;
    const dim3 block = block_for(words);
    return launch_kernel(stream, repeat_kv_forward_kernel<Word>,
                         {dim3(grid_for(heads, block)), block}, source, target, heads, words,
                         groups);
  };
  if (width % kPackSize<T> == 0 && aligned_16(x, out)) {
    return launch(reinterpret_cast<const int4*>(x), reinterpret_cast<int4*>(out),
                  width / kPackSize<T>);
  } else {
    return launch(x, out, width);
  }
}

template <typename T>
cudaError_t RepeatKv<T>::backward(cudaStream_t stream, const T* dout, T* dx, int64_t heads,
                                  int64_t width, int64_t groups) {
  if (heads * width == 0) return cudaSuccess;
  const auto launch = [&](auto vector) {
    constexpr int kVector = decltype(vector)::value;
    const dim3 block = block_for(width / kVector);
    return launch_kernel(stream, repeat_kv_backward_kernel<kVector, T>,
                         {dim3(grid_for(heads, block)), block}, dout, dx, heads, width, groups);
  };
  if (width % kPackSize<T> == 0 && aligned_16(dout, dx)) {
    return launch(std::integral_constant<int, kPackSize<T>>{});
  } else {
    return launch(std::integral_constant<int, 1>{});
  }
}

template struct RepeatKv<float>;
template struct RepeatKv<__nv_bfloat16>;
template struct RepeatKv<__half>;

}  // namespace jaxllm
