#include "attention/flash_backward_mma.cuh"
#include "attention/flash_prepare.h"

namespace jaxllm::attention {
namespace {

template <class Tiles, typename T>
cudaError_t launch(cudaStream_t stream, const BackwardArguments<T>& arguments, int64_t batch) {
  // A block for each tile of queries of each query head, or of keys of each key head.
  const int64_t heads = Tiles::kOwnsKeys ? arguments.heads / arguments.group : arguments.heads;
  const int64_t rows = Tiles::kOwnsKeys ? arguments.mask.keys : arguments.mask.queries;
  const int64_t blocks = batch * heads * Tiles::kParts * divide_up(rows, Tiles::kOwnTile);
  return launch_tiles(stream, flash_attention_backward_kernel<Tiles, T>, blocks, Tiles::kThreads,
                      Tiles::template kSharedBytes<T>, arguments);
}

template <int kWidth, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardArguments<T>& arguments, int64_t batch) {
  JAXLLM_RETURN_IF_ERROR((launch<BackwardTiles<Rows::kKeys, kWidth>>(stream, arguments, batch)));
  return launch<BackwardTiles<Rows::kQueries, kWidth>>(stream, arguments, batch);
}

}  // namespace
}  // namespace jaxllm::attention

namespace jaxllm {

template <typename T>
cudaError_t FlashAttention<T>::backward(cudaStream_t stream, HeadRows<const T> q,
                                        HeadRows<const T> k, HeadRows<const T> v,
                                        HeadRows<const T> out, const float* lse,
                                        HeadRows<const T> dout, const FlashShape& shape,
                                        const FlashOptions& options, HeadRows<T> dq, HeadRows<T> dk,
                                        HeadRows<T> dv, float* delta) {
  using namespace attention;
  if (!is_supported(shape)) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(find_segment_ranges(stream, shape, options));
  JAXLLM_RETURN_IF_ERROR(find_delta<T>(stream, out, dout, shape, delta));
  BackwardArguments<T> arguments{q, k, v, dout, lse, delta, dq, dk, dv};
  arguments.heads = static_cast<int>(shape.heads);
  arguments.group = static_cast<int>(shape.heads / shape.kv_heads);
  arguments.width = static_cast<int>(shape.width);
  arguments.scale = options.scale;
  arguments.scores = make_scores(options);
  arguments.mask = make_mask(shape, options);
  const auto aligned = [&](const auto&... rows) {
    return (heads_are_aligned(rows, shape.width) && ...);
  };
  arguments.aligned = aligned(q, k, v, dout, dq, dk, dv);
  if (shape.width <= 32) return launch_both<32>(stream, arguments, shape.batch);
  if (shape.width <= 64) return launch_both<64>(stream, arguments, shape.batch);
  if (shape.width <= 96) return launch_both<96>(stream, arguments, shape.batch);
  if (shape.width <= 128) return launch_both<128>(stream, arguments, shape.batch);
  return launch_both<256>(stream, arguments, shape.batch);
}

using Bfloat16 = __nv_bfloat16;
using Float16 = __half;
template cudaError_t FlashAttention<Bfloat16>::backward(
    cudaStream_t, HeadRows<const Bfloat16>, HeadRows<const Bfloat16>, HeadRows<const Bfloat16>,
    HeadRows<const Bfloat16>, const float*, HeadRows<const Bfloat16>, const FlashShape&,
    const FlashOptions&, HeadRows<Bfloat16>, HeadRows<Bfloat16>, HeadRows<Bfloat16>, float*);
template cudaError_t FlashAttention<Float16>::backward(
    cudaStream_t, HeadRows<const Float16>, HeadRows<const Float16>, HeadRows<const Float16>,
    HeadRows<const Float16>, const float*, HeadRows<const Float16>, const FlashShape&,
    const FlashOptions&, HeadRows<Float16>, HeadRows<Float16>, HeadRows<Float16>, float*);

}  // namespace jaxllm
