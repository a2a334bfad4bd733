#include <utility>

#include "attention/flash_forward_mma.cuh"
#include "attention/flash_kernels.h"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

template <int kWidth, bool kTall = false, typename T, typename Stored>
cudaError_t launch(cudaStream_t stream, const ForwardArguments<T, Stored>& arguments,
                   int64_t batch) {
  // A block for each tile of queries of each head.
  using Tiles = ForwardTiles<kWidth, kTall>;
  const int64_t blocks =
      batch * arguments.heads * divide_up(arguments.mask.queries, Tiles::kQueries);
  return launch_tiles(stream, flash_attention_forward_kernel<Tiles, T, Stored>, blocks,
                      Tiles::kThreads, Tiles::kSharedBytes, arguments);
}

const SharedNeed kNeeds[] = {{"flash_attention_forward_32", ForwardTiles<32>::kSharedBytes},
                             {"flash_attention_forward_64", ForwardTiles<64>::kSharedBytes},
                             {"flash_attention_forward_96", ForwardTiles<96, true>::kSharedBytes},
                             {"flash_attention_forward_128", ForwardTiles<128, true>::kSharedBytes},
                             {"flash_attention_forward_256", ForwardTiles<256>::kSharedBytes}};

template <typename T, typename Stored>
ForwardArguments<T, Stored> make_arguments(HeadRows<const Stored> q, HeadRows<const Stored> k,
                                           HeadRows<const Stored> v, HeadRows<T> out,
                                           const FlashShape& shape, const FlashOptions& options) {
  ForwardArguments<T, Stored> arguments{q, k, v, out};
  arguments.heads = static_cast<int>(shape.heads);
  arguments.group = static_cast<int>(shape.heads / shape.kv_heads);
  arguments.width = static_cast<int>(shape.width);
  arguments.scores = make_scores(options);
  arguments.unit = 1.0f;
  arguments.mask = make_mask(shape, options);
  arguments.rotation = make_rotation(shape, options.rope);
  arguments.aligned = heads_are_aligned(q, shape.width) && heads_are_aligned(k, shape.width) &&
                      heads_are_aligned(v, shape.width) && heads_are_aligned(out, shape.width);
  return arguments;
}

}  // namespace

template <typename T>
cudaError_t forward_by_mma(cudaStream_t stream, const ForwardCall<T>& call, const FlashShape& shape,
                           const FlashOptions& options) {
  ForwardArguments<T> arguments =
      make_arguments<T, T>(call.q, call.k, call.v, call.out, shape, options);
  arguments.lse = call.lse;
  // The maximum of products is that of scores only if the factor is above zero.
  if (options.softcap == 0.0f && options.scale > 0.0f) {
    std::swap(arguments.scores.factor, arguments.unit);
  }
  if (shape.width <= 32) return launch<32>(stream, arguments, shape.batch);
  if (shape.width <= 64) return launch<64>(stream, arguments, shape.batch);
  const bool is_tall = options.window == 0 && options.query_segments == nullptr;
  if (shape.width <= 96) {
    return is_tall ? launch<96, true>(stream, arguments, shape.batch)
                   : launch<96>(stream, arguments, shape.batch);
  }
  if (shape.width <= 128) {
    return is_tall ? launch<128, true>(stream, arguments, shape.batch)
                   : launch<128>(stream, arguments, shape.batch);
  }
  return launch<256>(stream, arguments, shape.batch);
}

template cudaError_t forward_by_mma(cudaStream_t, const ForwardCall<__nv_bfloat16>&,
                                    const FlashShape&, const FlashOptions&);
template cudaError_t forward_by_mma(cudaStream_t, const ForwardCall<__half>&, const FlashShape&,
                                    const FlashOptions&);

cudaError_t forward_of_float8(cudaStream_t stream, HeadRows<const __nv_fp8_e4m3> q,
                              HeadRows<const __nv_fp8_e4m3> k, HeadRows<const __nv_fp8_e4m3> v,
                              const float* q_scale, const float* k_scale, const float* v_scale,
                              const FlashShape& shape, const FlashOptions& options,
                              HeadRows<__nv_bfloat16> out) {
  auto arguments = make_arguments<__nv_bfloat16, __nv_fp8_e4m3>(q, k, v, out, shape, options);
  arguments.q_scale = q_scale;
  arguments.k_scale = k_scale;
  arguments.v_scale = v_scale;
  if (shape.width <= 64) return launch<64>(stream, arguments, shape.batch);
  if (shape.width <= 128) return launch<128>(stream, arguments, shape.batch);
  return launch<256>(stream, arguments, shape.batch);
}

}  // namespace jaxllm::attention
