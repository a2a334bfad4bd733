#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/rows.cuh"
#include "attention/softmax.h"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/launch.h"

namespace jaxllm {
namespace {

using namespace attention;

// The columns that a row sees: the causal mask hides the last length - 1 - t from query t of
// `length`.
template <typename Count>
__device__ __forceinline__ int seen_columns(Count row, int width, Count length) {
  const Count hidden = length - 1 - row % length;
  return hidden < static_cast<Count>(width) ? width - static_cast<int>(hidden) : 0;
}

// Before every column of a pack, also of one that begins before its row.
inline constexpr int kSeesNothing = -16;

// e^x, and zero where that is too small for a normal float.
__device__ __forceinline__ float fast_exp(float x) { return exp2_fast(x * kLog2E); }

// The largest score of a row that sees nothing is -infinity: with 0 its sum is 0, not NaN.
__device__ __forceinline__ float finite_or_zero(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ __forceinline__ float inverse_or_zero(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// The scaled scores in the packs, -infinity where the row does not see them; returns the largest.
template <typename T, int kPacks, int kVector>
__device__ __forceinline__ float scale_scores(const RowPart<T>& part,
                                              const Pack<T> (&packs)[kPacks], float scale,
                                              float (&scores)[kPacks][kVector]) {
  float largest = -INFINITY;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) scores[p][i] = scale * packs[p][i];
    part.apply_mask(p, scores[p], -INFINITY);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, scores[p][i]);
  }
  return largest;
}

// Turns the scores into weights, e^(score - largest); returns their sum.
template <typename T, int kPacks, int kVector>
__device__ __forceinline__ float exponentiate(const RowPart<T>& part, float largest,
                                              float (&scores)[kPacks][kVector]) {
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float of_pack = 0.0f;  // so that the packs' additions do not wait for each other
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      scores[p][i] = fast_exp(scores[p][i] - largest);
      of_pack += scores[p][i];
    }
    sum += of_pack;
  }
  return sum;
}

template <typename T, int kPacks, int kVector>
__device__ __forceinline__ void store_weights(const RowPart<T>& part,
                                              const float (&weights)[kPacks][kVector], float factor,
                                              T* out) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = weights[p][i] * factor;
    part.store(p, Pack<T>::of(result), out);
  }
}

// The sum of out * dout.
template <typename T, int kPacks>
__device__ __forceinline__ float multiply(const RowPart<T>& part, const Pack<T> (&outs)[kPacks],
                                          const Pack<T> (&douts)[kPacks]) {
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float products[kPackSize<T>];
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) products[i] = outs[p][i] * douts[p][i];
    part.apply_mask(p, products, 0.0f);
    float of_pack = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) of_pack += products[i];
    sum += of_pack;
  }
  return sum;
}

template <typename T, int kPacks>
__device__ __forceinline__ void store_gradient(const RowPart<T>& part,
                                               const Pack<T> (&outs)[kPacks],
                                               const Pack<T> (&douts)[kPacks], float scale,
                                               float delta, T* dx) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float result[kPackSize<T>];
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) result[i] = scale * outs[p][i] * (douts[p][i] - delta);
    part.apply_mask(p, result, 0.0f);
    part.store(p, Pack<T>::of(result), dx);
  }
}

// A thread group has a row in registers, and loads it once. It stores the zeros of what is not seen
// while the loads of the scores are in flight.
template <class ThreadGroup, int kPacks, int kMinCtasPerSm, typename T>
__global__ void __launch_bounds__(ThreadGroup::kMaxThreads, kMinCtasPerSm)
    softmax_forward_kernel(const T* x, float scale, T* out, unsigned rows, int width,
                           unsigned length) {
  ThreadGroup threads;
  const unsigned row = blockIdx.x * ThreadGroup::kRowsPerCta + threads.row();
  const bool is_row = row < rows;  // lanes past the last row take part in the reductions alone
  x += int64_t{row} * width;
  out += int64_t{row} * width;
  const int seen = is_row ? seen_columns(row, width, length) : kSeesNothing;
  const RowPart<T> part(threads, {row, rows, width, seen, true}, -elements_past_aligned(x));

  Pack<T> packs[kPacks];
  part.load(packs, x);
  if (is_row) part.template clear_unseen<kPacks>(out);
  float scores[kPacks][kPackSize<T>];
  const float largest = finite_or_zero(threads.max(scale_scores(part, packs, scale, scores)));
  const float sum = sum_over(threads, exponentiate(part, largest, scores));
  store_weights(part, scores, inverse_or_zero(sum), out);
}

