#include <algorithm>

#include "attention/flash_kernels.h"
#include "attention/mma/flash_backward.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

template <class Traits, typename T>
cudaError_t launch(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  const int64_t heads = Traits::kOwnsKeys ? params.heads / params.group : params.heads;
  const int64_t rows = Traits::kOwnsKeys ? params.mask.keys : params.mask.queries;
  const int64_t tiles = batch * heads * Traits::kParts * divide_up(rows, Traits::kBlockOwn);
  return launch_tiles(stream, flash_attention_backward_kernel<Traits, T>, tiles, Traits::kThreads,
                      Traits::template kSmemBytes<T>, params);
}

template <int kHeadDim, bool kLarge, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  JAXLLM_RETURN_IF_ERROR(
      (launch<BackwardTraits<Rows::kKeys, kHeadDim, kLarge>>(stream, params, batch)));
  return launch<BackwardTraits<Rows::kQueries, kHeadDim, kLarge>>(stream, params, batch);
}

// The larger of the two kernels' shared memory.
template <int kHeadDim, bool kLarge>
constexpr int smem_bytes() {
  using T = __nv_bfloat16;
  return std::max(BackwardTraits<Rows::kKeys, kHeadDim, kLarge>::template kSmemBytes<T>,
                  BackwardTraits<Rows::kQueries, kHeadDim, kLarge>::template kSmemBytes<T>);
}

// Takes the large tiles for 256 columns where a CTA may have the shared memory, and for fewer
// columns where an SM has shared memory for two CTAs, as on Hopper.
template <int kHeadDim, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  if constexpr (kHeadDim > 64) {
    DeviceLimits limits;
    JAXLLM_RETURN_IF_ERROR(limits.read());
    const bool large = kHeadDim <= 128 ? limits.shared_bytes_of_sm >= 220 * 1024
                                       : limits.shared_bytes >= smem_bytes<kHeadDim, true>();
    if (large) return launch_both<kHeadDim, true>(stream, params, batch);
  }
  return launch_both<kHeadDim, false>(stream, params, batch);
}

const SharedNeed kNeeds[] = {{"flash_attention_backward_32", smem_bytes<32, false>()},
                             {"flash_attention_backward_64", smem_bytes<64, false>()},
                             {"flash_attention_backward_96", smem_bytes<96, false>()},
                             {"flash_attention_backward_128", smem_bytes<128, false>()},
                             {"flash_attention_backward_256", smem_bytes<256, false>()}};
static_assert(smem_bytes<256, false>() <= 99 << 10);

}  // namespace

template <typename T>
cudaError_t backward_by_mma(cudaStream_t stream, const FlashBackward<T>& call) {
  const auto& [shape, options, q, k, v, out, dout, lse, delta, dlse, dq, dk, dv] = call;
  BackwardParams<T> params{q, k, v, dout, lse, delta, dq, dk, dv};
  params.heads = static_cast<int>(shape.heads);
  params.group = static_cast<int>(shape.heads / shape.kv_heads);
  params.width = static_cast<int>(shape.width);
  params.scale = options.scale;
  params.scores = make_score_params(options);
  params.mask = make_mask(shape, options);
  if (shape.width <= kMmaMaxRotaryWidth) params.rotary = make_rotary(shape, options.rope);
  params.aligned = heads_are_aligned(shape.width, q, k, v, dout, dq, dk, dv);
  if (shape.width <= 32) return launch_both<32>(stream, params, shape.batch);
  if (shape.width <= 64) return launch_both<64>(stream, params, shape.batch);
  if (shape.width <= 96) return launch_both<96>(stream, params, shape.batch);
  if (shape.width <= 128) return launch_both<128>(stream, params, shape.batch);
  return launch_both<256>(stream, params, shape.batch);
}

template cudaError_t backward_by_mma(cudaStream_t, const FlashBackward<__nv_bfloat16>&);
template cudaError_t backward_by_mma(cudaStream_t, const FlashBackward<__half>&);

}  // namespace jaxllm::attention
