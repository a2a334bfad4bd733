#include "norm/backward.cuh"
#include "norm/forward.cuh"
#include "norm/layer_norm.h"
#include "norm/layer_norm_formula.cuh"

namespace jaxllm {

template <typename T, typename W>
cudaError_t LayerNorm<T, W>::forward(cudaStream_t stream, const NormForwardParams<T, W>& params) {
  return norm_forward<LayerNormFormula>(stream, params);
}

template <typename T, typename W>
cudaError_t LayerNorm<T, W>::backward(cudaStream_t stream, const NormBackwardParams<T, W>& params) {
  return norm_backward<LayerNormFormula>(stream, params);
}

template struct LayerNorm<float, float>;
template struct LayerNorm<__nv_bfloat16, __nv_bfloat16>;
template struct LayerNorm<__nv_bfloat16, float>;
template struct LayerNorm<__half, __half>;
template struct LayerNorm<__half, float>;

}  // namespace jaxllm
