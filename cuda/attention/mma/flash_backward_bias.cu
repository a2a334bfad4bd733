// The backward with a bias on the scores: few widths of tiles, to bound the time of a build.
#include <algorithm>

#include "attention/flash_kernels.h"
#include "attention/mma/flash_backward.cuh"
#include "attention/mma/flash_bias_gradient.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

template <int kHeadDim, typename T>
cudaError_t launch(cudaStream_t stream, const BackwardParams<T>& params,
                   const FlashBackward<T>& call) {
  JAXLLM_RETURN_IF_ERROR(
      (launch_both<kHeadDim, /*kLarge=*/false, /*kBias=*/true>(stream, params, call.shape.batch)));
  using Traits = BiasGradientTraits<kHeadDim>;
  const FlashScoreBias& bias = call.options.score_bias;
  const int64_t tiles = divide_up(call.shape.queries, Traits::kBlockM) *
                        divide_up(call.shape.keys, Traits::kBlockN) * bias.sequences * bias.heads;
  return launch_tiles(stream, flash_attention_bias_gradient_kernel<Traits, T>, tiles,
                      Traits::kThreads, Traits::kSmemBytes, params);
}

template <int kHeadDim>
constexpr int smem_bytes() {
  return std::max(backward_smem_bytes<kHeadDim, false, true>(),
                  BiasGradientTraits<kHeadDim>::kSmemBytes);
}

const SharedNeed kNeeds[] = {{"flash_attention_backward_bias_64", smem_bytes<64>()},
                             {"flash_attention_backward_bias_128", smem_bytes<128>()},
                             {"flash_attention_backward_bias_256", smem_bytes<256>()}};
static_assert(smem_bytes<256>() <= 99 << 10);

}  // namespace

template <typename T>
cudaError_t biased_backward_by_mma(cudaStream_t stream, const FlashBackward<T>& call) {
  const BackwardParams<T> params = make_backward_params(call);
  if (call.shape.width <= 64) return launch<64>(stream, params, call);
  if (call.shape.width <= 128) return launch<128>(stream, params, call);
  return launch<256>(stream, params, call);
}

template cudaError_t biased_backward_by_mma(cudaStream_t, const FlashBackward<__nv_bfloat16>&);
template cudaError_t biased_backward_by_mma(cudaStream_t, const FlashBackward<__half>&);

}  // namespace jaxllm::attention
