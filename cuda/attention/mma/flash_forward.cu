#include <utility>

#include "attention/flash_kernels.h"
#include "attention/mma/flash_forward.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

template <int kHeadDim, bool kTwoMTiles = false, typename T, typename Stored>
cudaError_t launch(cudaStream_t stream, const ForwardParams<T, Stored>& params, int64_t batch) {
  return launch_forward<ForwardTraits<kHeadDim, kTwoMTiles>>(stream, params, batch);
}

const SharedNeed kNeeds[] = {{"flash_attention_forward_32", ForwardTraits<32>::kSmemBytes},
                             {"flash_attention_forward_64", ForwardTraits<64>::kSmemBytes},
                             {"flash_attention_forward_96", ForwardTraits<96, true>::kSmemBytes},
                             {"flash_attention_forward_128", ForwardTraits<128, true>::kSmemBytes},
                             {"flash_attention_forward_256", ForwardTraits<256>::kSmemBytes}};

}  // namespace

template <typename T, typename Stored>
cudaError_t forward_by_mma(cudaStream_t stream, const FlashForward<T, Stored>& call) {
  const FlashShape& shape = call.shape;
  const FlashOptions& options = call.options;
  ForwardParams<T, Stored> params = make_forward_params(call);
  if constexpr (!std::is_same_v<T, Stored>) {
    if (shape.width <= 64) return launch<64>(stream, params, shape.batch);
    if (shape.width <= 128) return launch<128>(stream, params, shape.batch);
  } else {
    // The maximum of products is that of scores only if the scale is above zero. Then exp2 applies
    // it at no cost.
    if (options.softcap == 0.0f && options.scale > 0.0f) {
      std::swap(params.scores.scale, params.exp2_scale);
    }
    const bool two_m_tiles = options.left < 0 && options.query_segments == nullptr;
    if (shape.width <= 32) return launch<32>(stream, params, shape.batch);
    if (shape.width <= 64) return launch<64>(stream, params, shape.batch);
    if (shape.width <= 96) {
      return two_m_tiles ? launch<96, true>(stream, params, shape.batch)
                         : launch<96>(stream, params, shape.batch);
    }
    if (shape.width <= 128) {
      return two_m_tiles ? launch<128, true>(stream, params, shape.batch)
                         : launch<128>(stream, params, shape.batch);
    }
  }
  return launch<256>(stream, params, shape.batch);
}

template cudaError_t forward_by_mma(cudaStream_t, const FlashForward<__nv_bfloat16>&);
template cudaError_t forward_by_mma(cudaStream_t, const FlashForward<__half>&);
template cudaError_t forward_by_mma(cudaStream_t,
                                    const FlashForward<__nv_bfloat16, __nv_fp8_e4m3>&);

}  // namespace jaxllm::attention
