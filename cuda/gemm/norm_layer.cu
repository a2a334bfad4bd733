#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "gemm/norm_layer.h"

namespace jaxllm {
namespace {

// Of weights in 16 bits, which a Hopper product takes: eight neighbours of a row, a pack.
constexpr int kPack = 8;

// A block has 32 columns of all rows, and a thread a pack of every kRowGroups-th row, of which
// kAhead are on their way at once. The kernel runs for a few microseconds, much of which goes by
// until its instructions are there: hence few of them.
constexpr int kStripColumns = 32;
constexpr int kStripPacks = kStripColumns / kPack;
constexpr int kStripThreads = 1024;
constexpr int kRowGroups = kStripThreads / kStripPacks;
constexpr int kAhead = 3;

template <typename T>
__global__ void __launch_bounds__(kStripThreads)
    layer_with_norm_kernel(NormAndLayer<T> layer, T* __restrict__ with_weight,
                           T* __restrict__ with_bias) {
  const int pack = threadIdx.x % kStripPacks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_column = blockIdx.x * kStripColumns, column = first_column + pack * kPack;
  const int width = layer.width, columns = layer.columns;
  // The warp sums a column at the end. What it begins with is asked for now.
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
    const auto place = [&](int i) { return int64_t{first + i * kRowGroups} * columns + column; };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!is_inside(i)) continue;
      weights[i] = load_cached<kPack>(layer.weight + place(i));
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
      store(with_weight + place(i), Pack<T, kPack>::of(scaled));
    }
  }
  sum_over_groups<kStripPacks>(sums);
  // Then over the block's warps.
  static_assert(kStripThreads == 32 * kStripColumns);
  __shared__ float of_warps[32][33];  // 33: a warp that reads a column meets no bank twice
  if (lane < kStripPacks) {
#pragma unroll
    for (int c = 0; c < kPack; ++c) of_warps[warp][pack * kPack + c] = sums[c];
  }
  __syncthreads();
  float total[1] = {of_warps[lane][warp]};
  sum_over_lanes<32>(total);
  if (lane == 0 && my_column < columns) with_bias[my_column] = from_float<T>(bias + total[0]);
}

constexpr int kRowThreads = 128;

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    layer_without_norm_kernel(NormAndLayer<T> layer, const T* __restrict__ dweight,
                              const T* __restrict__ dbias, T* __restrict__ of_scale,
                              T* __restrict__ of_bias, T* __restrict__ of_weight) {
  const int64_t row = blockIdx.x, first = row * layer.columns;
  const float scale = to_float(layer.scale[row]), norm_bias = to_float(layer.norm_bias[row]);
  float sums[2] = {};  // of scale and norm_bias
#pragma unroll 4
  for (int64_t column = threadIdx.x * kPack; column < layer.columns;
       column += kRowThreads * kPack) {
    const auto weights = load_streaming<kPack>(layer.weight + first + column);
    const auto gradients = load_streaming<kPack>(dweight + first + column);
    const auto biases = load_cached<kPack>(dbias + column);
    float result[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums[0] += weights[i] * gradients[i];
      sums[1] += weights[i] * biases[i];
      result[i] = scale * gradients[i] + norm_bias * biases[i];
    }
    store(of_weight + first + column, Pack<T, kPack>::of(result));
  }
  __shared__ float scratch[2 * 32];
  sum_over_block(sums, scratch);
  if (threadIdx.x == 0) {
    of_scale[row] = from_float<T>(sums[0]);
    of_bias[row] = from_float<T>(sums[1]);
  }
}

template <typename T>
bool fits(const NormAndLayer<T>& layer) {
  return layer.columns % kPack == 0 && std::max(layer.width, layer.columns) < int64_t{1} << 30;
}

}  // namespace

template <typename T>
cudaError_t NormLayer<T>::forward(cudaStream_t stream, const NormAndLayer<T>& layer, T* with_weight,
                                  T* with_bias) {
  if (!fits(layer) || !aligned_16(layer.weight, with_weight)) return cudaErrorNotSupported;
  if (layer.columns == 0) return cudaSuccess;
  const auto strips = static_cast<unsigned>(divide_up(layer.columns, kStripColumns));
  return launch_kernel(stream, layer_with_norm_kernel<T>, {dim3(strips), dim3(kStripThreads)},
                       layer, with_weight, with_bias);
}

template <typename T>
cudaError_t NormLayer<T>::backward(cudaStream_t stream, const NormAndLayer<T>& layer,
                                   const T* dweight, const T* dbias, T* of_scale, T* of_bias,
                                   T* of_weight) {
  if (!fits(layer) || !aligned_16(layer.weight, dweight, dbias, of_weight)) {
    return cudaErrorNotSupported;
  }
  if (layer.width == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(layer.width);
  return launch_kernel(stream, layer_without_norm_kernel<T>, {dim3(blocks), dim3(kRowThreads)},
                       layer, dweight, dbias, of_scale, of_bias, of_weight);
}

template struct NormLayer<__nv_bfloat16>;
template struct NormLayer<__half>;

}  // namespace jaxllm
