#include <algorithm>

#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "loss/cross_entropy.h"
#include "loss/row_sums.cuh"

namespace jaxllm {
namespace {

// The kernels need so few registers that two CTAs of 512 threads fit on an SM.
constexpr int kMaxThreads = 1024;
constexpr int kBatch = 4;  // packs that a thread loads at once
constexpr int kHeld = 2;   // packs that a thread keeps in registers; others are in shared memory

// Consecutive elements: whole packs, which begin where memory is aligned, and the edges around
// them.
template <typename Index>
struct PackedSpan {
  // Packs cover no more than the first `packed` elements of `size`.
  template <typename T>
  __device__ PackedSpan(const T* first, Index packed, Index size) {
    constexpr int kVector = kPackSize<T>;
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T));
    head = min(static_cast<Index>((kVector - past) % kVector), packed);
    packs = (packed - head) / kVector;
    tail = head + packs * kVector;
    edges = head + size - tail;
  }

  // The position of edge element i.
  __device__ __forceinline__ Index edge(Index i) const { return i < head ? i : i - head + tail; }

  Index head, packs, tail, edges;
};

// Waits until at most `pending` of a thread's last groups of copies are in flight.
__device__ __forceinline__ void cp_async_wait_at_most(int pending) {
  if (pending >= 3) cp_async_wait<3>();
  if (pending == 2) cp_async_wait<2>();
  if (pending == 1) cp_async_wait<1>();
  if (pending == 0) cp_async_wait<0>();
}

__device__ __forceinline__ float loss_of(const RowSums& sums, float label_logit,
                                         const CrossEntropyOptions& options) {
  // Exponents relative to the offset: for logits near 1e4 the difference of two logits is far more
  // precise in float32 than lse - logit.
  const float log_sum = log2f(sums.exponentials);
  float target = (1.0f - options.label_smoothing) * sums.exponent(label_logit);
  if (options.label_smoothing > 0.0f) {
    target += options.label_smoothing * sums.exponent(sums.logits / options.vocab_size);
  }
  const float lse = kLn2 * (sums.offset + log_sum);
  return kLn2 * (log_sum - target) + options.z_loss * lse * lse;
}

// The gradient of a row is of_exponential * 2^exponent + everywhere, plus at_label at the label.
struct LogitGradient {
  __device__ LogitGradient(const RowSums& sums, float scale, const CrossEntropyOptions& options)
      : everywhere(-scale * options.label_smoothing / options.vocab_size),
        at_label(-scale * (1.0f - options.label_smoothing)) {
    const float lse = kLn2 * (sums.offset + log2f(sums.exponentials));
    of_exponential = scale * (1.0f + 2.0f * options.z_loss * lse) / sums.exponentials;
  }

  __device__ __forceinline__ float operator()(float exponent) const {
    return fmaf(exp2_fast(exponent), of_exponential, everywhere);
  }

  float of_exponential, everywhere, at_label;
};

