// The current scale of a matrix, and the matrix rounded with it. All CTAs run at once:
//
//   CTA    its tiles, the first one first:  the largest |x|     | barrier of the grid |
//          the largest of all CTAs -> scale; its tiles, the last one first: round, transpose, store
//
// So what was read last is read again first, while it is in the L2 cache. There a matrix of 50 MB
// is read from memory once and a bit, and one launch serves for what else takes four.
#include <cooperative_groups.h>

#include <algorithm>
#include <cfloat>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "quantization/float8_round.h"
#include "quantization/float8_round_tile.cuh"
#include "quantization/float8_scale_and_round.h"

namespace jaxllm {
namespace {

using namespace float8;

template <typename Float8>
constexpr float kLargest = std::is_same_v<Float8, __nv_fp8_e5m2> ? 57344.0f : 448.0f;

// The largest finite |x| of a thread's part of a tile.
template <typename T>
__device__ __forceinline__ float largest_finite(const Pack<T, kPack> (&packs)[kRowsOfThread]) {
  float largest = 0.0f;  // fmaxf skips NaN
#pragma unroll
  for (const auto& pack : packs) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) largest = fmaxf(largest, fabsf(pack[j]));
  }
  if (!isinf(largest)) return largest;
  largest = 0.0f;
#pragma unroll
  for (const auto& pack : packs) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (isfinite(pack[j])) largest = fmaxf(largest, fabsf(pack[j]));
    }
  }
  return largest;
}

// As scale_of() of ops/rounding.py: XLA divides by a constant so too.
template <typename Float8>
__device__ __forceinline__ float scale_of(float largest) {
  constexpr float kInverse = 1.0f / kLargest<Float8>;
  return largest == 0.0f ? 1.0f : fmaxf(largest * kInverse, FLT_MIN);
}

template <class V, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_scale_and_round_kernel(const T* x, int64_t rows, int64_t columns, unsigned tiles,
                                  uint8_t* values, uint8_t* transposed, float* partial,
                                  float* maxima, float* scale) {
  __shared__ RoundingStorage<V> shared;
  __shared__ float scratch[2][32];
  Pack<T, kPack> packs[kRowsOfThread];
  float largest = 0.0f;
  unsigned index = blockIdx.x;
  for (; index < tiles; index += gridDim.x) {
    Tile(rows, columns, index).load(x, columns, packs);
    largest = fmaxf(largest, largest_finite(packs));
  }
  largest = max_over_cta(largest, scratch[0]);
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
  cooperative_groups::this_grid().sync();

  largest = 0.0f;
  for (int i = threadIdx.x; i < gridDim.x; i += kThreads) {
    largest = fmaxf(largest, __ldcg(maxima + i));
  }
  const float of_all = scale_of<Float8>(max_over_cta(largest, scratch[1]));
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;
  const InverseScales<V> inverse(of_all);
  while (index > blockIdx.x) {
    index -= gridDim.x;
    const Tile tile(rows, columns, index);
    tile.load(x, columns, packs);
    round_tile<V, Float8>(tile, packs, inverse, shared, values, transposed, partial);
    __syncthreads();
  }
}

}  // namespace

template <typename Float8, typename T>
cudaError_t Float8ScalingAndRounding<Float8, T>::launch(cudaStream_t stream, int64_t rows,
                                                        int64_t columns, Float8* values,
                                                        Float8* transposed, T* sums,
                                                        float* partial) const {
  if (!serves(rows, columns, transposed)) return cudaErrorNotSupported;
  if (!aligned_16(x, values, transposed)) return cudaErrorNotSupported;
  const auto run = [&](auto variant) {
    const auto kernel = float8_scale_and_round_kernel<decltype(variant), Float8, T>;
    DeviceLimits limits;
    JAXLLM_RETURN_IF_ERROR(limits.read());
    int resident = 0;
    JAXLLM_RETURN_IF_ERROR(find_resident_ctas(kernel, kThreads, 0, &resident));
    // A matrix without elements has a scale too.
    const int64_t tiles = Tile::count(rows, columns);
    const int64_t ctas =
        std::min({std::max<int64_t>(tiles, 1), int64_t{resident} * limits.sms, kFloat8Maxima});
    Launch launch;
    launch.grid = dim3(static_cast<unsigned>(ctas));
    launch.block = dim3(kThreads);
    launch.cooperative = true;
    return launch_kernel(stream, kernel, launch, x, rows, columns, static_cast<unsigned>(tiles),
                         reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed),
                         partial, maxima, scale);
  };
  if (rows == 0 || columns == 0) {
    JAXLLM_RETURN_IF_ERROR(run(Variant<true, false, true>{}));
    return sums ? column_sum(stream, partial, {sums}, 1, 0, 0, columns) : cudaSuccess;
  }
  if (sums) {
    if (!values || !transposed) return cudaErrorNotSupported;
    JAXLLM_RETURN_IF_ERROR(run(Variant<true, true, true, true>{}));
    const int64_t partials = float8_partial_rows(rows);
    return column_sum(stream, partial, {sums}, 1, partials, partials, columns);
  }
  if (values && transposed) return run(Variant<true, true, true>{});
  if (transposed) return run(Variant<false, true, true>{});
  return run(Variant<true, false, true>{});
}

#define JAXLLM_INSTANTIATE(Float8)                                 \
  template struct Float8ScalingAndRounding<Float8, float>;         \
  template struct Float8ScalingAndRounding<Float8, __nv_bfloat16>; \
  template struct Float8ScalingAndRounding<Float8, __half>;

JAXLLM_INSTANTIATE(__nv_fp8_e4m3)
JAXLLM_INSTANTIATE(__nv_fp8_e5m2)
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
