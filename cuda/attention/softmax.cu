#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/long_rows.cuh"
#include "attention/rows.cuh"
#include "attention/softmax.h"
#include "common/dependent_launch.cuh"
#include "common/launch.h"

namespace jaxllm {
namespace {

using namespace attention;

// The columns that a row sees: query t of `length` does not see the last length - 1 - t.
template <typename Count>
__device__ __forceinline__ int seen_columns(Count row, int width, Count length) {
  const Count hidden = length - 1 - row % length;
  return hidden < static_cast<Count>(width) ? width - static_cast<int>(hidden) : 0;
}

// Below every column of a pack, also of one that begins before its row.
inline constexpr int kNothing = -16;

// e^x, and zero where that is too small for a normal float.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
  return result;
}

// A row that sees nothing has no largest score: with zero for it, its sum is zero and not NaN.
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
    part.hide(p, scores[p], -INFINITY);
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
    float of_pack = 0.0f;  // a sum of its own: the packs' additions need not wait for each other
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
    part.hide(p, products, 0.0f);
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
    part.hide(p, result, 0.0f);
    part.store(p, Pack<T>::of(result), dx);
  }
}

// A team of threads holds a row in registers: it is read once. The zeros where the row sees nothing
// are written while its scores are still on their way.
template <class Team, int kPacks, int kMinBlocks, typename T>
__global__ void __launch_bounds__(Team::kMaxThreads, kMinBlocks)
    softmax_forward_kernel(const T* x, float scale, T* out, unsigned rows, int width,
                           unsigned length) {
  Team team;
  const unsigned row = blockIdx.x * Team::kRowsPerBlock + team.row();
  const bool is_row = row < rows;  // lanes beyond the last row only meet in the sums
  x += int64_t{row} * width;
  out += int64_t{row} * width;
  const int seen = is_row ? seen_columns(row, width, length) : kNothing;
  const RowPart<T> part(team, {row, rows, width, seen, true}, -elements_past_aligned(x));

  Pack<T> packs[kPacks];
  part.load(packs, x);
  if (is_row) part.template clear_unseen<kPacks>(out);
  float scores[kPacks][kPackSize<T>];
  const float largest = finite_or_zero(team.max(scale_scores(part, packs, scale, scores)));
  const float sum = sum_over(team, exponentiate(part, largest, scores));
  store_weights(part, scores, inverse_or_zero(sum), out);
}

template <class Team, int kPacks, int kMinBlocks, typename T>
__global__ void __launch_bounds__(Team::kMaxThreads, kMinBlocks)
    softmax_backward_kernel(const T* out, const T* dout, float scale, T* dx, unsigned rows,
                            int width, unsigned length) {
  Team team;
  const unsigned row = blockIdx.x * Team::kRowsPerBlock + team.row();
  const bool is_row = row < rows;
  out += int64_t{row} * width;
  dout += int64_t{row} * width;
  dx += int64_t{row} * width;
  const int seen = is_row ? seen_columns(row, width, length) : kNothing;
  const RowPart<T> part(team, {row, rows, width, seen, true}, -elements_past_aligned(out));

  Pack<T> outs[kPacks], douts[kPacks];
  part.load(outs, out);
  part.load(douts, dout);
  if (is_row) part.template clear_unseen<kPacks>(dx);
  const float delta = sum_over(team, multiply(part, outs, douts));
  store_gradient(part, outs, douts, scale, delta, dx);
}

