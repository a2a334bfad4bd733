#include "gemm/hopper/stream_k.cuh"
#include "gemm/hopper/wgrad.h"

namespace jaxllm {
namespace {

using namespace hopper;

using WgradTile = GemmTile<192, 4, 1, 1, /*kCooperative=*/true>;
using Scheduler = StreamKScheduler<WgradTile>;
// x and dout have a token in each row: both are MN-major.
template <typename T>
using WgradGemm = Gemm<Mainloop<WgradTile, T, Major::kMN, Major::kMN, Scheduler::kProblems>,
                       StreamKScheduler, EpiloguePartial>;

template <typename T>
struct WgradResults {
  T* of[2];
  int rows_of[2], columns_of[2];

  __device__ __forceinline__ int rows(int problem) const { return rows_of[problem]; }
  __device__ __forceinline__ int columns(int problem) const { return columns_of[problem]; }
  __device__ __forceinline__ void store(int problem, int /*row*/, int /*column*/, int64_t index,
                                        const float (&sums)[8]) const {
    jaxllm::store(of[problem] + index, Pack<T>::of(sums));
  }
};

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    wgrad_sum_parts_kernel(const float* partial, const __grid_constant__ Scheduler::Params plan,
                           const __grid_constant__ WgradResults<T> results) {
  sum_parts<WgradTile>(partial, plan, results);
}

}  // namespace

template <typename T>
cudaError_t wgrad_pair(cudaStream_t stream, const Wgrad<T> (&gradients)[2], int64_t tokens,
                       float* partial, int64_t partial_floats) {
  static_assert(kWgradTileRows == WgradTile::kBlockM && kWgradTileColumns == WgradTile::kBlockN);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(matmul_hopper_kernel<WgradGemm<T>>, &limits));
  if (tokens <= 0) return cudaErrorNotSupported;

  typename WgradGemm<T>::Params params;
  GemmShape shapes[2];
  WgradResults<T> results;
  for (int i = 0; i < 2; ++i) {
    const auto [x, dout, dweight, rows, columns] = gradients[i];
    JAXLLM_RETURN_IF_ERROR(
        WgradGemm<T>::Mainloop::encode(x, dout, rows, columns, tokens, i, &params.mainloop));
    shapes[i] = {rows, columns, tokens};
    results.of[i] = dweight;
    results.rows_of[i] = static_cast<int>(rows);
    results.columns_of[i] = static_cast<int>(columns);
  }
  JAXLLM_RETURN_IF_ERROR(
      plan_stream_k<WgradGemm<T>>(shapes, limits.sms, partial, partial_floats, &params));
  if (params.scheduler.units == 0) return cudaErrorNotSupported;  // fewer CTAs than tiles
  return launch_stream_k<WgradGemm<T>>(stream, params, wgrad_sum_parts_kernel<T>, results);
}

template cudaError_t wgrad_pair(cudaStream_t, const Wgrad<__nv_bfloat16> (&)[2], int64_t, float*,
                                int64_t);
template cudaError_t wgrad_pair(cudaStream_t, const Wgrad<__half> (&)[2], int64_t, float*, int64_t);

}  // namespace jaxllm