// A CTA for each row. With kGradient the gradient is stored over the logits, in a second pass. For
// it the first `kept` packs stay in shared memory and kHeld more of each thread in registers; only
// the rest is loaded again. A thread loads again, and stores, only what it has loaded itself, so no
// barrier is needed. Without kGradient, `logits` is not written.
template <bool kGradient, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    cross_entropy_forward_kernel(T* logits, const int32_t* labels, const float* scales,
                                 CrossEntropyOptions options, float* losses, int64_t width,
                                 int64_t rows_per_scale, int kept) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kGroups = 4;  // of copies: a quarter is added up while the others are in flight
  extern __shared__ int4 smem[];
  const int threads = blockDim.x, thread = threadIdx.x;
  const int vocab = static_cast<int>(options.vocab_size);
  // The last rows first: of the logits that a GEMM has just made, those are still in the L2 cache.
  const int64_t row = gridDim.x - 1 - int64_t{blockIdx.x};
  T* const line = logits + row * width;
  const PackedSpan<int> span(line, vocab, static_cast<int>(width));
  T* const packed = line + span.head;

  kept = min(kept, span.packs);
  const int group = (kept + kGroups * threads - 1) / (kGroups * threads) * threads;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    for (int p = g * group + thread; p < min((g + 1) * group, kept); p += threads) {
      cp_async_16(smem + p, packed + int64_t{p} * kVector);
    }
    cp_async_commit();
  }
  const auto pack_in_global = [&](int p) {
    return load<kPackSize<T>>(packed + int64_t{p} * kVector);
  };
  // The packs in registers follow those in shared memory; the rest begins after them.
  Pack<T> held[kHeld];
  const auto held_at = [&](int i) { return kept + i * threads + thread; };
  if constexpr (kGradient) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (held_at(i) < span.packs) held[i] = pack_in_global(held_at(i));
    }
  }
  const int rest = min(kGradient ? kept + kHeld * threads : 0, span.packs);

  // Every thread loads the label's logit before any thread stores: the barrier is in merge_cta.
  const int64_t given_label = labels[row];
  const bool is_ignored = given_label == options.ignore_index;
  const int label = min(max(static_cast<int>(given_label), 0), vocab - 1);
  const bool is_outside = given_label != label;
  const float label_logit = to_float(line[label]);

  const auto pack_in_smem = [&](int p) {
    Pack<T> pack;
    reinterpret_cast<int4&>(pack) = smem[p];
    return pack;
  };

  RowSums sums;
  const bool sums_logits = options.label_smoothing > 0.0f;
  const auto add = [&](int begin, int end, auto pack) {
    int p = begin + thread;
    for (; p + (kBatch - 1) * threads < end; p += kBatch * threads) {
      Pack<T> packs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) packs[i] = pack(p + i * threads);
      sums.add(packs, sums_logits);
    }
    for (; p < end; p += threads) sums.add({pack(p)}, sums_logits);
  };
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    cp_async_wait_at_most(kGroups - 1 - g);
    add(g * group, min((g + 1) * group, kept), pack_in_smem);
  }
  if constexpr (kGradient) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (held_at(i) < span.packs) sums.add({held[i]}, sums_logits);
    }
    fence_packs(held);
  }
  add(rest, span.packs, pack_in_global);
  for (int i = thread; i < span.edges; i += threads) {
    const int column = span.edge(i);
    if (column < vocab) sums.add(to_float(line[column]));
  }
  sums.merge_cta();
  if (thread == 0) {
    const float loss = is_outside ? nanf("") : loss_of(sums, label_logit, options);
    losses[row] = is_ignored ? 0.0f : loss;
  }

  if constexpr (kGradient) {
    const float of_label = is_outside ? nanf("") : scales[row / rows_per_scale];
    const float scale = is_ignored ? 0.0f : of_label;
    const LogitGradient gradient(sums, scale, options);
    const auto write = [&](int p, const Pack<T>& pack) {
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = gradient(sums.exponent(pack[i]));
      const int label_in_pack = label - span.head - p * kVector;
      if (label_in_pack >= 0 && label_in_pack < kVector) {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          values[i] += i == label_in_pack ? gradient.at_label : 0.0f;
      }
      store_streaming(packed + int64_t{p} * kVector, Pack<T>::of(values));
    };
    // From the last pack on: what was loaded last is most likely still in the cache.
    const int steps = (span.packs - rest + threads - 1) / threads;
    for (int p = rest + (steps - 1) * threads + thread; p >= rest; p -= threads) {
      if (p < span.packs) write(p, pack_in_global(p));
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (held_at(i) < span.packs) write(held_at(i), held[i]);
    }
#pragma unroll kBatch
    for (int p = thread; p < kept; p += threads) write(p, pack_in_smem(p));
    for (int i = thread; i < span.edges; i += threads) {
      const int column = span.edge(i);
      float value = 0.0f;
      if (column < vocab) value = gradient(sums.exponent(to_float(line[column])));
      if (column == label) value += gradient.at_label;
      line[column] = from_float<T>(value);
    }
  }
}