template <class ThreadGroup, int kPacks, int kMinCtasPerSm, typename T>
__global__ void __launch_bounds__(ThreadGroup::kMaxThreads, kMinCtasPerSm)
    softmax_backward_kernel(const T* out, const T* dout, float scale, T* dx, unsigned rows,
                            int width, unsigned length) {
  ThreadGroup threads;
  const unsigned row = blockIdx.x * ThreadGroup::kRowsPerCta + threads.row();
  const bool is_row = row < rows;
  out += int64_t{row} * width;
  dout += int64_t{row} * width;
  dx += int64_t{row} * width;
  const int seen = is_row ? seen_columns(row, width, length) : kSeesNothing;
  const RowPart<T> part(threads, {row, rows, width, seen, true}, -elements_past_aligned(out));

  Pack<T> outs[kPacks], douts[kPacks];
  part.load(outs, out);
  part.load(douts, dout);
  if (is_row) part.template clear_unseen<kPacks>(dx);
  const float delta = sum_over(threads, multiply(part, outs, douts));
  store_gradient(part, outs, douts, scale, delta, dx);
}

// Rows of any length and alignment, a CTA for each. The first pass is an online softmax: it
// computes the largest score and the sum, which it rescales whenever a larger score comes. The
// second pass stores.
template <class Source, typename T>
__global__ void __launch_bounds__(Source::kThreads, Source::kMinCtasPerSm)
    softmax_forward_long_row_kernel(const T* x, float scale, T* out, int64_t rows, int width,
                                    int64_t length, bool aligned) {
  Cta threads;
  const Source source;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const arrays[] = {x + row * width};
    T* target = out + row * width;
    const int seen = seen_columns(row, width, length);
    const Row<T> shape(row, rows, width, seen, aligned);
    const int first = aligned ? -elements_past_aligned(target) : 0;
    source.begin(threads, shape, arrays, first);

    float scores[1][kPackSize<T>];
    float largest = -INFINITY, sum = 0.0f;
    source.template pass<false>(threads, shape, arrays, first, seen, [&](auto part, auto& packs) {
      const float before = largest;
      largest = fmaxf(before, scale_scores(part, packs[0], scale, scores));
      const float reference = finite_or_zero(largest);
      sum = sum * fast_exp(before - reference) + exponentiate(part, reference, scores);
    });
    const float of_row = finite_or_zero(threads.max(largest));
    const float factor = inverse_or_zero(sum_over(threads, sum * fast_exp(largest - of_row)));

    source.template pass<true>(threads, shape, arrays, first, width, [&](auto part, auto& packs) {
      part.template clear_unseen<1>(target);
      scale_scores(part, packs[0], scale, scores);
      exponentiate(part, of_row, scores);
      store_weights(part, scores, factor, target);
    });
  }
}

template <class Source, typename T>
__global__ void __launch_bounds__(Source::kThreads, Source::kMinCtasPerSm)
    softmax_backward_long_row_kernel(const T* out, const T* dout, float scale, T* dx, int64_t rows,
                                     int width, int64_t length, bool aligned) {
  Cta threads;
  const Source source;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const arrays[] = {out + row * width, dout + row * width};
    T* target = dx + row * width;
    const int seen = seen_columns(row, width, length);
    const Row<T> shape(row, rows, width, seen, aligned);
    const int first = aligned ? -elements_past_aligned(target) : 0;
    source.begin(threads, shape, arrays, first);

    float sum = 0.0f;
    source.template pass<false>(threads, shape, arrays, first, seen, [&](auto part, auto& packs) {
      sum += multiply(part, packs[0], packs[1]);
    });
    const float delta = sum_over(threads, sum);

    source.template pass<true>(threads, shape, arrays, first, width, [&](auto part, auto& packs) {
      part.template clear_unseen<1>(target);
      store_gradient(part, packs[0], packs[1], scale, delta, target);
    });
  }
}

// The thread group of a row, and the packs that each thread has of it.
template <class Group, int kPackCount, int kCtas>
struct Strategy {
  using ThreadGroup = Group;
  static constexpr int kPacks = kPackCount;
  static constexpr int kMinCtasPerSm = kCtas;  // bounds the registers
};

constexpr int64_t kMaxPacks = 4 * Cta::kMaxThreads;  // of a row in registers

