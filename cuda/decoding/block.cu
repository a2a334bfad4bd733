#include <cmath>

#include "attention/decode.h"
#include "decoding/block.h"
#include "gemm/matvec.cuh"

namespace jaxllm {

// Five kernels, each of which begins to read its weights while the one before it ends.
template <typename T, typename W>
cudaError_t TransformerBlock<T, W>::run(cudaStream_t stream, const T* residual,
                                        BlockWeights<T, W> weights, const float* cos,
                                        const float* sin, const int32_t* lengths, T* k_cache,
                                        T* v_cache, float eps, T* out, BlockWorkspace<T> workspace,
                                        BlockSizes s) {
  constexpr bool kOverlap = true;  // with the kernel before
  const int64_t attended_width = s.heads * s.head_width;
  const auto product = [&](const T* x, BlockMatrix<W> matrix, const T* norm, int64_t width) {
    return MatvecArguments<T, W>{x,   matrix.data, matrix.scales, norm,
                                 eps, s.batch,     width,         weights.group};
  };
  JAXLLM_RETURN_IF_ERROR(matvec(stream, product(residual, weights.qkv, weights.norm1, s.width),
                                StoreQkv<T>{workspace.q, k_cache, v_cache, cos, sin, lengths,
                                            s.heads, s.kv_heads, s.length, s.head_width}));
  DecodeSizes sizes = {s.batch, s.heads, s.kv_heads, s.length, s.head_width};
  sizes.added = 1;
  sizes.overlap = kOverlap;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
  JAXLLM_RETURN_IF_ERROR(
      (CachedAttention<T, T>::run(stream, workspace.q, k_cache, v_cache, nullptr, nullptr, lengths,
                                  scale, workspace.attended, workspace.partial, sizes, s.splits)));
  JAXLLM_RETURN_IF_ERROR(matvec(stream,
                                product(workspace.attended, weights.out, nullptr, attended_width),
                                StoreProducts<T>{workspace.hidden, residual, s.width}, kOverlap));
  JAXLLM_RETURN_IF_ERROR(matvec(stream,
                                product(workspace.hidden, weights.gate_up, weights.norm2, s.width),
                                StoreSwiglu<T>{workspace.activated, s.mlp_width}, kOverlap));
  return matvec(stream, product(workspace.activated, weights.down, nullptr, s.mlp_width),
                StoreProducts<T>{out, workspace.hidden, s.width}, kOverlap);
}

template struct TransformerBlock<float, float>;
template struct TransformerBlock<float, int8_t>;
template struct TransformerBlock<__nv_bfloat16, __nv_bfloat16>;
template struct TransformerBlock<__nv_bfloat16, int8_t>;
template struct TransformerBlock<__half, __half>;
template struct TransformerBlock<__half, int8_t>;

}  // namespace jaxllm
