#include "activation/swiglu.h"
#include "activation/swiglu_each.cuh"
#include "common/elementwise.cuh"

namespace jaxllm {

template <typename T>
cudaError_t Swiglu<T>::forward(cudaStream_t stream, const T* gate, const T* up, T* out,
                               int64_t rows, int64_t width, int64_t stride) {
  return elementwise(
      stream, SwigluForward{},
      Arrays<const T, 2>{StridedRows<const T>{gate, stride}, StridedRows<const T>{up, stride}},
      Arrays<T, 1>{StridedRows<T>{out, width}}, 1, rows, width);
}

template <typename T>
cudaError_t Swiglu<T>::backward(cudaStream_t stream, const T* gate, const T* up, const T* dout,
                                T* dgate, T* dup, int64_t rows, int64_t width, int64_t stride) {
  return elementwise(
      stream, SwigluBackward{},
      Arrays<const T, 3>{StridedRows<const T>{gate, stride}, StridedRows<const T>{up, stride},
                         StridedRows<const T>{dout, width}},
      Arrays<T, 2>{StridedRows<T>{dgate, stride}, StridedRows<T>{dup, stride}}, 1, rows, width);
}

template struct Swiglu<float>;
template struct Swiglu<__nv_bfloat16>;
template struct Swiglu<__half>;

}  // namespace jaxllm
