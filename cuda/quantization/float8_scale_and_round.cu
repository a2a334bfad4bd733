// The current scale of a matrix, and the matrix rounded with it, by two kernels. The second starts
// while the first still runs (programmatic dependent launch):
//
//   float8_amax_kernel   the largest |x| of each CTA -> maxima
//   ..._round_...        loads a tile | waits for the first | maxima -> scale | rounds, transposes
//
// It has the last tile first, which was read last. One kernel with a barrier of the grid between
// the two was no faster in a training step, and its CTAs must all run at once.
#include <algorithm>

#include "common/dependent_launch.cuh"
#include "quantization/float8_round_tile.cuh"
#include "quantization/float8_scale.cuh"
#include "quantization/float8_scale_and_round.h"

namespace jaxllm {
namespace {

using namespace float8;

constexpr int kAmaxThreads = 512, kAmaxPacks = 4;

// CTA i reads every gridDim.x-th run of kRun packs.
template <typename T>
__global__ void __launch_bounds__(kAmaxThreads)
    float8_amax_kernel(const T* x, int64_t packs, float* maxima) {
  launch_dependent_grids();
  constexpr int kRun = kAmaxThreads * kAmaxPacks;
  float largest = 0.0f;
  for (int64_t first = int64_t{blockIdx.x} * kRun; first < packs; first += gridDim.x * kRun) {
    Pack<T, kPack> of_run[kAmaxPacks];
#pragma unroll
    for (int i = 0; i < kAmaxPacks; ++i) {
      const int64_t pack = first + i * kAmaxThreads + threadIdx.x;
      of_run[i] = pack < packs ? load<kPack>(x + pack * kPack) : Pack<T, kPack>{};
    }
    largest = fmaxf(largest, largest_finite(of_run));
  }
  __shared__ float scratch[32];
  largest = max_over_cta(largest, scratch);
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

// A CTA for each tile, the last one first.
template <class V, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_round_with_maxima_kernel(const T* x, const float* maxima, int count, int64_t rows,
                                    int64_t columns, uint8_t* values, uint8_t* transposed,
                                    float* partial, float* scale) {
  __shared__ RoundingStorage<V> shared;
  __shared__ float scratch[32];
  const Tile tile(rows, columns, gridDim.x - 1 - blockIdx.x);
  Pack<T, kPack> packs[kRowsOfThread];
  tile.load(x, columns, packs);  // which the kernel before only reads
  wait_on_dependent_grids();
  const float of_all = scale_of_maxima<Float8>(maxima, count, scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;
  round_tile<V, Float8>(tile, packs, InverseScales<V>(of_all), shared, values, transposed, partial);
}

}  // namespace

template <typename Float8, typename T>
cudaError_t Float8ScalingAndRounding<Float8, T>::launch(cudaStream_t stream, int64_t rows,
                                                        int64_t columns, Float8* values,
                                                        Float8* transposed, T* sums,
                                                        float* partial) const {
  if (!serves(rows, columns, transposed)) return cudaErrorNotSupported;
  if (!aligned<8>(values) || !aligned_16(x, transposed)) return cudaErrorNotSupported;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  const int64_t packs = rows * columns / kPack, runs = divide_up(packs, kAmaxThreads * kAmaxPacks);
  const int64_t ctas = std::min({runs, 2 * int64_t{limits.sms}, kFloat8Maxima});
  if (ctas > 0) {
    JAXLLM_RETURN_IF_ERROR(
        launch_kernel(stream, float8_amax_kernel<T>, {dim3(ctas), kAmaxThreads}, x, packs, maxima));
  }
  const auto run = [&](auto variant) {
    Launch launch;
    // A matrix without elements has a scale too.
    launch.grid = dim3(std::max<int64_t>(Tile::count(rows, columns), 1));
    launch.block = dim3(kThreads);
    launch.pdl = ctas > 0;
    return launch_kernel(stream, float8_round_with_maxima_kernel<decltype(variant), Float8, T>,
                         launch, x, maxima, static_cast<int>(ctas), rows, columns,
                         reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed),
                         partial, scale);
  };
  if (ctas == 0) {
    JAXLLM_RETURN_IF_ERROR(run(Variant<true, false, true>{}));
    return sums ? column_sum(stream, partial, {sums}, 1, 0, 0, columns) : cudaSuccess;
  }
  return run_with_one_scale(stream, rows, columns, values, transposed, sums, partial, run);
}

#define JAXLLM_INSTANTIATE(Float8)                                 \
  template struct Float8ScalingAndRounding<Float8, float>;         \
  template struct Float8ScalingAndRounding<Float8, __nv_bfloat16>; \
  template struct Float8ScalingAndRounding<Float8, __half>;

JAXLLM_INSTANTIATE(__nv_fp8_e4m3)
JAXLLM_INSTANTIATE(__nv_fp8_e5m2)
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
