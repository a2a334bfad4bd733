// The forward with a bias on the scores: few widths of tiles, to bound the time of a build.
#include "attention/flash_kernels.h"
#include "attention/mma/flash_forward.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

template <int kHeadDim>
using Traits = ForwardTraits<kHeadDim, /*kTwoMTiles=*/false, /*kHasBias=*/true>;

const SharedNeed kNeeds[] = {{"flash_attention_forward_bias_64", Traits<64>::kSmemBytes},
                             {"flash_attention_forward_bias_128", Traits<128>::kSmemBytes},
                             {"flash_attention_forward_bias_256", Traits<256>::kSmemBytes}};

}  // namespace

template <typename T>
cudaError_t biased_forward_by_mma(cudaStream_t stream, const FlashForward<T>& call) {
  const FlashShape& shape = call.shape;
  const ForwardParams<T> params = make_forward_params(call);
  if (shape.width <= 64) return launch_forward<Traits<64>>(stream, params, shape.batch);
  if (shape.width <= 128) return launch_forward<Traits<128>>(stream, params, shape.batch);
  return launch_forward<Traits<256>>(stream, params, shape.batch);
}

template cudaError_t biased_forward_by_mma(cudaStream_t, const FlashForward<__nv_bfloat16>&);
template cudaError_t biased_forward_by_mma(cudaStream_t, const FlashForward<__half>&);

}  // namespace jaxllm::attention
