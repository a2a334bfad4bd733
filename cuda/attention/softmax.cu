#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/rows.cuh"
#include "attention/softmax.h"
#include "common/launch.h"

namespace jaxllm {
namespace {

// The columns that a row sees: query t of `length` stands at the key t + width - length.
template <typename Index, typename Row>
__device__ __forceinline__ Index seen_columns(Row row, Index width, Row length) {
  const Index seen = static_cast<Index>(row % length) + 1 + width - static_cast<Index>(length);
  return seen > 0 ? seen : 0;
}

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
template <typename T, int kPacks, int kVector, typename Index>
__device__ __forceinline__ float scale_scores(const RowPart<T, Index>& part,
                                              const Pack<T> (&packs)[kPacks], float scale,
                                              float (&scores)[kPacks][kVector]) {
  float largest = -INFINITY;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) scores[p][i] = scale * packs[p][i];
    if (!part.sees_all(p)) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!part.sees(p, i)) scores[p][i] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, scores[p][i]);
  }
  return largest;
}

// Turns the scores into weights, e^(score - largest); returns their sum.
template <typename T, int kPacks, int kVector, typename Index>
__device__ __forceinline__ float exponentiate(const RowPart<T, Index>& part, float largest,
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

template <typename T, int kPacks, int kVector, typename Index>
__device__ __forceinline__ void store_weights(const RowPart<T, Index>& part,
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
template <typename T, int kPacks, typename Index>
__device__ __forceinline__ float multiply(const RowPart<T, Index>& part,
                                          const Pack<T> (&outs)[kPacks],
                                          const Pack<T> (&douts)[kPacks]) {
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float of_pack = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) of_pack += outs[p][i] * douts[p][i];
    sum += of_pack;
  }
  return sum;
}

template <typename T, int kPacks, typename Index>
__device__ __forceinline__ void store_gradient(const RowPart<T, Index>& part,
                                               const Pack<T> (&outs)[kPacks],
                                               const Pack<T> (&douts)[kPacks], float scale,
                                               float delta, T* dx) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.sees(p)) continue;
    float result[kPackSize<T>];
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) result[i] = scale * outs[p][i] * (douts[p][i] - delta);
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
  const int seen = is_row ? seen_columns<int>(row, width, length) : 0;
  const RowPart<T, int> part(team, -elements_past_aligned(x), seen, width, true);

  Pack<T> packs[kPacks];
  part.load(packs, x);
  if (is_row) part.template clear_unseen<kPacks>(out);
  float scores[kPacks][kPackSize<T>];
  const float largest = finite_or_zero(team.max(scale_scores(part, packs, scale, scores)));
  const float sum = team.sum(exponentiate(part, largest, scores));
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
  const int seen = is_row ? seen_columns<int>(row, width, length) : 0;
  const RowPart<T, int> part(team, -elements_past_aligned(out), seen, width, true);

  Pack<T> outs[kPacks], douts[kPacks];
  part.load(outs, out);
  part.load(douts, dout);
  if (is_row) part.template clear_unseen<kPacks>(dx);
  const float delta = team.sum(multiply(part, outs, douts));
  store_gradient(part, outs, douts, scale, delta, dx);
}

// Rows of any length and alignment, a block a row. One pass finds the largest score and, online,
// the sum, which is scaled down whenever a larger score comes; a second pass, which finds the row
// in the L2 cache as a rule, writes.
inline constexpr int kAnyLengthThreads = 512;
inline constexpr int kAnyLengthPacks = 2;

template <int kPacks, typename T>
__global__ void __launch_bounds__(kAnyLengthThreads)
    softmax_forward_any_length_kernel(const T* x, float scale, T* out, int64_t rows, int64_t width,
                                      int64_t length, bool aligned) {
  BlockPerRow team;
  const int64_t stride = int64_t{kPacks} * blockDim.x * kPackSize<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* source = x + row * width;
    T* target = out + row * width;
    const int64_t seen = seen_columns<int64_t>(row, width, length);
    const int64_t first = aligned ? -elements_past_aligned(source) : 0;
    Pack<T> packs[kPacks];
    float scores[kPacks][kPackSize<T>];

    float largest = -INFINITY, sum = 0.0f;
    for (int64_t start = first; start < seen; start += stride) {
      const RowPart<T, int64_t> part(team, start, seen, width, aligned);
      part.load(packs, source);
      const float before = largest;
      largest = fmaxf(before, scale_scores(part, packs, scale, scores));
      const float reference = finite_or_zero(largest);
      sum = sum * fast_exp(before - reference) + exponentiate(part, reference, scores);
    }
    const float of_row = finite_or_zero(team.max(largest));
    const float factor = inverse_or_zero(team.sum(sum * fast_exp(largest - of_row)));

    for (int64_t start = first; start < width; start += stride) {
      const RowPart<T, int64_t> part(team, start, seen, width, aligned);
      part.load(packs, source);
      part.template clear_unseen<kPacks>(target);
      scale_scores(part, packs, scale, scores);
      exponentiate(part, of_row, scores);
      store_weights(part, scores, factor, target);
    }
  }
}

