// Which kernel multiplies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gemm/float32/matmul_float32.h"
#include "gemm/hopper/matmul_hopper.h"
#include "gemm/matmul.h"
#include "gemm/mma/matmul_mma.h"

namespace jaxllm {

template <typename T>
cudaError_t MatrixProduct<T>::run(cudaStream_t stream, const MatmulCall<T>& call) {
  if (call.rows == 0 || call.columns == 0) return cudaSuccess;
  if constexpr (std::is_same_v<T, float>) {
    if (!call.tf32) return matmul_float32(stream, call);
  } else {
    const cudaError_t status = MatmulHopper<T>::matmul(stream, call);
    if (status != cudaErrorNotSupported) return status;
  }
  return MatmulMma<T>::run(stream, call);
}

template struct MatrixProduct<float>;
template struct MatrixProduct<__nv_bfloat16>;
template struct MatrixProduct<__half>;

}  // namespace jaxllm