// Rows of any length and alignment, a block a row. One pass finds the largest score and, online,
// the sum, which is scaled down whenever a larger score comes; a second pass writes.
template <class Source, typename T>
__global__ void __launch_bounds__(Source::kThreads, Source::kMinBlocks)
    softmax_forward_long_row_kernel(const T* x, float scale, T* out, int64_t rows, int width,
                                    int64_t length, bool aligned) {
  Block team;
  const Source source;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const arrays[] = {x + row * width};
    T* target = out + row * width;
    const int seen = seen_columns(row, width, length);
    const Row<T> shape(row, rows, width, seen, aligned);
    const int first = aligned ? -elements_past_aligned(target) : 0;
    source.begin(team, shape, arrays, first);

    float scores[1][kPackSize<T>];
    float largest = -INFINITY, sum = 0.0f;
    source.template pass<false>(team, shape, arrays, first, seen, [&](auto part, auto& packs) {
      const float before = largest;
      largest = fmaxf(before, scale_scores(part, packs[0], scale, scores));
      const float reference = finite_or_zero(largest);
      sum = sum * fast_exp(before - reference) + exponentiate(part, reference, scores);
    });
    const float of_row = finite_or_zero(team.max(largest));
    const float factor = inverse_or_zero(sum_over(team, sum * fast_exp(largest - of_row)));

    source.template pass<true>(team, shape, arrays, first, width, [&](auto part, auto& packs) {
      part.template clear_unseen<1>(target);
      scale_scores(part, packs[0], scale, scores);
      exponentiate(part, of_row, scores);
      store_weights(part, scores, factor, target);
    });
  }
}

template <class Source, typename T>
__global__ void __launch_bounds__(Source::kThreads, Source::kMinBlocks)
    softmax_backward_long_row_kernel(const T* out, const T* dout, float scale, T* dx, int64_t rows,
                                     int width, int64_t length, bool aligned) {
  Block team;
  const Source source;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const arrays[] = {out + row * width, dout + row * width};
    T* target = dx + row * width;
    const int seen = seen_columns(row, width, length);
    const Row<T> shape(row, rows, width, seen, aligned);
    const int first = aligned ? -elements_past_aligned(target) : 0;
    source.begin(team, shape, arrays, first);

    float sum = 0.0f;
    source.template pass<false>(team, shape, arrays, first, seen, [&](auto part, auto& packs) {
      sum += multiply(part, packs[0], packs[1]);
    });
    const float delta = sum_over(team, sum);

    source.template pass<true>(team, shape, arrays, first, width, [&](auto part, auto& packs) {
      part.template clear_unseen<1>(target);
      store_gradient(part, packs[0], packs[1], scale, delta, target);
    });
  }
}

// Which team of threads holds a row, and how many packs each thread has of it.
template <class TeamType, int kPackCount, int kBlocks>
struct Strategy {
  using Team = TeamType;
  static constexpr int kPacks = kPackCount;
  static constexpr int kMinBlocks = kBlocks;  // on a multiprocessor: bounds the registers
};

// Returns `launch(strategy, threads)` for the strategy that suits rows of `packs` packs, or
// false where the rows are too wide. The numbers were found by measurement on an H200.
template <class Launch>
bool choose(int64_t packs, Launch launch) {
  if (packs <= 8) return launch(Strategy<LanesPerRow<8, 128>, 1, 8>{}, 128);
  if (packs <= 16) return launch(Strategy<LanesPerRow<8, 64>, 2, 16>{}, 64);
  if (packs <= 32) return launch(Strategy<LanesPerRow<16, 64>, 2, 16>{}, 64);
  if (packs <= 64) return launch(Strategy<LanesPerRow<32, 64>, 2, 16>{}, 64);
  if (packs <= 128) return launch(Strategy<LanesPerRow<32, 32>, 4, 32>{}, 32);
  if (packs <= 160) return launch(Strategy<LanesPerRow<32, 32>, 5, 24>{}, 32);
  if (packs <= 224) return launch(Strategy<LanesPerRow<32, 32>, 7, 20>{}, 32);
  if (packs <= 4 * Block::kMaxThreads) {
    return launch(Strategy<Block, 4, 2>{}, static_cast<int>(divide_up(packs, 128) * 32));
  }
  return false;
}

// The packs that a row may touch, wherever it begins.
template <typename T>
int64_t packs_of_row(int64_t width, const T* array) {
  constexpr int kVector = kPackSize<T>;
  const bool rows_begin_aligned = width % kVector == 0 && aligned_16(array);
  return divide_up(width + (rows_begin_aligned ? 0 : kVector - 1), kVector);
}

