#include "attention/flash_kernels.h"
#include "attention/mma/flash_backward.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

// Takes the large tiles for 256 columns where a CTA may have the shared memory, and for fewer
// columns where an SM has shared memory for two CTAs, as on Hopper.
template <int kHeadDim, typename T>
cudaError_t launch(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  if constexpr (kHeadDim > 64) {
    DeviceLimits limits;
    JAXLLM_RETURN_IF_ERROR(limits.read());
    const bool large = kHeadDim <= 128
                           ? limits.shared_bytes_of_sm >= 220 * 1024
                           : limits.shared_bytes >= backward_smem_bytes<kHeadDim, true>();
    if (large) return launch_both<kHeadDim, true>(stream, params, batch);
  }
  return launch_both<kHeadDim, false>(stream, params, batch);
}

const SharedNeed kNeeds[] = {{"flash_attention_backward_32", backward_smem_bytes<32, false>()},
                             {"flash_attention_backward_64", backward_smem_bytes<64, false>()},
                             {"flash_attention_backward_96", backward_smem_bytes<96, false>()},
                             {"flash_attention_backward_128", backward_smem_bytes<128, false>()},
                             {"flash_attention_backward_256", backward_smem_bytes<256, false>()}};
static_assert(backward_smem_bytes<256, false>() <= 99 << 10);

}  // namespace

template <typename T>
cudaError_t backward_by_mma(cudaStream_t stream, const FlashBackward<T>& call) {
  const FlashShape& shape = call.shape;
  const BackwardParams<T> params = make_backward_params(call);
  if (shape.width <= 32) return launch<32>(stream, params, shape.batch);
  if (shape.width <= 64) return launch<64>(stream, params, shape.batch);
  if (shape.width <= 96) return launch<96>(stream, params, shape.batch);
  if (shape.width <= 128) return launch<128>(stream, params, shape.batch);
  return launch<256>(stream, params, shape.batch);
}

template cudaError_t backward_by_mma(cudaStream_t, const FlashBackward<__nv_bfloat16>&);
template cudaError_t backward_by_mma(cudaStream_t, const FlashBackward<__half>&);

}  // namespace jaxllm::attention