template <int kPacks, typename T>
__global__ void __launch_bounds__(kAnyLengthThreads)
    softmax_backward_any_length_kernel(const T* out, const T* dout, float scale, T* dx,
                                       int64_t rows, int64_t width, int64_t length, bool aligned) {
  BlockPerRow team;
  const int64_t stride = int64_t{kPacks} * blockDim.x * kPackSize<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t offset = row * width;
    const int64_t seen = seen_columns<int64_t>(row, width, length);
    const int64_t first = aligned ? -elements_past_aligned(out + offset) : 0;
    Pack<T> outs[kPacks], douts[kPacks];

    float sum = 0.0f;
    for (int64_t start = first; start < seen; start += stride) {
      const RowPart<T, int64_t> part(team, start, seen, width, aligned);
      part.load(outs, out + offset);
      part.load(douts, dout + offset);
      sum += multiply(part, outs, douts);
    }
    const float delta = team.sum(sum);

    for (int64_t start = first; start < width; start += stride) {
      const RowPart<T, int64_t> part(team, start, seen, width, aligned);
      part.load(outs, out + offset);
      part.load(douts, dout + offset);
      part.template clear_unseen<kPacks>(dx + offset);
      store_gradient(part, outs, douts, scale, delta, dx + offset);
    }
  }
}

// Which team of threads holds a row, and how many packs each thread has of it.
template <class TeamType, int kPackCount, int kBlocks>
struct Strategy {
  using Team = TeamType;
  static constexpr int kPacks = kPackCount;
  static constexpr int kMinBlocks = kBlocks;  // on a multiprocessor: bounds the registers
};

// Returns `launch(strategy, blocks, threads)` for the strategy that suits rows of `packs` packs, or
// false where the rows are too wide. The numbers were found by measurement on an H200.
template <class Launch>
bool choose(int64_t packs, Launch launch) {
  if (packs <= 8) return launch(Strategy<LanesPerRow<8>, 1, 32>{}, 32);
  if (packs <= 32) return launch(Strategy<LanesPerRow<32>, 1, 32>{}, 32);
  if (packs <= 64) return launch(Strategy<LanesPerRow<32>, 2, 32>{}, 32);
  if (packs <= 128) return launch(Strategy<LanesPerRow<32>, 4, 32>{}, 32);
  if (packs <= 4 * BlockPerRow::kMaxThreads) {
    return launch(Strategy<BlockPerRow, 4, 2>{}, static_cast<int>(divide_up(packs, 128) * 32));
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

// Whether the kernels that hold a row in registers may take a call, as far as the rows' number
// goes.
bool fits_a_grid(int64_t rows) { return rows <= std::numeric_limits<int>::max(); }

int64_t any_length_blocks(int64_t rows) { return std::min(rows, int64_t{1} << 20); }

}  // namespace

template <typename T>
cudaError_t Softmax<T>::forward(cudaStream_t stream, const T* x, float scale, T* out, int64_t rows,
                                int64_t width, int64_t length) {
  if (rows * width == 0) return cudaSuccess;
  const bool aligned = equally_aligned(x, out);
  const bool served = aligned && fits_a_grid(rows) &&
                      choose(packs_of_row(width, x), [&](auto strategy, int threads) {
                        // A team for each row.
                        using S = decltype(strategy);
                        softmax_forward_kernel<typename S::Team, S::kPacks, S::kMinBlocks>
                            <<<divide_up(rows, S::Team::kRowsPerBlock), threads, 0, stream>>>(
                                x, scale, out, static_cast<unsigned>(rows), static_cast<int>(width),
                                static_cast<unsigned>(length));
                        return true;
                      });
  if (!served) {
    softmax_forward_any_length_kernel<kAnyLengthPacks>
        <<<any_length_blocks(rows), kAnyLengthThreads, 0, stream>>>(x, scale, out, rows, width,
                                                                    length, aligned);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t Softmax<T>::backward(cudaStream_t stream, const T* out, const T* dout, float scale,
                                 T* dx, int64_t rows, int64_t width, int64_t length) {
  if (rows * width == 0) return cudaSuccess;
  const bool aligned = equally_aligned(out, dout, dx);
  const bool served = aligned && fits_a_grid(rows) &&
                      choose(packs_of_row(width, out), [&](auto strategy, int threads) {
                        using S = decltype(strategy);
                        softmax_backward_kernel<typename S::Team, S::kPacks, S::kMinBlocks>
                            <<<divide_up(rows, S::Team::kRowsPerBlock), threads, 0, stream>>>(
                                out, dout, scale, dx, static_cast<unsigned>(rows),
                                static_cast<int>(width), static_cast<unsigned>(length));
                        return true;
                      });
  if (!served) {
    softmax_backward_any_length_kernel<kAnyLengthPacks>
        <<<any_length_blocks(rows), kAnyLengthThreads, 0, stream>>>(out, dout, scale, dx, rows,
                                                                    width, length, aligned);
  }
  return cudaGetLastError();
}

template struct Softmax<float>;
template struct Softmax<__nv_bfloat16>;
template struct Softmax<__half>;

}  // namespace jaxllm
