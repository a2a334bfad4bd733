#include "norm/backward.cuh"
#include "norm/forward.cuh"
#include "norm/rms_norm.h"
#include "norm/rms_norm_formula.cuh"

namespace jaxllm {

template <typename T, typename W>
cudaError_t RmsNorm<T, W>::forward(cudaStream_t stream, const NormForwardParams<T, W>& params) {
  return norm_forward<RmsNormFormula>(stream, params);
}

template <typename T, typename W>
cudaError_t RmsNorm<T, W>::backward(cudaStream_t stream, const NormBackwardParams<T, W>& params) {
  return norm_backward<RmsNormFormula>(stream, params);
}

template struct RmsNorm<float, float>;
template struct RmsNorm<__nv_bfloat16, __nv_bfloat16>;
template struct RmsNorm<__nv_bfloat16, float>;
template struct RmsNorm<__half, __half>;
template struct RmsNorm<__half, float>;

}  // namespace jaxllm
