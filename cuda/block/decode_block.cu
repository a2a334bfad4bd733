#include <cmath>

#include "attention/decode.h"
#include "block/decode_block.h"
#include "block/head_norm.cuh"
#include "gemm/matvec/matvec.cuh"

namespace jaxllm {

// Five kernels. With programmatic dependent launch each starts to load its weights before the
// kernel ahead of it has ended.
//
//   kernel              x                    epilogue
//   qkv GEMV            RMS norm of x        + bias, RoPE, append to the caches
//   decode attention    q, caches
//   output GEMV         attended             + residual
//   gate and up GEMV    RMS norm of hidden   SwiGLU
//   down GEMV           activated            + hidden
//
// With norms of heads the qkv GEMV only adds the bias, and a sixth kernel follows it, which
// normalizes, rotates and appends.
template <typename T, typename W>
cudaError_t TransformerBlock<T, W>::run(cudaStream_t stream, const T* residual,
                                        BlockWeights<T, W> weights, const float* cos,
                                        const float* sin, BlockCache<T> cache, float eps, T* out,
                                        BlockWorkspace<T> workspace, BlockSizes s) {
  constexpr bool kPdl = true;
  const auto params = [&](const T* x, BlockWeight<W> weight, const T* norm, int64_t width) {
    return MatvecParams<T, W>{x,   weight.data, weight.scales, norm,
                              eps, s.batch,     width,         weights.group};
  };
  const auto of_qkv = params(residual, weights.qkv, weights.norm1, s.width);
  const NewTokenRows new_rows{cache.lengths, s.length, s.ring, cache.table, s.page, s.pages};
  QkvRopeEpilogue<T> rope{workspace.q, cache.k, cache.v,    cos,         sin,
                          new_rows,    s.heads, s.kv_heads, s.head_width};
  if (weights.q_norm == nullptr) {
    rope.bias = weights.qkv_bias;
    JAXLLM_RETURN_IF_ERROR(matvec(stream, of_qkv, rope));
  } else {
    const StoreEpilogue<T> store{workspace.qkv, weights.qkv_bias, rope.outputs(), /*is_bias=*/true};
    JAXLLM_RETURN_IF_ERROR(matvec(stream, of_qkv, store));
    const int64_t heads = s.batch * (s.heads + 2 * s.kv_heads);
    const Launch launch{dim3(static_cast<unsigned>(divide_up(heads, kHeadNormThreads / 32))),
                        dim3(kHeadNormThreads), 0, 1, kPdl};
    JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, decode_block_head_norm_kernel<T>, launch,
                                         workspace.qkv, weights.q_norm, weights.k_norm, eps,
                                         s.batch, rope));
  }
  DecodeSizes sizes = {s.batch, s.heads, s.kv_heads, s.length, s.head_width};
  sizes.pages = s.pages, sizes.page = s.page;
  sizes.window = s.window;
  sizes.added = cache.table == nullptr ? 1 : 0;
  sizes.overlap = kPdl;
  DecodeArrays<T, T> arrays{
      workspace.q,        cache.k,          cache.v, nullptr, nullptr, cache.lengths,
      workspace.attended, workspace.partial};
  if (cache.table != nullptr) arrays.lengths = cache.keys, arrays.block_table = cache.table;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
  JAXLLM_RETURN_IF_ERROR((CachedAttention<T, T>::run(stream, arrays, scale, sizes, s.splits)));
  JAXLLM_RETURN_IF_ERROR(
      matvec(stream, params(workspace.attended, weights.out, nullptr, s.heads * s.head_width),
             StoreEpilogue<T>{workspace.hidden, residual, s.width}, kPdl));
  JAXLLM_RETURN_IF_ERROR(matvec(stream,
                                params(workspace.hidden, weights.gate_up, weights.norm2, s.width),
                                SwigluEpilogue<T>{workspace.activated, s.mlp_width}, kPdl));
  return matvec(stream, params(workspace.activated, weights.down, nullptr, s.mlp_width),
                StoreEpilogue<T>{out, workspace.hidden, s.width}, kPdl);
}

template struct TransformerBlock<float, float>;
template struct TransformerBlock<float, int8_t>;
template struct TransformerBlock<__nv_bfloat16, __nv_bfloat16>;
template struct TransformerBlock<__nv_bfloat16, int8_t>;
template struct TransformerBlock<__half, __half>;
template struct TransformerBlock<__half, int8_t>;

}  // namespace jaxllm
