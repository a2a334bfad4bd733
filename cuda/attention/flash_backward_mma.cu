#include "attention/flash_backward_mma.cuh"
#include "attention/flash_kernels.h"

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

// Whether a multiprocessor's shared memory holds two of the larger blocks, as on a Hopper GPU.
cudaError_t has_large_memory(bool* answer) {
  int device = 0, bytes = 0;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  *answer = bytes >= 220 * 1024;
  return cudaSuccess;
}

template <int kWidth, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardArguments<T>& arguments, int64_t batch) {
  if constexpr (kWidth == 96 || kWidth == 128) {
    bool is_large = false;
    JAXLLM_RETURN_IF_ERROR(has_large_memory(&is_large));
    if (is_large) {
      JAXLLM_RETURN_IF_ERROR(
          (launch<BackwardTiles<Rows::kKeys, kWidth, true>>(stream, arguments, batch)));
      return launch<BackwardTiles<Rows::kQueries, kWidth, true>>(stream, arguments, batch);
    }
  }
  JAXLLM_RETURN_IF_ERROR((launch<BackwardTiles<Rows::kKeys, kWidth>>(stream, arguments, batch)));
  return launch<BackwardTiles<Rows::kQueries, kWidth>>(stream, arguments, batch);
}

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
