#include "gemm/matvec/matvec.cuh"
#include "gemm/matvec/matvec.h"

namespace jaxllm {

template <typename T, typename W>
cudaError_t MatrixVector<T, W>::run(cudaStream_t stream, const W* weight, const float* scales,
                                    int64_t group, const T* x, T* out, int64_t rows, int64_t width,
                                    int64_t count) {
  const MatvecParams<T, W> params = {x, weight, scales, nullptr, 0.0f, rows, width, group};
  return matvec(stream, params, StoreEpilogue<T>{out, nullptr, count});
}

template struct MatrixVector<float, float>;
template struct MatrixVector<float, int8_t>;
template struct MatrixVector<__nv_bfloat16, __nv_bfloat16>;
template struct MatrixVector<__nv_bfloat16, int8_t>;
template struct MatrixVector<__half, __half>;
template struct MatrixVector<__half, int8_t>;

}  // namespace jaxllm
