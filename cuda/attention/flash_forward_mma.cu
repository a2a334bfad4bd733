#include "attention/flash_forward_mma.cuh"
#include "attention/flash_prepare.h"

namespace jaxllm::attention {
namespace {

template <int kWidth, typename T>
cudaError_t launch(cudaStream_t stream, const ForwardArguments<T>& arguments, int64_t batch) {
  // A block for each tile of queries of each head.
  using Tiles = ForwardTiles<kWidth>;
  const int64_t blocks =
      batch * arguments.heads * divide_up(arguments.mask.queries, Tiles::kQueries);
  return launch_tiles(stream, flash_attention_forward_kernel<Tiles, T>, blocks, Tiles::kThreads,
                      Tiles::kSharedElements * int{sizeof(T)}, arguments);
}

}  // namespace
}  // namespace jaxllm::attention

namespace jaxllm {

template <typename T>
cudaError_t FlashAttention<T>::forward(cudaStream_t stream, HeadRows<const T> q,
                                       HeadRows<const T> k, HeadRows<const T> v,
                                       const FlashShape& shape, const FlashOptions& options,
                                       HeadRows<T> out, float* lse) {
  using namespace attention;
  if (!is_supported(shape)) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(find_segment_ranges(stream, shape, options));
  ForwardArguments<T> arguments{q, k, v, out, lse};
  arguments.heads = static_cast<int>(shape.heads);
  arguments.group = static_cast<int>(shape.heads / shape.kv_heads);
  arguments.width = static_cast<int>(shape.width);
  arguments.scores = make_scores(options);
  arguments.mask = make_mask(shape, options);
  arguments.aligned = heads_are_aligned(q, shape.width) && heads_are_aligned(k, shape.width) &&
                      heads_are_aligned(v, shape.width) && heads_are_aligned(out, shape.width);
  if (shape.width <= 32) return launch<32>(stream, arguments, shape.batch);
  if (shape.width <= 64) return launch<64>(stream, arguments, shape.batch);
  if (shape.width <= 96) return launch<96>(stream, arguments, shape.batch);
  if (shape.width <= 128) return launch<128>(stream, arguments, shape.batch);
  return launch<256>(stream, arguments, shape.batch);
}

using Bfloat16 = __nv_bfloat16;
using Float16 = __half;
template cudaError_t FlashAttention<Bfloat16>::forward(cudaStream_t, HeadRows<const Bfloat16>,
                                                       HeadRows<const Bfloat16>,
                                                       HeadRows<const Bfloat16>, const FlashShape&,
                                                       const FlashOptions&, HeadRows<Bfloat16>,
                                                       float*);
template cudaError_t FlashAttention<Float16>::forward(cudaStream_t, HeadRows<const Float16>,
                                                      HeadRows<const Float16>,
                                                      HeadRows<const Float16>, const FlashShape&,
                                                      const FlashOptions&, HeadRows<Float16>,
                                                      float*);

}  // namespace jaxllm
