#include "common/vector.cuh"
#include "gemm/hopper/epilogue_scaled.cuh"
#include "gemm/hopper/float8_mainloop.cuh"
#include "gemm/hopper/float8_split.h"
#include "gemm/hopper/stream_k.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// The tile of a cluster is that of the header. EpiloguePartial has no buffers, so five stages fit.
constexpr int kRows = 128;
using SplitTile =
    GemmTile<kFloat8SplitColumns, 5, kFloat8SplitRows / kRows, 1, /*kCooperative=*/true, 1, 128>;
static_assert(SplitTile::kBlockM == kRows);
// The parts are float32, whatever the result is.
template <typename A, typename B>
using SplitGemm = Gemm<Float8Mainloop<SplitTile, A, B, float>, StreamKScheduler, EpiloguePartial>;

// As EpilogueScaled stores its accumulators.
template <typename Out>
struct ScaledResult {
  Out* out;
  Scales scale_a, scale_b;
  const Out* bias;  // nullptr for none
  int rows_, columns_;

  __device__ __forceinline__ int rows(int) const { return rows_; }
  __device__ __forceinline__ int columns(int) const { return columns_; }
  __device__ __forceinline__ void store(int, int row, int column, int64_t index,
                                        const float (&sums)[8]) const {
    const float of_row = scale_a.at(row);
    Pack<Out, 8> offsets = {};
    if (bias != nullptr) offsets = load<8>(bias + column);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = scaled(sums[i], of_row, scale_b.at(column + i)) + offsets[i];
    }
    jaxllm::store(out + index, Pack<Out, 8>::of(values));
  }
};

template <typename Out>
__global__ void __launch_bounds__(kSumThreads)
    float8_sum_parts_kernel(const float* partial,
                            const __grid_constant__ StreamKScheduler<SplitTile>::Params plan,
                            const __grid_constant__ ScaledResult<Out> result) {
  sum_parts<SplitTile>(partial, plan, result);
}

}  // namespace

template <typename A, typename B, typename Out>
cudaError_t float8_split(cudaStream_t stream, const Float8Gemm<A, B, Out>& gemm,
                         const GemmShape& shape, Out* out, float* partial, int64_t partial_floats) {
  using Split = SplitGemm<A, B>;
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  if (shape.columns % 8 != 0 || !aligned_16(out, gemm.bias, partial)) return cudaErrorNotSupported;
  int clusters = 0;
  JAXLLM_RETURN_IF_ERROR(find_clusters<Split>(&clusters));
  typename Split::Params params;
  JAXLLM_RETURN_IF_ERROR(Split::Mainloop::encode(
      reinterpret_cast<const uint8_t*>(gemm.a), reinterpret_cast<const uint8_t*>(gemm.b),
      shape.rows, shape.columns, shape.depth, 0, &params.mainloop));
  const GemmShape shapes[1] = {shape};
  JAXLLM_RETURN_IF_ERROR(plan_stream_k<Split>(shapes, clusters, partial, partial_floats, &params));
  const ScaledResult<Out> result{
      out,       {gemm.scale_a, gemm.has_one_scale_a}, {gemm.scale_b, gemm.has_one_scale_b},
      gemm.bias, static_cast<int>(shape.rows),         static_cast<int>(shape.columns)};
  return launch_stream_k<Split>(stream, params, float8_sum_parts_kernel<Out>, result);
}

#define JAXLLM_FLOAT8_SPLIT(A, B, Out)                                                            \
  template cudaError_t float8_split(cudaStream_t, const Float8Gemm<A, B, Out>&, const GemmShape&, \
                                    Out*, float*, int64_t);
#define JAXLLM_FLOAT8_SPLITS(A, B)         \
  JAXLLM_FLOAT8_SPLIT(A, B, __nv_bfloat16) \
  JAXLLM_FLOAT8_SPLIT(A, B, __half)        \
  JAXLLM_FLOAT8_SPLIT(A, B, float)
JAXLLM_FLOAT8_SPLITS(__nv_fp8_e4m3, __nv_fp8_e4m3)
JAXLLM_FLOAT8_SPLITS(__nv_fp8_e4m3, __nv_fp8_e5m2)
JAXLLM_FLOAT8_SPLITS(__nv_fp8_e5m2, __nv_fp8_e4m3)
JAXLLM_FLOAT8_SPLITS(__nv_fp8_e5m2, __nv_fp8_e5m2)
#undef JAXLLM_FLOAT8_SPLITS
#undef JAXLLM_FLOAT8_SPLIT

}  // namespace jaxllm