// Columns are counted by an int, with room for the packs beyond the row's end.
inline constexpr int64_t kMaxWidth = int64_t{1} << 30;

// Whether there may be a block for each row.
bool fits_a_grid(int64_t rows) { return rows <= std::numeric_limits<int>::max(); }

// Launches the kernel for long rows that suits their length: `held` where a row of each array fits
// in shared memory, in `bytes`, and `read_again` elsewhere.
template <class Kernel, typename... Arguments>
cudaError_t launch_long_rows(cudaStream_t stream, Kernel held, Kernel read_again, int64_t bytes,
                             int64_t rows, const Arguments&... arguments) {
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(held));
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(std::min(rows, int64_t{1} << 20)));
  if (bytes <= image.dynamic_shared_bytes) {
    launch.block = dim3(HoldInSharedMemory::kThreads);
    launch.shared = bytes;
    return launch_kernel(stream, held, launch, arguments...);
  }
  launch.block = dim3(ReadAgain::kThreads);
  return launch_kernel(stream, read_again, launch, arguments...);
}

}  // namespace

template <typename T>
cudaError_t Softmax<T>::forward(cudaStream_t stream, const T* x, float scale, T* out, int64_t rows,
                                int64_t width, int64_t length) {
  if (rows * width == 0) return cudaSuccess;
  if (width > kMaxWidth) return cudaErrorInvalidValue;
  const bool aligned = equally_aligned(x, out);
  const int64_t packs = packs_of_row(width, x);
  cudaError_t status = cudaSuccess;
  const auto launch = [&](auto strategy, int threads) {
    // A team for each row.
    using S = decltype(strategy);
    status = launch_kernel(
        stream, softmax_forward_kernel<typename S::Team, S::kPacks, S::kMinBlocks, T>,
        {dim3(divide_up(rows, S::Team::kRowsPerBlock)), dim3(threads)}, x, scale, out,
        static_cast<unsigned>(rows), static_cast<int>(width), static_cast<unsigned>(length));
    return true;
  };
  if (aligned && fits_a_grid(rows) && choose(packs, launch)) return status;
  return launch_long_rows(stream, softmax_forward_long_row_kernel<HoldInSharedMemory, T>,
                          softmax_forward_long_row_kernel<ReadAgain, T>,
                          HoldInSharedMemory::bytes(packs, 1), rows, x, scale, out, rows,
                          static_cast<int>(width), length, aligned);
}

template <typename T>
cudaError_t Softmax<T>::backward(cudaStream_t stream, const T* out, const T* dout, float scale,
                                 T* dx, int64_t rows, int64_t width, int64_t length) {
  if (rows * width == 0) return cudaSuccess;
  if (width > kMaxWidth) return cudaErrorInvalidValue;
  const bool aligned = equally_aligned(out, dout, dx);
  const int64_t packs = packs_of_row(width, out);
  cudaError_t status = cudaSuccess;
  const auto launch = [&](auto strategy, int threads) {
    using S = decltype(strategy);
    status = launch_kernel(
        stream, softmax_backward_kernel<typename S::Team, S::kPacks, S::kMinBlocks, T>,
        {dim3(divide_up(rows, S::Team::kRowsPerBlock)), dim3(threads)}, out, dout, scale, dx,
        static_cast<unsigned>(rows), static_cast<int>(width), static_cast<unsigned>(length));
    return true;
  };
  if (aligned && fits_a_grid(rows) && choose(packs, launch)) return status;
  return launch_long_rows(stream, softmax_backward_long_row_kernel<HoldInSharedMemory, T>,
                          softmax_backward_long_row_kernel<ReadAgain, T>,
                          HoldInSharedMemory::bytes(packs, 2), rows, out, dout, scale, dx, rows,
                          static_cast<int>(width), length, aligned);
}

template struct Softmax<float>;
template struct Softmax<__nv_bfloat16>;
template struct Softmax<__half>;

}  // namespace jaxllm
