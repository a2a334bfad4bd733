#include <algorithm>
#include <climits>

#include "attention/flash_kernels.h"
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::attention {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxCtas = int64_t{1} << 20;  // each loops over its work in a grid stride

// A warp for each granule of each sequence, of its queries first and then of its keys.
__global__ void __launch_bounds__(kThreads)
    segment_ranges_kernel(const int32_t* query_segments, const int32_t* key_segments, int queries,
                          int keys, int query_granules, int64_t granules, int64_t count,
                          SegmentRange* ranges) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  const int lane = threadIdx.x % 32;
  int64_t index = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (; index < count; index += warps) {
    const int64_t b = index / granules;
    const int granule = static_cast<int>(index % granules);
    const bool is_query = granule < query_granules;
    const int rows = is_query ? queries : keys;
    const int32_t* segments = is_query ? query_segments : key_segments;
    const int row = (is_query ? granule : granule - query_granules) * int{kSegmentGranule} + lane;
    const bool is_row = row < rows;
    const int segment = is_row ? segments[b * rows + row] : 0;
    const int least = __reduce_min_sync(kFullWarp, is_row ? segment : INT_MAX);
    const int most = __reduce_max_sync(kFullWarp, is_row ? segment : INT_MIN);
    if (lane == 0) ranges[index] = {least, most};
  }
}

// Eight lanes have a head of a query. kVector is 1 where packs of 16 bytes are not aligned.
template <int kVector, typename T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(HeadRows<const T> out, HeadRows<const T> dout, int64_t rows, int heads,
                 int queries, int width, const float* dlse, float* delta) {
  constexpr int kLanes = 8;
  const int lane = threadIdx.x % kLanes;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kLanes);
  const int64_t count = rows * heads;
  // All lanes of a warp run the same iterations, since they meet in the sum.
  int64_t first = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / 32 * (32 / kLanes);
  for (; first < count; first += step) {
    const int64_t index = first + threadIdx.x % 32 / kLanes;
    const int64_t row = index / heads;
    const int head = static_cast<int>(index % heads);
    float sum[1] = {0.0f};
    if (index < count) {
      const T* a = out.data + row * out.row_stride + int64_t{head} * width;
      const T* b = dout.data + row * dout.row_stride + int64_t{head} * width;
      for (int column = lane * kVector; column < width; column += kLanes * kVector) {
        if constexpr (kVector == 1) {
          sum[0] += to_float(a[column]) * to_float(b[column]);
        } else {
          const Pack<T> of_a = load_streaming<kVector>(a + column);
          const Pack<T> of_b = load_cached<kVector>(b + column);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[0] += of_a[i] * of_b[i];
        }
      }
    }
    sum_over_lanes<kLanes>(sum);
    if (lane == 0 && index < count) {
      const int64_t at = (row / queries * heads + head) * queries + row % queries;
      delta[at] = dlse == nullptr ? sum[0] : sum[0] - dlse[at];
    }
  }
}

}  // namespace

cudaError_t compute_segment_ranges(cudaStream_t stream, const FlashShape& shape,
                                   const FlashOptions& options) {
  if (options.query_segments == nullptr) return cudaSuccess;
  const int64_t granules = flash_segment_ranges(shape.queries, shape.keys);
  const int64_t count = shape.batch * granules;
  if (count == 0) return cudaSuccess;
  const int64_t ctas = std::min(divide_up(count, kThreads / 32), kMaxCtas);
  return launch_kernel(stream, segment_ranges_kernel, {dim3(static_cast<unsigned>(ctas)), kThreads},
                       options.query_segments, options.key_segments,
                       static_cast<int>(shape.queries), static_cast<int>(shape.keys),
                       static_cast<int>(divide_up(shape.queries, kSegmentGranule)), granules, count,
                       options.segment_ranges);
}

template <typename T>
cudaError_t compute_delta(cudaStream_t stream, const FlashBackward<T>& call) {
  const FlashShape& shape = call.shape;
  const int64_t rows = shape.batch * shape.queries;
  if (rows * shape.heads == 0) return cudaSuccess;
  constexpr int kVector = kPackSize<T>;
  const bool aligned = shape.width % kVector == 0 && call.out.row_stride % kVector == 0 &&
                       call.dout.row_stride % kVector == 0 &&
                       aligned_16(call.out.data, call.dout.data);
  const int64_t ctas = std::min(divide_up(rows * shape.heads, kThreads / 8), kMaxCtas);
  const auto launch = [&](auto kernel) {
    return launch_kernel(stream, kernel, {dim3(static_cast<unsigned>(ctas)), kThreads}, call.out,
                         call.dout, rows, static_cast<int>(shape.heads),
                         static_cast<int>(shape.queries), static_cast<int>(shape.width), call.dlse,
                         call.delta);
  };
  return aligned ? launch(delta_kernel<kVector, T>) : launch(delta_kernel<1, T>);
}

template cudaError_t compute_delta(cudaStream_t, const FlashBackward<float>&);
template cudaError_t compute_delta(cudaStream_t, const FlashBackward<__nv_bfloat16>&);
template cudaError_t compute_delta(cudaStream_t, const FlashBackward<__half>&);

}  // namespace jaxllm::attention
