#include <algorithm>

#include "attention/flash_backward_mma.cuh"
#include "attention/flash_kernels.h"
#include "common/shared_needs.h"

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

template <int kWidth, bool kLarge, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardArguments<T>& arguments, int64_t batch) {
  JAXLLM_RETURN_IF_ERROR(
      (launch<BackwardTiles<Rows::kKeys, kWidth, kLarge>>(stream, arguments, batch)));
  return launch<BackwardTiles<Rows::kQueries, kWidth, kLarge>>(stream, arguments, batch);
}

// The larger of the two kernels' shared memory.
template <int kWidth, bool kLarge>
constexpr int shared_bytes() {
  using T = __nv_bfloat16;
  return std::max(BackwardTiles<Rows::kKeys, kWidth, kLarge>::template kSharedBytes<T>,
                  BackwardTiles<Rows::kQueries, kWidth, kLarge>::template kSharedBytes<T>);
}

// Whether to take the larger tiles: of wide heads where a block may have the memory, of narrower
// ones where a multiprocessor has memory for two of them, as on a Hopper GPU.
template <int kWidth>
bool takes_large_tiles(const DeviceLimits& limits) {
  if (kWidth <= 128) return limits.shared_bytes_of_sm >= 220 * 1024;
  return limits.shared_bytes >= shared_bytes<kWidth, true>();
}

template <int kWidth, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardArguments<T>& arguments, int64_t batch) {
  if constexpr (kWidth > 64) {
    DeviceLimits limits;
    JAXLLM_RETURN_IF_ERROR(limits.read());
    if (takes_large_tiles<kWidth>(limits)) {
      return launch_both<kWidth, true>(stream, arguments, batch);
    }
  }
  return launch_both<kWidth, false>(stream, arguments, batch);
}

const SharedNeed kNeeds[] = {{"flash_attention_backward_32", shared_bytes<32, false>()},
                             {"flash_attention_backward_64", shared_bytes<64, false>()},
                             {"flash_attention_backward_96", shared_bytes<96, false>()},
                             {"flash_attention_backward_128", shared_bytes<128, false>()},
                             {"flash_attention_backward_256", shared_bytes<256, false>()}};
static_assert(shared_bytes<256, false>() <= 99 << 10);

}  // namespace

template <typename T>
cudaError_t backward_by_mma(cudaStream_t stream, const BackwardCall<T>& call,
                            const FlashShape& shape, const FlashOptions& options) {
  BackwardArguments<T> arguments{call.q,     call.k,  call.v,  call.dout, call.lse,
                                 call.delta, call.dq, call.dk, call.dv};
  arguments.heads = static_cast<int>(shape.heads);
  arguments.group = static_cast<int>(shape.heads / shape.kv_heads);
  arguments.width = static_cast<int>(shape.width);
  arguments.scale = options.scale;
  arguments.scores = make_scores(options);
  arguments.mask = make_mask(shape, options);
  if (shape.width <= kMmaMaxTurningWidth) {
    arguments.rotation = make_rotation(shape, options.rope);
  }
  const auto aligned = [&](const auto&... rows) {
    return (heads_are_aligned(rows, shape.width) && ...);
  };
  arguments.aligned =
      aligned(call.q, call.k, call.v, call.dout) && aligned(call.dq, call.dk, call.dv);
  if (shape.width <= 32) return launch_both<32>(stream, arguments, shape.batch);
  if (shape.width <= 64) return launch_both<64>(stream, arguments, shape.batch);
  if (shape.width <= 96) return launch_both<96>(stream, arguments, shape.batch);
  if (shape.width <= 128) return launch_both<128>(stream, arguments, shape.batch);
  return launch_both<256>(stream, arguments, shape.batch);
}

template cudaError_t backward_by_mma(cudaStream_t, const BackwardCall<__nv_bfloat16>&,
                                     const FlashShape&, const FlashOptions&);
template cudaError_t backward_by_mma(cudaStream_t, const BackwardCall<__half>&, const FlashShape&,
                                     const FlashOptions&);

}  // namespace jaxllm::attention