// Returns `launch(strategy, threads)` for the strategy that suits rows of `packs` packs, up to
// kMaxPacks. The strategies are the fastest on an H200.
template <class LaunchStrategy>
cudaError_t choose(int64_t packs, LaunchStrategy launch) {
  if (packs <= 8) return launch(Strategy<LanesPerRow<8, 128>, 1, 8>{}, 128);
  if (packs <= 16) return launch(Strategy<LanesPerRow<8, 64>, 2, 16>{}, 64);
  if (packs <= 32) return launch(Strategy<LanesPerRow<16, 64>, 2, 16>{}, 64);
  if (packs <= 64) return launch(Strategy<LanesPerRow<32, 64>, 2, 16>{}, 64);
  if (packs <= 128) return launch(Strategy<LanesPerRow<32, 32>, 4, 32>{}, 32);
  if (packs <= 160) return launch(Strategy<LanesPerRow<32, 32>, 5, 24>{}, 32);
  if (packs <= 224) return launch(Strategy<LanesPerRow<32, 32>, 7, 20>{}, 32);
  return launch(Strategy<Cta, 4, 2>{}, static_cast<int>(divide_up(packs, 128) * 32));
}

// The packs that a row may touch, wherever it begins.
template <typename T>
int64_t packs_of_row(int64_t width, const T* array) {
  constexpr int kVector = kPackSize<T>;
  const bool rows_begin_aligned = width % kVector == 0 && aligned_16(array);
  return divide_up(width + (rows_begin_aligned ? 0 : kVector - 1), kVector);
}

// Launches `kernel_of(strategy)` for rows that fit the registers. For longer rows it launches
// `in_smem`, if a row of each of the `inputs` arrays fits shared memory, or else `from_l2`.
template <typename T, class KernelOf, class LongKernel, typename... Arguments>
cudaError_t launch_softmax(cudaStream_t stream, const T* input, int inputs, bool aligned,
                           int64_t rows, int64_t width, int64_t length, KernelOf kernel_of,
                           LongKernel in_smem, LongKernel from_l2, const Arguments&... arguments) {
  // An int counts the columns, and those of the packs past the row's end.
  constexpr int64_t kMaxWidth = int64_t{1} << 30;
  if (rows * width == 0) return cudaSuccess;
  if (width > kMaxWidth) return cudaErrorInvalidValue;
  const int64_t packs = packs_of_row(width, input);
  const int columns = static_cast<int>(width);
  if (aligned && rows <= std::numeric_limits<int>::max() && packs <= kMaxPacks) {
    return choose(packs, [&](auto strategy, int threads) {
      const dim3 grid(divide_up(rows, decltype(strategy)::ThreadGroup::kRowsPerCta));
      return launch_kernel(stream, kernel_of(strategy), {grid, dim3(threads)}, arguments...,
                           static_cast<unsigned>(rows), columns, static_cast<unsigned>(length));
    });
  }
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(in_smem));
  const int64_t bytes = RowInSmem::bytes(packs, inputs);
  const bool fits_smem = bytes <= image.dynamic_shared_bytes;
  const Launch launch{dim3(static_cast<unsigned>(std::min(rows, int64_t{1} << 20))),
                      dim3(fits_smem ? RowInSmem::kThreads : RowFromL2::kThreads),
                      static_cast<size_t>(fits_smem ? bytes : 0)};
  return launch_kernel(stream, fits_smem ? in_smem : from_l2, launch, arguments..., rows, columns,
                       length, aligned);
}

}  // namespace

template <typename T>
cudaError_t Softmax<T>::forward(cudaStream_t stream, const T* x, float scale, T* out, int64_t rows,
                                int64_t width, int64_t length) {
  const auto kernel_of = [](auto strategy) {
    using S = decltype(strategy);
    return softmax_forward_kernel<typename S::ThreadGroup, S::kPacks, S::kMinCtasPerSm, T>;
  };
  return launch_softmax(stream, x, 1, equally_aligned(x, out), rows, width, length, kernel_of,
                        softmax_forward_long_row_kernel<RowInSmem, T>,
                        softmax_forward_long_row_kernel<RowFromL2, T>, x, scale, out);
}

template <typename T>
cudaError_t Softmax<T>::backward(cudaStream_t stream, const T* out, const T* dout, float scale,
                                 T* dx, int64_t rows, int64_t width, int64_t length) {
  const auto kernel_of = [](auto strategy) {
    using S = decltype(strategy);
    return softmax_backward_kernel<typename S::ThreadGroup, S::kPacks, S::kMinCtasPerSm, T>;
  };
  return launch_softmax(stream, out, 2, equally_aligned(out, dout, dx), rows, width, length,
                        kernel_of, softmax_backward_long_row_kernel<RowInSmem, T>,
                        softmax_backward_long_row_kernel<RowFromL2, T>, out, dout, scale, dx);
}

template struct Softmax<float>;
template struct Softmax<__nv_bfloat16>;
template struct Softmax<__half>;

}  // namespace jaxllm