// CTAs (0, y), (1, y), ... share run y of the elements. As a rule the factor is 1, and nothing is
// to be done.
template <typename T>
__global__ void cross_entropy_backward_kernel(T* dlogits, const float* factors, int64_t groups,
                                              int64_t size) {
  constexpr int kVector = kPackSize<T>;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    const float factor = factors[group];
    if (factor == 1.0f) continue;
    T* const run = dlogits + group * size;
    const PackedSpan<int64_t> span(run, size, size);
    for (int64_t p = first; p < span.packs; p += stride) {
      T* const target = run + span.head + p * kVector;
      const Pack<T> pack = load_streaming<kVector>(target);
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = pack[i] * factor;
      store_streaming(target, Pack<T>::of(values));
    }
    for (int64_t i = first; i < span.edges; i += stride) {
      T& element = run[span.edge(i)];
      element = from_float<T>(to_float(element) * factor);
    }
  }
}

// Threads for a row, with a few packs each, up to `most`.
int row_threads(int64_t width, int64_t pack_size, int most) {
  const int64_t wanted = divide_up(divide_up(width, pack_size * kBatch), 32) * 32;
  return static_cast<int>(std::clamp<int64_t>(wanted, 32, most));
}

}  // namespace

template <typename T>
cudaError_t CrossEntropy<T>::forward(cudaStream_t stream, const T* logits, const int32_t* labels,
                                     CrossEntropyOptions options, float* losses, int64_t rows,
                                     int64_t width) {
  if (rows == 0) return cudaSuccess;
  const int threads = row_threads(width, kPackSize<T>, 256);
  // The kernel without a gradient writes no logits.
  return launch_kernel(stream, cross_entropy_forward_kernel<false, T>, {rows, threads},
                       const_cast<T*>(logits), labels, nullptr, options, losses, width, 1, 0);
}

template <typename T>
cudaError_t CrossEntropy<T>::forward_with_gradient(cudaStream_t stream, T* logits,
                                                   const int32_t* labels, const float* scales,
                                                   CrossEntropyOptions options, float* losses,
                                                   int64_t rows, int64_t width,
                                                   int64_t rows_per_scale) {
  if (rows == 0) return cudaSuccess;
  const auto kernel = cross_entropy_forward_kernel<true, T>;
  DeviceLimits device;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(device.read());
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  const auto smem_of_cta = [&](int ctas_per_sm) {
    const int available = device.shared_bytes_of_sm / ctas_per_sm - device.reserved_shared_bytes;
    return std::min(available - image.static_shared_bytes, image.dynamic_shared_bytes);
  };
  // Two CTAs on an SM, one to compute while the other waits for memory, where the rows of both fit.
  // Else one: with more rows at a time, what is loaded again has left the cache.
  const int64_t row_bytes = divide_up(width, kPackSize<T>) * 16;
  const bool is_pair = row_bytes <= smem_of_cta(2);
  const int bytes =
      static_cast<int>(std::min<int64_t>(row_bytes, smem_of_cta(is_pair ? 2 : 1)) / 16 * 16);
  const int threads = row_threads(width, kPackSize<T>, is_pair ? 512 : kMaxThreads);
  return launch_kernel(stream, kernel, {rows, threads, static_cast<size_t>(bytes)}, logits, labels,
                       scales, options, losses, width, rows_per_scale, bytes / 16);
}

template <typename T>
cudaError_t CrossEntropy<T>::backward(cudaStream_t stream, T* dlogits, const float* factors,
                                      int64_t groups, int64_t size) {
  if (groups * size == 0) return cudaSuccess;
  // About a thousand CTAs of 256 threads, with a pack or more for each thread.
  constexpr int kThreads = 256;
  constexpr int64_t kCtas = 1024;
  const int64_t useful = divide_up(size, kThreads * kPackSize<T>);
  const int64_t columns = std::min(useful, std::max(kCtas / groups, int64_t{1}));
  const dim3 grid(columns, std::min(groups, int64_t{65535}));
  return launch_kernel(stream, cross_entropy_backward_kernel<T>, {grid, kThreads}, dlogits, factors,
                       groups, size);
}

template struct CrossEntropy<float>;
template struct CrossEntropy<__nv_bfloat16>;
template struct CrossEntropy<__half>;

}  // namespace jaxllm
