#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "gemm/fold_norm.h"

namespace jaxllm {
namespace {

// Eight neighbours of a row of 16-bit weights, as the GEMMs of Hopper take them.
constexpr int kPack = 8;

// A CTA has 32 columns of all rows, and a thread a pack of every kRowGroups-th row, of which it
// loads kAhead at once. The kernel runs for a few microseconds, and fetching its instructions takes
// much of that: hence few of them.
constexpr int kStripColumns = 32;
constexpr int kStripPacks = kStripColumns / kPack;
constexpr int kStripThreads = 1024;
constexpr int kRowGroups = kStripThreads / kStripPacks;
constexpr int kAhead = 3;

template <typename T>
__global__ void __launch_bounds__(kStripThreads)
    fold_norm_forward_kernel(NormAndLinear<T> layer, T* __restrict__ folded_weight,
                             T* __restrict__ folded_bias) {
  const int pack = threadIdx.x % kStripPacks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_column = blockIdx.x * kStripColumns, column = first_column + pack * kPack;
  const int width = layer.width, columns = layer.columns;
  // The warp sums this column at the end.
  const int my_column = first_column + warp;
  const float bias = my_column < columns ? to_float(layer.bias[my_column]) : 0.0f;
  float sums[kPack] = {};
#pragma unroll 1
  for (int first = threadIdx.x / kStripPacks; first < width; first += kAhead * kRowGroups) {
    Pack<T, kPack> weights[kAhead];
    float scales[kAhead], biases[kAhead];
    const auto is_inside = [&](int i) {
      return first + i * kRowGroups < width && column < columns;
    };
    const auto offset = [&](int i) { return int64_t{first + i * kRowGroups} * columns + column; };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!is_inside(i)) continue;
      weights[i] = load_cached<kPack>(layer.weight + offset(i));
      scales[i] = to_float(layer.scale[first + i * kRowGroups]);
      biases[i] = to_float(layer.norm_bias[first + i * kRowGroups]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!is_inside(i)) continue;
      float scaled[kPack];
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        scaled[c] = scales[i] * weights[i][c];
        sums[c] += biases[i] * weights[i][c];
      }
      store(folded_weight + offset(i), Pack<T, kPack>::of(scaled));
    }
  }
  sum_over_groups<kStripPacks>(sums);
  // Then over the CTA's warps.
  static_assert(kStripThreads == 32 * kStripColumns);
  __shared__ float of_warps[32][33];  // 33: no bank conflicts in a column
  if (lane < kStripPacks) {
#pragma unroll
    for (int c = 0; c < kPack; ++c) of_warps[warp][pack * kPack + c] = sums[c];
  }
  __syncthreads();
  float total[1] = {of_warps[lane][warp]};
  sum_over_lanes<32>(total);
  if (lane == 0 && my_column < columns) folded_bias[my_column] = from_float<T>(bias + total[0]);
}

constexpr int kRowThreads = 128;

// One CTA per row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    fold_norm_backward_kernel(NormAndLinear<T> layer, const T* __restrict__ dfolded_weight,
                              const T* __restrict__ dfolded_bias, T* __restrict__ dscale,
                              T* __restrict__ dnorm_bias, T* __restrict__ dweight) {
  const int64_t row = blockIdx.x, first = row * layer.columns;
  const float scale = to_float(layer.scale[row]), norm_bias = to_float(layer.norm_bias[row]);
  float sums[2] = {};  // of scale and norm_bias
#pragma unroll 4
  for (int64_t column = threadIdx.x * kPack; column < layer.columns;
       column += kRowThreads * kPack) {
    const auto weights = load_streaming<kPack>(layer.weight + first + column);
    const auto gradients = load_streaming<kPack>(dfolded_weight + first + column);
    const auto biases = load_cached<kPack>(dfolded_bias + column);
    float result[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums[0] += weights[i] * gradients[i];
      sums[1] += weights[i] * biases[i];
      result[i] = scale * gradients[i] + norm_bias * biases[i];
    }
    store(dweight + first + column, Pack<T, kPack>::of(result));
  }
  __shared__ float scratch[2 * 32];
  sum_over_cta(sums, scratch);
  if (threadIdx.x == 0) {
    dscale[row] = from_float<T>(sums[0]);
    dnorm_bias[row] = from_float<T>(sums[1]);
  }
}

template <typename T>
bool fits(const NormAndLinear<T>& layer) {
  return layer.columns % kPack == 0 && std::max(layer.width, layer.columns) < int64_t{1} << 30;
}

}  // namespace

template <typename T>
cudaError_t FoldNormLayer<T>::forward(cudaStream_t stream, const NormAndLinear<T>& layer,
                                      T* folded_weight, T* folded_bias) {
  if (!fits(layer) || !aligned_16(layer.weight, folded_weight)) return cudaErrorNotSupported;
  if (layer.columns == 0) return cudaSuccess;
  const auto strips = static_cast<unsigned>(divide_up(layer.columns, kStripColumns));
  return launch_kernel(stream, fold_norm_forward_kernel<T>, {dim3(strips), dim3(kStripThreads)},
                       layer, folded_weight, folded_bias);
}

template <typename T>
cudaError_t FoldNormLayer<T>::backward(cudaStream_t stream, const NormAndLinear<T>& layer,
                                       const T* dfolded_weight, const T* dfolded_bias, T* dscale,
                                       T* dnorm_bias, T* dweight) {
  if (!fits(layer) || !aligned_16(layer.weight, dfolded_weight, dfolded_bias, dweight)) {
    return cudaErrorNotSupported;
  }
  if (layer.width == 0) return cudaSuccess;
  const auto ctas = static_cast<unsigned>(layer.width);
  return launch_kernel(stream, fold_norm_backward_kernel<T>, {dim3(ctas), dim3(kRowThreads)}, layer,
                       dfolded_weight, dfolded_bias, dscale, dnorm_bias, dweight);
}

template struct FoldNormLayer<__nv_bfloat16>;
template struct FoldNormLayer<__half>;

}  // namespace jaxllm
